"""Compressed sparse attention by Triton kernels: what a step's layers share, and the order of a layer's launches.

A layer writes everything in one launch, scores and picks entries in two more if it has to choose, and attends in one,
or two where a list is split. Lists that do not depend on the layer are made once a step, by device operations alone, so
that a step of single queries can be captured.
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
from allotrope.attention.csa.rows import FP8
from allotrope.attention.csa.spec import CsaSpec
from allotrope.attention.csa.triton_plan import Lists, make_lists
from allotrope.attention.dsa.triton_topk import top_rows
from allotrope.attention.family import CacheViews
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.split_kv import num_splits
from allotrope.kernels.tiles import cdiv, next_power_of_2

# Bytes of scores that are held at once in a prefill.
SCRATCH = 1 << 28
# Parts that a list is cut into at most.
MOST_SPLITS = 16


@dataclass(frozen=True)
class CsaTritonPlan:
    """`paged`: cache name -> where its rows lie. `lists`: what each query reads, in `splits` parts. `bound`: entries
    that any query sees at most.
    """

    tensors: BatchTensors
    paged: Mapping[str, PageIndex]
    lists: Lists
    bound: int
    splits: int
    chip: Chip


def build_plan(spec: CsaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> CsaTritonPlan:
    """Plan one step for every layer that has `spec`. `index` has an entry for each of the spec's caches."""
    paged = {name: entry for name, entry in index.items() if isinstance(entry, PageIndex)}
    chip, longest = chip_of(batch.device), max(batch.seq_lens)
    bound = spec.visible_entries(longest)
    listed = min(bound, spec.indexer.topk) if spec.indexer is not None else bound
    tile = triton_attend.config(chip, spec.head_dim, spec.num_heads, False, True)["TILE"]
    tiles = sum(cdiv(n, tile) for n in (min(longest, spec.window), listed))
    splits = split_count(batch.num_tokens * cdiv(spec.num_heads, 64), tiles, chip.num_sms)
    entries = paged.get("compressed")
    lists = make_lists(
        spec, batch.tensors, paged["window"], entries, longest, listed=entries is not None and bound == listed
    )
    return CsaTritonPlan(batch.tensors, paged, lists, bound, splits, chip)


def split_count(programs: int, tiles: int, slots: int) -> int:
    """Parts of each list: the number under which `programs` lists of `tiles` tiles are done first by `slots` programs
    at a time. Beginning and ending a program takes as long as 2.4 tiles on an H200, joining parts as long as 1.3.
    """
    return num_splits(programs, tiles, slots, min(MOST_SPLITS, max(1, tiles)), start=2.4, merge=1.3)


def run(spec: CsaSpec, plan: CsaTritonPlan, caches: CacheViews, inputs: CsaInputs) -> torch.Tensor:
    """As the reference's `run`."""
    (q, kv), index = inputs.normed(), inputs.index
    keys = None if index is None else index.compressor
    turned = _store(spec, plan, caches, q, kv, inputs.compressor, keys, inputs.kv_scale)
    entries = plan.lists.entry_list
    if spec.ratio and entries is None:
        assert index is not None
        entries = _pick(spec, plan, caches["index"]["k"], index.q, index.weights)
    return _attend(spec, plan, caches, turned, inputs.sinks, entries, inputs.kv_scale)


def _format(spec: CsaSpec) -> int:
    if spec.row_format == "scaled":
        return triton_store.SCALED.value
    return triton_store.PER_TENSOR.value if spec.kv_dtype == FP8 else triton_store.PLAIN.value


def _planes(spec: CsaSpec, pools: Mapping[str, torch.Tensor]) -> list[Any]:
    """Codes, rotated tail and factors of a pool [P, rows, .], each as the type it is read in, and then their strides.

    Of a scaled row codes and tail both begin at the row's first byte.
    """
    if spec.row_format == "plain":
        parts = [pools["kv"]] * 3
    else:
        parts = [pools["row"].view(FP8), pools["row"].view(torch.bfloat16), pools["factors"]]
    # Kernels that read find a row by its number alone.
    assert all(part.stride(2) == 1 and part.stride(0) == part.shape[1] * part.stride(1) for part in parts)
    return [*parts, *(stride for part in parts for stride in part.stride()[:2])]


