"""Compressed sparse attention by Triton kernels: the plan of a step, and the order of a layer's launches.

One launch of a layer writes all of its caches. An indexer scores entries and selects the top-k in two more. Attention
is one launch, or two with KV splits. Lists that do not depend on the layer are built once a step, by device operations
alone, so that a step of decodes can be captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.attention.batch import BatchLayout, BatchTensors, CacheIndex, PageIndex
from allotrope.attention.csa import triton_attend, triton_index, triton_store
from allotrope.attention.csa.compressor import Compression
from allotrope.attention.csa.inputs import CsaInputs
from allotrope.attention.csa.plan import SHARED_BLOCK
from allotrope.attention.csa.rows import FP8
from allotrope.attention.csa.spec import CsaSpec
from allotrope.attention.csa.triton_plan import Lists, make_lists
from allotrope.attention.dsa.sharing import Gather, SharedQueries, exchange, share
from allotrope.attention.dsa.triton_topk import top_rows
from allotrope.attention.family import CacheViews
from allotrope.attention.mla.plan import Span
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.split_kv import num_splits
from allotrope.kernels.tiles import cdiv, next_power_of_2

# Bytes of the scores of one launch of a prefill.
MAX_SCORE_BYTES = 1 << 28
# Most KV splits of a list.
MAX_SPLITS = 16


@dataclass(frozen=True)
class CsaTritonPlan:
    """`paged`: cache name -> page table and slot mapping. `lists`: cache slots that each query attends to, in `splits`
    KV splits. `bound`: most entries that a query sees. `first_row`: [B] int32, the first request of the same sequence;
    None without speculative decoding, where every request is a sequence alone. `scored`: the first of tokens that this
    rank's indexers score together, and their number; `shared`: the queries of prompts that it shares with others.
    """

    tensors: BatchTensors
    first_row: torch.Tensor | None
    paged: Mapping[str, PageIndex]
    lists: Lists
    bound: int
    splits: int
    chip: Chip
    scored: tuple[tuple[int, int], ...]
    shared: SharedQueries | None


def build_plan(spec: CsaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> CsaTritonPlan:
    """Plan one step for every layer that has `spec`. `index` has an entry for each of the spec's caches."""
    paged = {name: entry for name, entry in index.items() if isinstance(entry, PageIndex)}
    chip, longest = chip_of(batch.device), max(batch.seq_lens)
    bound = spec.visible_entries(longest)
    listed = min(bound, spec.indexer.topk) if spec.indexer is not None else bound
    tile = triton_attend.config(chip, spec.head_dim, spec.num_heads, False, True)["BLOCK_N"]
    tiles = sum(cdiv(n, tile) for n in (min(longest, spec.window), listed))
    splits = split_count(batch.num_tokens * cdiv(spec.num_heads, 64), tiles, chip.num_sms)
    entries = paged.get("compressed")
    lists = make_lists(
        spec, batch.tensors, paged["window"], entries, longest, listed=entries is not None and bound == listed
    )
    verify = batch.verify_tensors
    first_row = None if verify is None else verify.first_row
    scored, shared = _scored(spec, batch) if bound != listed else ((), None)
    return CsaTritonPlan(batch.tensors, first_row, paged, lists, bound, splits, chip, scored, shared)


def _scored(spec: CsaSpec, batch: BatchLayout) -> tuple[tuple[tuple[int, int], ...], SharedQueries | None]:
    """Which tokens this rank scores: all of a step of decodes, whose lengths only the device may know."""
    assert spec.indexer is not None
    spans = [
        Span(b, batch.query_start[b], batch.context_lens[b], batch.query_lens[b])
        for b in range(batch.num_decodes, batch.num_requests)
    ]
    own, shared = share(spans, SHARED_BLOCK, spec.indexer.rank, spec.indexer.ranks, batch.device, spec.ratio)
    if shared is None:
        return ((0, batch.num_tokens),), None
    decodes = ((0, batch.num_decodes),) if batch.num_decodes else ()
    return (*decodes, *((span.token, span.queries) for span in own)), shared


def split_count(programs: int, tiles: int, num_sms: int) -> int:
    """KV splits of each list that make `programs` lists of `tiles` tiles finish first, `num_sms` programs at a time.

    On an H200 the start and end of a program take as long as 2.4 tiles, and the merge of the splits as long as 1.3.
    """
    return num_splits(programs, tiles, num_sms, min(MAX_SPLITS, max(1, tiles)), start=2.4, merge=1.3)


