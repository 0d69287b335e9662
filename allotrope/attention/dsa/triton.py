"""DeepSeek sparse attention by Triton kernels: the plan of a step, and the order of its launches.

A query whose KV length is at most `topk` runs dense MLA. In a step whose longest decode may exceed it, all decodes run
sparse together, by their lengths on the device, so that the step can be captured. The queries of a prompt up to `topk`
run dense MLA, and the others are scored in chunks, whose scores fit into bounded scratch.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex, on_device
from allotrope.attention.dsa import triton_index, triton_topk
from allotrope.attention.dsa.inputs import DsaInputs, missing_inputs
from allotrope.attention.dsa.sharing import Gather, SharedQueries, exchange, share
from allotrope.attention.dsa.spec import DsaSpec
from allotrope.attention.family import CacheViews
from allotrope.attention.mla import triton as mla
from allotrope.attention.mla import triton_store
from allotrope.attention.mla.inputs import normed_and_rotated
from allotrope.attention.mla.plan import Span, token_index
from allotrope.attention.mla.triton import Absorbed
from allotrope.kernels.chip import chip_of

# Bytes of the scores of one chunk of a prefill, and of the absorbed queries of one launch.
MAX_SCORE_BYTES = 1 << 28


@dataclass(frozen=True)
class ScoreChunk:
    """Queries of prompts that are scored together. `tiles`: as in `triton_index.prefill_kernel`."""

    absorbed: Absorbed
    tiles: torch.Tensor


@dataclass(frozen=True)
class TritonPlan:
    """`dense`: the queries of dense MLA, and the latent cache's pages. `keys`: page table and slots of the index keys.

    `decodes`: decodes some of which may have sparse indices; None if none has. `chunks`: the queries of prompts with
    sparse indices; `scored`: those of them that this rank scores, and `shared`: where it shares them with others.
    `kv_lens`: [T] int32 KV length of each query. `columns`: K of the top-k indices.
    """

    dense: mla.TritonPlan
    keys: PageIndex | None
    decodes: Absorbed | None
    chunks: tuple[ScoreChunk, ...]
    scored: tuple[ScoreChunk, ...]
    shared: SharedQueries | None
    kv_lens: torch.Tensor
    columns: int

    @cached_property
    def all_indices(self) -> torch.Tensor:
        """[T, K] indices of queries that attend to all keys. Built for the first layer that needs them."""
        column = torch.arange(self.columns, device=self.kv_lens.device)
        return torch.where(column < self.kv_lens[:, None], column, -1)


def build_plan(spec: DsaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> TritonPlan:
    """Plan one step. `index` has the entry "latent", and "index" for a layer with an indexer."""
    latent, keys = index["latent"], index.get("index")
    assert isinstance(latent, PageIndex)
    assert keys is None or isinstance(keys, PageIndex)
    single = slice(0, batch.num_decodes)
    max_kv_len = max(batch.seq_lens[single], default=0)
    any_sparse = max_kv_len > spec.topk
    dense_spans, sparse_spans = [], []
    for span in mla.prefills(batch):
        count = min(span.queries, max(0, spec.topk - span.position))
        if count:
            dense_spans.append(Span(span.request, span.token, span.position, count))
        if count < span.queries:
            sparse_spans.append(Span(span.request, span.token + count, span.position + count, span.queries - count))
    dense = [] if any_sparse or not batch.num_decodes else [(single, max_kv_len)]
    kv_lens = mla.kv_lens_of(batch)
    chunks = scored = tuple(_score_chunks(spec, batch, kv_lens, sparse_spans))
    shared: SharedQueries | None = None
    if spec.indexer is not None:
        own, shared = share(sparse_spans, triton_index.TILE, spec.indexer.rank, spec.indexer.ranks, batch.device)
        scored = chunks if shared is None else tuple(_score_chunks(spec, batch, kv_lens, own))
    return TritonPlan(
        mla.plan_spans(spec.mla, batch, latent, dense, dense_spans),
        keys if spec.indexer is not None else None,
        mla.absorbed_queries(batch, kv_lens, single, max_kv_len) if any_sparse else None,
        *(chunks, scored, shared, kv_lens),
        min(spec.topk, max(batch.seq_lens)),
    )


def _score_chunks(spec: DsaSpec, batch: BatchLayout, kv_lens: torch.Tensor, spans: Sequence[Span]) -> list[ScoreChunk]:
    """Partition queries into chunks of at most `MAX_SCORE_BYTES` bytes of scores, and of absorbed queries."""
    chunks: list[ScoreChunk] = []
    tokens: list[int] = []
    tiles: list[tuple[int, ...]] = []
    max_kv_len = 0
    for span in spans:
        first = 0
        while first < span.queries:
            count = min(triton_index.TILE, span.queries - first)
            new_max = max(max_kv_len, span.position + first + count)
            row = max(4 * new_max, 2 * spec.mla.num_heads * spec.mla.latent_dim)
            if tokens and (len(tokens) + count) * row > MAX_SCORE_BYTES:
                chunks.append(_score_chunk(batch, kv_lens, tokens, tiles, max_kv_len))
                tokens, tiles, max_kv_len = [], [], 0
                continue
            tiles.append((len(tokens), count, span.token + first, span.position + first, span.request))
            tokens.extend(range(span.token + first, span.token + first + count))
            max_kv_len = new_max
            first += count
    if tokens:
        chunks.append(_score_chunk(batch, kv_lens, tokens, tiles, max_kv_len))
    return chunks


def _score_chunk(
    batch: BatchLayout, kv_lens: torch.Tensor, tokens: list[int], tiles: list[tuple[int, ...]], max_kv_len: int
) -> ScoreChunk:
    return ScoreChunk(
        mla.absorbed_queries(batch, kv_lens, token_index(tokens, batch.device), max_kv_len),
        on_device(tiles, torch.int32, batch.device),
    )


def run(spec: DsaSpec, plan: TritonPlan, caches: CacheViews, inputs: DsaInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference's `run`."""
    pools, paged = caches["latent"], plan.dense.paged
    latent, index, topk_indices = inputs.latent, inputs.index, inputs.topk_indices
    w_uk, w_uv, kv_scale = latent.w_uk, latent.w_uv, latent.kv_scale
    q_nope, q_pe, c, k_pe = normed_and_rotated(spec.mla, latent)
    rotated = None if spec.indexer is None or index is None else index.normed_and_rotated()
    triton_store.store(spec.mla, pools, paged.slots, c, k_pe, kv_scale)
    if index is not None and rotated is not None and spec.indexer is not None and plan.keys is not None:
        index_q, index_k = rotated
        triton_index.store(spec.indexer, caches["index"], plan.keys.slots, index_k)
        topk_indices = select_topk(spec, plan, caches["index"], index_q, index.weights, index.gather)
    elif topk_indices is None:
        raise ValueError(missing_inputs(spec))
    out = q_nope.new_empty(len(q_nope), spec.mla.num_heads, spec.mla.v_head_dim)
    mla.attend_planned(spec.mla, plan.dense, pools, q_nope, q_pe, w_uk, w_uv, kv_scale, out)
    sparse_queries = [chunk.absorbed for chunk in plan.chunks]
    if plan.decodes is not None:
        sparse_queries.append(plan.decodes)
    for absorbed in sparse_queries:
        mla.attend_absorbed(
            spec.mla, pools, paged, absorbed, q_nope, q_pe, w_uk, w_uv, kv_scale, out, topk_indices, spec.topk
        )
    return out, topk_indices