def _store(
    spec: CsaSpec, plan: CsaTritonPlan, caches: CacheViews, q: torch.Tensor, kv: torch.Tensor, main: Compression | None,
    index: Compression | None, kv_scale: float,
) -> torch.Tensor:  # fmt: skip
    """`main`, `index`: kv and score, position bias and norm of a compressor, if the layer has it. Returns [T, H, D] the
    rotated queries."""
    assert q.stride(2) == 1 and kv.stride(1) == 1
    tensors = plan.tensors
    window, pools = plan.paged["window"], caches["window"]

    def compressor(new: Compression | None, state: str, entries: str) -> tuple[list[Any], torch.Tensor]:
        """Its input tensors and its states' pool, for the kernel; and where entries go."""
        if new is None:
            nothing = tensors.positions
            return [nothing, 0, nothing, nothing, nothing, nothing, nothing, 0, 0, 0], nothing
        given, bias, norm = new.kv_score, new.position_bias, new.norm
        states, paged = caches[state]["kv_score"], plan.paged[state]
        assert given.stride(1) == 1 and bias.is_contiguous() and states.stride(2) == 1
        rows = [given, given.stride(0), bias, norm, states, paged.slots, paged.table, states.stride(0)]
        return [*rows, states.stride(1), paged.table.stride(0)], plan.paged[entries].slots

    first, entry_slots = compressor(main, "state", "compressed")
    second, key_slots = compressor(index, "index_state", "index")
    entries = _planes(spec, caches["compressed"]) if spec.ratio else _planes(spec, pools)
    keys = caches["index"]["k"] if spec.indexer is not None else pools[next(iter(pools))]
    index_dim = spec.indexer.head_dim if spec.indexer is not None else 0
    launch = triton_store.config(plan.chip, spec.head_dim, spec.streams * spec.ratio)
    sizes = {name: plan.paged[name].page_size if name in plan.paged else 1 for name in ("state", "index_state")}
    turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kinds = 3 + cdiv(spec.num_heads, launch["HEADS"])
    triton_store.store_kernel[(len(kv), kinds)](
        q, turned, q.stride(0), q.stride(1),
        tensors.positions, tensors.request_of_token, tensors.query_start, *plan.lists.angles, *plan.lists.first_angles,
        1.0 / kv_scale, spec.norm_eps, kv, kv.stride(0), window.slots, *_planes(spec, pools),
        *first, entry_slots, *entries, *second, key_slots, keys, keys.stride(0), keys.stride(1),
        W_ROWS=window.page_size, STATE_ROWS=sizes["state"], E_ROWS=entries[0].shape[1],
        I_STATE_ROWS=sizes["index_state"], I_ROWS=keys.shape[1], H=spec.num_heads, RATIO=spec.ratio,
        STREAMS=spec.streams, D=spec.head_dim, R=spec.rope.dim, BLOCK_D=next_power_of_2(spec.head_dim),
        INDEX_D=index_dim, BLOCK_I=next_power_of_2(max(1, index_dim)), FORMAT=_format(spec), **launch,
    )  # fmt: skip
    return turned


def _pick(
    spec: CsaSpec, plan: CsaTritonPlan, keys: torch.Tensor, q: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """[T, n] int32 rows of the entries that each query attends to, -1 behind the last one; n is topk, filled up to 16
    bytes."""
    assert spec.indexer is not None and weights.stride(1) == 1 and q.stride(2) == 1
    picks = torch.empty(len(q), spec.indexer.topk, dtype=torch.int64, device=q.device)
    step = max(1, SCRATCH // (4 * plan.bound))
    for first in range(0, len(q), step):
        tokens = min(step, len(q) - first)
        scores = triton_index.score(
            spec.indexer, spec.rope.dim, plan.chip, plan.paged["index"], keys, q, weights,
            plan.tensors.request_of_token, plan.lists.visible, plan.lists.angles, first, tokens, plan.bound,
            _precision(plan.chip, q.dtype),
        )  # fmt: skip
        rows = slice(first, first + tokens)
        top_rows(scores, plan.lists.visible[rows], spec.indexer.topk, plan.chip, picks[rows], None)
    paged = plan.paged["compressed"]
    return triton_index.resolve(paged, paged.page_size // spec.ratio, plan.tensors.request_of_token, picks)


def _precision(chip: Chip, dtype: torch.dtype) -> str:
    return "tf32x3" if chip.has_tf32 and dtype == torch.float32 else "ieee"


def _attend(
    spec: CsaSpec, plan: CsaTritonPlan, caches: CacheViews, q: torch.Tensor, sinks: torch.Tensor,
    entries: torch.Tensor | None, kv_scale: float,
) -> torch.Tensor:  # fmt: skip
    """`q`: [T, H, D], rotated, contiguous. `entries`: the plan's list of rows, or a layer's own."""
    tokens, heads, dim = q.shape
    exact, splits = q.dtype == torch.float32, plan.splits
    out = torch.empty_like(q)
    partial = stats = out
    if splits > 1:
        kind = torch.float16 if q.dtype == torch.bfloat16 else torch.float32
        partial = torch.empty(tokens, splits, heads, dim, dtype=kind, device=q.device)
        stats = torch.empty(tokens, splits, heads, dtype=torch.float32, device=q.device)
    window = _planes(spec, caches["window"])
    compressed = _planes(spec, caches["compressed"]) if spec.ratio else window
    lists = plan.lists
    listed = entries if entries is not None else lists.window_list
    launch = triton_attend.config(plan.chip, dim, heads, exact, _format(spec) == triton_store.PLAIN.value)
    sizes = {"H": heads, "D": dim, "R": spec.rope.dim, "BLOCK_D": next_power_of_2(dim), "SPLITS": splits}
    row_scale = kv_scale if _format(spec) == triton_store.PER_TENSOR.value else 1.0
    triton_attend.attend_kernel[(tokens, cdiv(heads, launch["BLOCK_H"]), splits)](
        q, out, partial, stats, sinks, *lists.angles, lists.window_list, lists.window_seen, listed, lists.entry_seen,
        *window[:3], *window[4::2], *compressed[:3], *compressed[4::2],
        lists.window_list.stride(0), listed.stride(0), spec.scale, row_scale,
        FORMAT=_format(spec), PRECISION=_precision(plan.chip, q.dtype), **sizes, **launch,
    )  # fmt: skip
    if splits > 1:
        block = min(8, next_power_of_2(heads))
        triton_attend.combine_kernel[(tokens, cdiv(heads, block))](
            partial, stats, sinks, *lists.angles, out, row_scale, BLOCK_H=block, num_warps=4, **sizes
        )
    return out
