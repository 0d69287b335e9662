"""Latent attention by Triton kernels: what a step's requests share, and the order of its launches.

Single queries, and the few of a short chunk, are absorbed; the queries of a prompt meet expanded keys. A step of single
queries is planned by device operations alone, so that it can be captured.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex
from allotrope.attention.family import CacheViews
from allotrope.attention.mla import triton_decode, triton_prefill, triton_store
from allotrope.attention.mla.inputs import MlaInputs, normed_and_rotated
from allotrope.attention.mla.plan import Span, expands, token_index
from allotrope.attention.mla.spec import MlaSpec
from allotrope.attention.mla.triton_decode import Queries
from allotrope.attention.mla.triton_prefill import Expanded, plan_expanded

# Bytes of the absorbed queries of one launch of a prefill.
SCRATCH = 1 << 28


@dataclass(frozen=True)
class Absorbed:
    """Queries that are absorbed. `tokens`: which of the step's."""

    tokens: slice | torch.Tensor
    queries: Queries


@dataclass(frozen=True)
class TritonPlan:
    """`paged`: where rows lie and go. `absorbed`: groups of queries that are launched together.
    `expanded`: the prompts whose keys are expanded; None if there is none.
    """

    paged: PageIndex
    absorbed: tuple[Absorbed, ...]
    expanded: Expanded | None


def build_plan(spec: MlaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> TritonPlan:
    """Plan one step for every layer with `spec`'s sizes. `index` has the entry "latent"."""
    paged = index["latent"]
    assert isinstance(paged, PageIndex)
    decodes = [(slice(0, batch.num_decodes), max(batch.seq_lens[: batch.num_decodes]))] if batch.num_decodes else []
    return plan_spans(spec, batch, paged, decodes, prefills(batch))


def plan_spans(
    spec: MlaSpec,
    batch: BatchLayout,
    paged: PageIndex,
    decodes: Sequence[tuple[slice, int]],
    spans: Sequence[Span],
) -> TritonPlan:
    """Plan slices of single queries, each with a bound of what they see, and the several queries of each of `spans`."""
    seen = visible(batch)
    absorbed = [group(batch, seen, tokens, bound) for tokens, bound in decodes]
    few = [span for span in spans if not expands(spec, span)]
    listed = [t for span in few for t in range(span.token, span.token + span.queries)]
    size = max(1, SCRATCH // (2 * spec.num_heads * spec.latent_dim))
    for first in range(0, len(listed), size):
        tokens = token_index(listed[first : first + size], batch.device)
        absorbed.append(group(batch, seen, tokens, max(span.position + span.queries for span in few)))
    many = [span for span in spans if expands(spec, span)]
    return TritonPlan(paged, tuple(absorbed), plan_expanded(spec, many, batch.device) if many else None)


def visible(batch: BatchLayout) -> torch.Tensor:
    """[T] int32 rows that each query sees; 0 in a request that only fills up a captured size."""
    tensors = batch.tensors
    if batch.num_decodes == batch.num_requests:
        return tensors.seq_lens
    there = tensors.seq_lens[tensors.request_of_token] > 0
    return ((tensors.positions + 1) * there).to(torch.int32)


def prefills(batch: BatchLayout) -> list[Span]:
    """The requests with several new tokens."""
    given = zip(batch.query_start, batch.context_lens, batch.query_lens, strict=False)
    return [Span(b, token, position, q) for b, (token, position, q) in enumerate(given) if q > 1]


def group(batch: BatchLayout, seen: torch.Tensor, tokens: slice | torch.Tensor, bound: int) -> Absorbed:
    """`bound`: of what these queries see."""
    request, seen = batch.tensors.request_of_token[tokens], seen[tokens]
    if isinstance(tokens, slice) and tokens.start:
        # Kernels are compiled for lists that begin at multiples of 16 bytes.
        request, seen = request.clone(), seen.clone()
    return Absorbed(tokens, Queries(request, seen, bound))


def absorb(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """q_nope W_UK. `q_nope`: [t, H, P]. `w_uk`: [H, P, C]. Returns [H, t, C]."""
    return torch.bmm(q_nope.transpose(0, 1), w_uk)


def project_up(z: torch.Tensor, w_uv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """W_UV z, in `out`. `z`: [H, t, C]. `w_uv`: [H, V, C]. `out`: [t, H, V], contiguous."""
    torch.bmm(z, w_uv.transpose(1, 2), out=out.transpose(0, 1))
    return out


def run(spec: MlaSpec, plan: TritonPlan, caches: CacheViews, inputs: MlaInputs) -> torch.Tensor:
    """As the reference's `run`."""
    heads = normed_and_rotated(spec, inputs)
    return store_and_attend(spec, plan, caches, *heads, inputs.w_uk, inputs.w_uv, inputs.kv_scale)


def store_and_attend(
    spec: MlaSpec,
    plan: TritonPlan,
    caches: CacheViews,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    c: torch.Tensor,
    k_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """As the reference's `store_and_attend`."""
    pools = caches["latent"]
    triton_store.store(spec, pools, plan.paged.slots, c, k_pe, kv_scale)
    out = q_nope.new_empty(len(q_nope), spec.num_heads, spec.v_head_dim)
    attend_parts(spec, plan, pools, q_nope, q_pe, w_uk, w_uv, kv_scale, out)
    return out


def attend_parts(
    spec: MlaSpec,
    plan: TritonPlan,
    pools: Mapping[str, torch.Tensor],
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_scale: float,
    out: torch.Tensor,
) -> None:
    """Attend with all queries of `plan`, and write their rows of `out` [T, H, V]."""
    for part in plan.absorbed:
        attend_absorbed(spec, pools, plan.paged, part, q_nope, q_pe, w_uk, w_uv, kv_scale, out)
    if plan.expanded is not None:
        triton_prefill.attend(spec, pools, plan.paged, plan.expanded, q_nope, q_pe, w_uk, w_uv, kv_scale, out)


def attend_absorbed(
    spec: MlaSpec,
    pools: Mapping[str, torch.Tensor],
    paged: PageIndex,
    part: Absorbed,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_scale: float,
    out: torch.Tensor,
    picks: torch.Tensor | None = None,
    topk: int = 0,
) -> None:
    """Attend with the queries of `part`, and write their rows of `out` [T, H, V]. `picks` [T, K], `topk`: as in
    `triton_decode`.
    """
    mine = part.tokens
    q = absorb(q_nope[mine], w_uk)
    own = None if picks is None else picks[mine]
    z = triton_decode.attend(spec, pools, paged, part.queries, q, q_pe[mine], kv_scale, own, topk)
    if isinstance(mine, slice):
        project_up(z, w_uv, out[mine])
    else:
        out[mine] = project_up(z, w_uv, out.new_empty(len(mine), *out.shape[1:]))