def store_only(spec: DsaSpec, plan: TritonPlan, caches: CacheViews, inputs: DsaInputs) -> None:
    """As the reference's `store_only`."""
    mla.store_only(spec.mla, plan.dense, caches, inputs.latent)
    if spec.indexer is not None:
        assert inputs.index is not None and plan.keys is not None
        _, index_k = inputs.index.normed_and_rotated()
        triton_index.store(spec.indexer, caches["index"], plan.keys.slots, index_k)


def select_topk(
    spec: DsaSpec,
    plan: TritonPlan,
    pools: Mapping[str, torch.Tensor],
    q: torch.Tensor,
    weights: torch.Tensor,
    gather: Gather | None = None,
) -> torch.Tensor:
    """Top-k indices [T, K] int64 of every query of the step. `q`: [T, heads, d]. `weights`: [T, heads]. `gather`: of
    the ranks that share its work."""
    assert spec.indexer is not None and plan.keys is not None
    if plan.decodes is None and not plan.chunks:
        return plan.all_indices
    chip = chip_of(q.device)
    only_decodes = plan.decodes is not None and plan.decodes.queries.kv_lens.shape[0] == len(q)
    if only_decodes:
        topk_indices = torch.empty(len(q), plan.columns, dtype=torch.int64, device=q.device)
    else:
        topk_indices = plan.all_indices.clone()
    if plan.decodes is not None:
        tokens = plan.decodes.tokens
        scores = triton_index.score_decodes(
            spec.indexer, pools, plan.keys, plan.decodes.queries, spec.topk, q[tokens], weights[tokens]
        )
        triton_topk.top_rows(scores, plan.decodes.queries.kv_lens, spec.topk, chip, topk_indices, None)
    for chunk in plan.scored:
        queries = chunk.absorbed.queries
        scores = triton_index.score_tiles(
            spec.indexer, pools, plan.keys, chunk.tiles, len(queries.kv_lens), queries.max_kv_len, q, weights
        )
        tokens = chunk.absorbed.tokens
        out, out_rows = (topk_indices[tokens], None) if isinstance(tokens, slice) else (topk_indices, tokens)
        triton_topk.top_rows(scores, queries.kv_lens, spec.topk, chip, out, out_rows)
    exchange(plan.shared, topk_indices, gather)
    return topk_indices