def run(spec: CsaSpec, plan: CsaTritonPlan, caches: CacheViews, inputs: CsaInputs) -> torch.Tensor:
    """As the reference's `run`."""
    (q, kv), index = inputs.normed(), inputs.index
    keys = None if index is None else index.compressor
    q_rotated = _store(spec, plan, caches, q, kv, inputs.compressor, keys, inputs.kv_scale)
    entries = plan.lists.entry_list
    if spec.ratio and entries is None:
        assert index is not None
        entries = _select_topk(spec, plan, caches["index"]["k"], index.q, index.weights, index.gather)
    return _attend(spec, plan, caches, q_rotated, inputs.sinks, entries, inputs.kv_scale)


def _format(spec: CsaSpec) -> int:
    if spec.row_format == "scaled":
        return triton_store.BLOCK_SCALED.value
    return triton_store.PER_TENSOR.value if spec.kv_dtype == FP8 else triton_store.PLAIN.value


def _pool_views(spec: CsaSpec, pools: Mapping[str, torch.Tensor]) -> list[Any]:
    """Values, rope part and scales of a pool [P, rows, .], each in the type that it is read in, then their strides.

    In a block-scaled cache, values and rope part both begin at the first byte of an entry.
    """
    if spec.row_format == "plain":
        parts = [pools["kv"]] * 3
    else:
        parts = [pools["row"].view(FP8), pools["row"].view(torch.bfloat16), pools["factors"]]
    # The attention kernel addresses the pool by slot, not by page.
    assert all(part.stride(2) == 1 and part.stride(0) == part.shape[1] * part.stride(1) for part in parts)
    return [*parts, *(stride for part in parts for stride in part.stride()[:2])]


def _store(
    spec: CsaSpec, plan: CsaTritonPlan, caches: CacheViews, q: torch.Tensor, kv: torch.Tensor, main: Compression | None,
    index: Compression | None, kv_scale: float,
) -> torch.Tensor:  # fmt: skip
    """Write all caches. `main`, `index`: kv and score, position bias and norm of each compressor that the layer has.

    Returns the rotated queries [T, H, D].
    """
    assert q.stride(2) == 1 and kv.stride(1) == 1
    tensors, first_row = plan.tensors, plan.first_row
    window, pools = plan.paged["window"], caches["window"]

    def compressor(new: Compression | None, state: str, entries: str) -> tuple[list[Any], torch.Tensor]:
        """The kernel's arguments for one compressor and its state cache, and the slots of its entries."""
        if new is None:
            unused = tensors.positions
            return [unused, 0, unused, unused, unused, unused, unused, 0, 0, 0], unused
        kv_score, bias, norm = new.kv_score, new.position_bias, new.norm
        states, paged = caches[state]["kv_score"], plan.paged[state]
        assert kv_score.stride(1) == 1 and bias.is_contiguous() and states.stride(2) == 1
        rows = [kv_score, kv_score.stride(0), bias, norm, states, paged.slots, paged.table, states.stride(0)]
        return [*rows, states.stride(1), paged.table.stride(0)], plan.paged[entries].slots

    main_args, entry_slots = compressor(main, "state", "compressed")
    index_args, key_slots = compressor(index, "index_state", "index")
    entries = _pool_views(spec, caches["compressed"]) if spec.ratio else _pool_views(spec, pools)
    keys = caches["index"]["k"] if spec.indexer is not None else pools[next(iter(pools))]
    index_dim = spec.indexer.head_dim if spec.indexer is not None else 0
    launch = triton_store.config(plan.chip, spec.head_dim, spec.streams * spec.ratio)
    sizes = {name: plan.paged[name].page_size if name in plan.paged else 1 for name in ("state", "index_state")}
    q_rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    programs = 3 + cdiv(spec.num_heads, launch["BLOCK_H"])
    triton_store.store_kernel[(len(kv), programs)](
        q, q_rotated, q.stride(0), q.stride(1),
        tensors.positions, tensors.request_of_token, tensors.query_start,
        tensors.query_start if first_row is None else first_row, *plan.lists.angles, *plan.lists.first_angles,
        1.0 / kv_scale, spec.norm_eps, kv, kv.stride(0), window.slots, *_pool_views(spec, pools),
        *main_args, entry_slots, *entries, *index_args, key_slots, keys, keys.stride(0), keys.stride(1),
        W_ROWS=window.page_size, STATE_ROWS=sizes["state"], E_ROWS=entries[0].shape[1],
        I_STATE_ROWS=sizes["index_state"], I_ROWS=keys.shape[1], H=spec.num_heads, RATIO=spec.ratio,
        STREAMS=spec.streams, D=spec.head_dim, R=spec.rope.dim, BLOCK_D=next_power_of_2(spec.head_dim),
        INDEX_D=index_dim, BLOCK_I=next_power_of_2(max(1, index_dim)), FORMAT=_format(spec),
        HAS_DRAFTS=first_row is not None, **launch,
    )  # fmt: skip
    return q_rotated


