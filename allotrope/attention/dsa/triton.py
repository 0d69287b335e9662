"""Latent attention over picked rows by Triton kernels: what a step's requests share, and the order of its launches.

A query that sees at most `topk` rows attends to all of them. In a step whose longest decode may see more, all decodes
are scored, picked for and attended with together, by what the device knows of their lengths: so it can be captured. Of
a prompt, the queries up to `topk` go the way of dense latent attention, and the others are scored in contests whose
scores fit in bounded scratch.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex
from allotrope.attention.dsa import triton_index, triton_topk
from allotrope.attention.dsa.inputs import DsaInputs
from allotrope.attention.dsa.spec import DsaSpec
from allotrope.attention.family import CacheViews
from allotrope.attention.mla import triton as mla
from allotrope.attention.mla import triton_store
from allotrope.attention.mla.inputs import normed_and_rotated
from allotrope.attention.mla.plan import Span, token_index
from allotrope.attention.mla.triton import Absorbed
from allotrope.kernels.chip import chip_of

# Bytes of the scores of one contest of a prefill, and of the absorbed queries of one launch.
SCRATCH = 1 << 28


@dataclass(frozen=True)
class Contest:
    """Queries of prompts that are scored together. `tiles`: as `triton_index.prefill_kernel` reads them."""

    part: Absorbed
    tiles: torch.Tensor


@dataclass(frozen=True)
class TritonPlan:
    """`dense`: the queries that see everything, and where latent rows go. `keys`: where index keys are and go.

    `decodes`: single queries some of which may see more than `topk` rows; None if none does. `contests`: the queries of
    prompts that see more. `seen`: [T] int32 rows that each query sees. `columns`: K of picks.
    """

    dense: mla.TritonPlan
    keys: PageIndex | None
    decodes: Absorbed | None
    contests: tuple[Contest, ...]
    seen: torch.Tensor
    columns: int

    @cached_property
    def everything(self) -> torch.Tensor:
        """[T, K] what queries that see everything pick. Made for the first layer that asks."""
        column = torch.arange(self.columns, device=self.seen.device)
        return torch.where(column < self.seen[:, None], column, -1)


def build_plan(spec: DsaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> TritonPlan:
    """Plan one step. `index` has the entry "latent", and "index" for a layer with an indexer."""
    latent, keys = index["latent"], index.get("index")
    assert isinstance(latent, PageIndex)
    assert keys is None or isinstance(keys, PageIndex)
    single = slice(0, batch.num_decodes)
    bound = max(batch.seq_lens[single], default=0)
    picking = bound > spec.topk
    few, many = [], []
    for span in mla.prefills(batch):
        count = min(span.queries, max(0, spec.topk - span.position))
        if count:
            few.append(Span(span.request, span.token, span.position, count))
        if count < span.queries:
            many.append(Span(span.request, span.token + count, span.position + count, span.queries - count))
    dense = [] if picking or not batch.num_decodes else [(single, bound)]
    seen = mla.visible(batch)
    return TritonPlan(
        mla.plan_spans(spec.mla, batch, latent, dense, few),
        keys if spec.indexer is not None else None,
        mla.group(batch, seen, single, bound) if picking else None,
        tuple(_contests(spec, batch, seen, many)),
        seen,
        min(spec.topk, max(batch.seq_lens)),
    )


def _contests(spec: DsaSpec, batch: BatchLayout, seen: torch.Tensor, spans: Sequence[Span]) -> list[Contest]:
    """Share out queries among contests of at most `SCRATCH` bytes of scores, and of absorbed queries."""
    contests: list[Contest] = []
    tokens: list[int] = []
    tiles: list[tuple[int, ...]] = []
    bound = 0
    for span in spans:
        first = 0
        while first < span.queries:
            count = min(triton_index.TILE, span.queries - first)
            reach = max(bound, span.position + first + count)
            row = max(4 * reach, 2 * spec.mla.num_heads * spec.mla.latent_dim)
            if tokens and (len(tokens) + count) * row > SCRATCH:
                contests.append(_contest(batch, seen, tokens, tiles, bound))
                tokens, tiles, bound = [], [], 0
                continue
            tiles.append((len(tokens), count, span.token + first, span.position + first, span.request))
            tokens.extend(range(span.token + first, span.token + first + count))
            bound = reach
            first += count
    if tokens:
        contests.append(_contest(batch, seen, tokens, tiles, bound))
    return contests


def _contest(
    batch: BatchLayout, seen: torch.Tensor, tokens: list[int], tiles: list[tuple[int, ...]], bound: int
) -> Contest:
    return Contest(
        mla.group(batch, seen, token_index(tokens, batch.device), bound),
        torch.tensor(tiles, dtype=torch.int32, device=batch.device),
    )


def run(spec: DsaSpec, plan: TritonPlan, caches: CacheViews, inputs: DsaInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference's `run`."""
    pools, paged = caches["latent"], plan.dense.paged
    latent, index, picks = inputs.latent, inputs.index, inputs.topk_indices
    w_uk, w_uv, kv_scale = latent.w_uk, latent.w_uv, latent.kv_scale
    q_nope, q_pe, c, k_pe = normed_and_rotated(spec.mla, latent)
    turned = None if spec.indexer is None or index is None else index.normed_and_rotated()
    triton_store.store(spec.mla, pools, paged.slots, c, k_pe, kv_scale)
    if spec.indexer is not None:
        if index is None or turned is None or plan.keys is None:
            raise ValueError("dsa: a layer with an indexer needs index_q, index_k and index_weights")
        index_q, index_k = turned
        triton_index.store(spec.indexer, caches["index"], plan.keys.slots, index_k)
        picks = pick(spec, plan, caches["index"], index_q, index.weights)
    elif picks is None:
        raise ValueError("dsa: a layer without an indexer needs the picks of an earlier layer")
    out = q_nope.new_empty(len(q_nope), spec.mla.num_heads, spec.mla.v_head_dim)
    mla.attend_parts(spec.mla, plan.dense, pools, q_nope, q_pe, w_uk, w_uv, kv_scale, out)
    picking = [contest.part for contest in plan.contests]
    if plan.decodes is not None:
        picking.append(plan.decodes)
    for part in picking:
        mla.attend_absorbed(spec.mla, pools, paged, part, q_nope, q_pe, w_uk, w_uv, kv_scale, out, picks, spec.topk)
    return out, picks


