"""Multi-head latent attention by Triton and Gluon kernels: the plan of a step, and the order of its launches.

Decodes, and chunks of few queries, use the absorbed form; prompts use decompressed keys and values (MHA form). The plan
of a step of decodes is built by device operations alone, so that the step can be captured.
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
from allotrope.attention.mla.plan import Span, decompresses, token_index
from allotrope.attention.mla.spec import MlaSpec
from allotrope.attention.mla.triton_decode import Queries
from allotrope.attention.mla.triton_prefill import Decompressed, plan_decompressed

# Bytes of the absorbed queries of one launch of a prefill.
MAX_QUERY_BYTES = 1 << 28


@dataclass(frozen=True)
class Absorbed:
    """Queries that run absorbed. `tokens`: their indices in the step."""

    tokens: slice | torch.Tensor
    queries: Queries


@dataclass(frozen=True)
class TritonPlan:
    """`paged`: page table and slot mapping. `absorbed`: queries that one launch takes together. `decompressed`: the
    prompts in MHA form; None if there are none.
    """

    paged: PageIndex
    absorbed: tuple[Absorbed, ...]
    decompressed: Decompressed | None


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
    """Plan slices of decodes, each with an upper bound of its KV lengths, and the queries of each of `spans`."""
    kv_lens = kv_lens_of(batch)
    absorbed = [absorbed_queries(batch, kv_lens, tokens, max_kv_len) for tokens, max_kv_len in decodes]
    short = [span for span in spans if not decompresses(spec, span)]
    token_ids = [t for span in short for t in range(span.token, span.token + span.queries)]
    size = max(1, MAX_QUERY_BYTES // (2 * spec.num_heads * spec.latent_dim))
    for first in range(0, len(token_ids), size):
        tokens = token_index(token_ids[first : first + size], batch.device)
        absorbed.append(absorbed_queries(batch, kv_lens, tokens, max(span.position + span.queries for span in short)))
    long = [span for span in spans if decompresses(spec, span)]
    return TritonPlan(paged, tuple(absorbed), plan_decompressed(spec, long, batch.device) if long else None)


def kv_lens_of(batch: BatchLayout) -> torch.Tensor:
    """[T] int32 KV length of each query; 0 in a padding row of a captured size."""
    tensors = batch.tensors
    if batch.num_decodes == batch.num_requests:
        return tensors.seq_lens
    is_real = tensors.seq_lens[tensors.request_of_token] > 0
    return ((tensors.positions + 1) * is_real).to(torch.int32)


def prefills(batch: BatchLayout) -> list[Span]:
    """The requests with several new tokens."""
    requests = zip(batch.query_start, batch.context_lens, batch.query_lens, strict=False)
    return [Span(b, token, position, q) for b, (token, position, q) in enumerate(requests) if q > 1]


def absorbed_queries(
    batch: BatchLayout, kv_lens: torch.Tensor, tokens: slice | torch.Tensor, max_kv_len: int
) -> Absorbed:
    """The queries `tokens` as one launch takes them. `max_kv_len`: an upper bound of their KV lengths."""
    request, kv_lens = batch.tensors.request_of_token[tokens], kv_lens[tokens]
    if isinstance(tokens, slice) and tokens.start:
        # Kernels are specialized for pointers that are multiples of 16 bytes.
        request, kv_lens = request.clone(), kv_lens.clone()
    return Absorbed(tokens, Queries(request, kv_lens, max_kv_len))


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


def store_only(spec: MlaSpec, plan: TritonPlan, caches: CacheViews, inputs: MlaInputs) -> None:
    """As the reference's `store_only`."""
    heads = normed_and_rotated(spec, inputs)
    triton_store.store(spec, caches["latent"], plan.paged.slots, heads.c, heads.k_pe, inputs.kv_scale)


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
    attend_planned(spec, plan, pools, q_nope, q_pe, w_uk, w_uv, kv_scale, out)
    return out


def attend_planned(
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
    """Attend for all queries of `plan`, and write their tokens of `out` [T, H, V]."""
    for absorbed in plan.absorbed:
        attend_absorbed(spec, pools, plan.paged, absorbed, q_nope, q_pe, w_uk, w_uv, kv_scale, out)
    if plan.decompressed is not None:
        triton_prefill.attend(spec, pools, plan.paged, plan.decompressed, q_nope, q_pe, w_uk, w_uv, kv_scale, out)


def attend_absorbed(
    spec: MlaSpec,
    pools: Mapping[str, torch.Tensor],
    paged: PageIndex,
    absorbed: Absorbed,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_scale: float,
    out: torch.Tensor,
    topk_indices: torch.Tensor | None = None,
    topk: int = 0,
) -> None:
    """Attend for the queries of `absorbed`, and write their tokens of `out` [T, H, V].

    `topk_indices` [T, K], `topk`: as in `triton_decode`.
    """
    tokens = absorbed.tokens
    q = absorb(q_nope[tokens], w_uk)
    own_indices = None if topk_indices is None else topk_indices[tokens]
    z = triton_decode.attend(spec, pools, paged, absorbed.queries, q, q_pe[tokens], kv_scale, own_indices, topk)
    if isinstance(tokens, slice):
        project_up(z, w_uv, out[tokens])
    else:
        out[tokens] = project_up(z, w_uv, out.new_empty(len(tokens), *out.shape[1:]))