def _select_topk(
    spec: CsaSpec,
    plan: CsaTritonPlan,
    keys: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    gather: Gather | None,
) -> torch.Tensor:
    """[T, n] int32 slots of the top-k entries of each query, then -1; n is topk, padded to 16 bytes. `gather`: of the
    ranks that share the scores."""
    assert spec.indexer is not None and weights.stride(1) == 1 and q.stride(2) == 1
    topk_indices = torch.empty(len(q), spec.indexer.topk, dtype=torch.int64, device=q.device)
    step = max(1, MAX_SCORE_BYTES // (4 * plan.bound))
    launches = [
        (first + begin, min(step, count - begin)) for first, count in plan.scored for begin in range(0, count, step)
    ]
    for first, tokens in launches:
        scores = triton_index.score(
            spec.indexer, spec.rope.dim, plan.chip, plan.paged["index"], keys, q, weights,
            plan.tensors.request_of_token, plan.lists.visible, plan.lists.angles, first, tokens, plan.bound,
            _precision(plan.chip, q.dtype),
        )  # fmt: skip
        rows = slice(first, first + tokens)
        top_rows(scores, plan.lists.visible[rows], spec.indexer.topk, plan.chip, topk_indices[rows], None)
    exchange(plan.shared, topk_indices, gather)
    paged = plan.paged["compressed"]
    return triton_index.resolve(paged, paged.page_size // spec.ratio, plan.tensors.request_of_token, topk_indices)


def _precision(chip: Chip, dtype: torch.dtype) -> str:
    return "tf32x3" if chip.has_tf32 and dtype == torch.float32 else "ieee"


def _attend(
    spec: CsaSpec, plan: CsaTritonPlan, caches: CacheViews, q: torch.Tensor, sinks: torch.Tensor,
    entries: torch.Tensor | None, kv_scale: float,
) -> torch.Tensor:  # fmt: skip
    """`q`: [T, H, D], rotated, contiguous. `entries`: slots of entries, the plan's or the layer's own."""
    tokens, heads, dim = q.shape
    is_fp32, splits = q.dtype == torch.float32, plan.splits
    out = torch.empty_like(q)
    partial = lse = out
    if splits > 1:
        dtype = torch.float16 if q.dtype == torch.bfloat16 else torch.float32
        partial = torch.empty(tokens, splits, heads, dim, dtype=dtype, device=q.device)
        lse = torch.empty(tokens, splits, heads, dtype=torch.float32, device=q.device)
    window = _pool_views(spec, caches["window"])
    compressed = _pool_views(spec, caches["compressed"]) if spec.ratio else window
    lists = plan.lists
    listed = entries if entries is not None else lists.window_list
    launch = triton_attend.config(plan.chip, dim, heads, is_fp32, _format(spec) == triton_store.PLAIN.value)
    sizes = {"H": heads, "D": dim, "R": spec.rope.dim, "BLOCK_D": next_power_of_2(dim), "NUM_SPLITS": splits}
    cache_scale = kv_scale if _format(spec) == triton_store.PER_TENSOR.value else 1.0
    triton_attend.attend_kernel[(tokens, cdiv(heads, launch["BLOCK_H"]), splits)](
        q, out, partial, lse, sinks, *lists.angles, lists.window_list, lists.window_lens, listed, lists.entry_lens,
        *window[:3], *window[4::2], *compressed[:3], *compressed[4::2],
        lists.window_list.stride(0), listed.stride(0), spec.scale, cache_scale,
        FORMAT=_format(spec), PRECISION=_precision(plan.chip, q.dtype), **sizes, **launch,
    )  # fmt: skip
    if splits > 1:
        block = min(8, next_power_of_2(heads))
        triton_attend.combine_kernel[(tokens, cdiv(heads, block))](
            partial, lse, sinks, *lists.angles, out, cache_scale, BLOCK_H=block, num_warps=4, **sizes
        )
    return out