def pick(
    spec: DsaSpec, plan: TritonPlan, pools: Mapping[str, torch.Tensor], q: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Picks [T, K] int64 of every query of the step. `q`: [T, heads, d]. `weights`: [T, heads]."""
    assert spec.indexer is not None and plan.keys is not None
    if plan.decodes is None and not plan.contests:
        return plan.everything
    chip = chip_of(q.device)
    alone = plan.decodes is not None and plan.decodes.queries.seen.shape[0] == len(q)
    if alone:
        picks = torch.empty(len(q), plan.columns, dtype=torch.int64, device=q.device)
    else:
        picks = plan.everything.clone()
    if plan.decodes is not None:
        own = plan.decodes.tokens
        scores = triton_index.score_decodes(
            spec.indexer, pools, plan.keys, plan.decodes.queries, spec.topk, q[own], weights[own]
        )
        triton_topk.top_rows(scores, plan.decodes.queries.seen, spec.topk, chip, picks, None)
    for contest in plan.contests:
        queries = contest.part.queries
        scores = triton_index.score_tiles(
            spec.indexer, pools, plan.keys, contest.tiles, len(queries.seen), queries.bound, q, weights
        )
        mine = contest.part.tokens
        into, listed = (picks[mine], None) if isinstance(mine, slice) else (picks, mine)
        triton_topk.top_rows(scores, queries.seen, spec.topk, chip, into, listed)
    return picks
