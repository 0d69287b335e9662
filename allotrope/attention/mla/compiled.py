"""Absorbed decode by C (`decode.c`), which reads the latent KV cache in place; prompts as in `reference`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex
from allotrope.attention.family import CacheViews
from allotrope.attention.mla import reference
from allotrope.attention.mla.inputs import MlaInputs, normed_and_rotated
from allotrope.attention.mla.plan import MlaPlan, Span, build_plan, plan_reads, plan_spans
from allotrope.attention.mla.spec import MlaSpec
from allotrope.kernels.c.compiler import CannotCompile, load
from allotrope.kernels.chip import Chip

_LANES = 16
# Keys of one chunk, the unit of work of a thread; as in decode.c.
_CHUNK = 256
_DTYPES = (torch.float32, torch.bfloat16)
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
_STRIDES = _LONG * 2


class _Sizes(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("heads", "latent", "rope", "nope", "values")),
        *((name, _LONG) for name in ("tokens", "requests", "page", "table_width", "c_row", "pe_row")),
        ("scale", _FLOAT),
    )


def rejects(spec: MlaSpec, chip: Chip) -> list[str]:
    """Why this backend cannot run a layer."""
    reasons = [] if chip.vendor == "cpu" else [f"chip={chip.arch} (needs cpu)"]
    if spec.latent_dim % _LANES:
        reasons.append(f"latent_dim={spec.latent_dim} (needs a multiple of {_LANES})")
    if spec.row_format != "plain" or spec.kv_dtype not in _DTYPES:
        reasons.append(f"rows={spec.row_format} {spec.kv_dtype} (needs plain float32 or bfloat16)")
    if not reasons:
        try:
            _library(spec.kv_dtype)
        except CannotCompile as reason:
            reasons.append(str(reason))
    return reasons


def fallbacks(spec: MlaSpec, dtype: torch.dtype, chip: Chip) -> list[str]:
    """The steps that run as `reference` instead, each with its reason. Prompts always do."""
    if dtype == spec.kv_dtype:
        return []
    return [f"every step runs as reference: dtype={dtype} (needs kv_dtype={spec.kv_dtype})"]


@dataclass(frozen=True)
class CompiledPlan:
    """`chunks`: [n, 2] int64 request and first key of each chunk of keys of the decodes, which are the first requests
    of the batch. `chunk_starts`: [decodes + 1] int64, first chunk of each decode. `kv_lens`: [decodes] int64.
    `prompts`: plan of the other requests, if there are any.
    """

    batch: BatchLayout
    paged: PageIndex
    chunks: torch.Tensor
    chunk_starts: torch.Tensor
    kv_lens: torch.Tensor
    prompts: MlaPlan | None


def plan(spec: MlaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> CompiledPlan:
    """Plan one step for every layer with `spec`'s sizes. `index` has the entry "latent"."""
    paged = index["latent"]
    assert isinstance(paged, PageIndex)
    decodes = batch.num_decodes
    kv_lens = batch.seq_lens[:decodes]
    chunks = [(b, first) for b, kv_len in enumerate(kv_lens) for first in range(0, kv_len, _CHUNK)]
    chunk_starts = [0]
    for kv_len in kv_lens:
        chunk_starts.append(chunk_starts[-1] - (-kv_len // _CHUNK))
    spans = [
        Span(b, batch.query_start[b], batch.context_lens[b], batch.query_lens[b])
        for b in range(decodes, batch.num_requests)
    ]
    prompts = plan_reads(spec, paged, spans) if spans else None
    return CompiledPlan(batch, paged, torch.tensor(chunks), torch.tensor(chunk_starts), torch.tensor(kv_lens), prompts)


def run(spec: MlaSpec, plan: CompiledPlan, caches: CacheViews, inputs: MlaInputs) -> torch.Tensor:
    """As `reference.run`, which runs the whole step where the queries are not of the cached rows' type."""
    if inputs.q.dtype != spec.kv_dtype:
        whole = build_plan(spec, plan.batch, {"latent": plan.paged})
        return reference.run(spec, whole, caches, inputs)
    return store_and_attend(spec, plan, caches, *normed_and_rotated(spec, inputs), inputs.w_uk, inputs.w_uv)


def store_only(spec: MlaSpec, plan: CompiledPlan, caches: CacheViews, inputs: MlaInputs) -> None:
    """As `reference.store_only`."""
    reference.store_only(spec, plan_spans(spec, plan.paged, ()), caches, inputs)


def store_and_attend(
    spec: MlaSpec,
    plan: CompiledPlan,
    caches: CacheViews,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    c: torch.Tensor,
    k_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
) -> torch.Tensor:
    """As `reference.store_and_attend`, of queries of the KV cache's dtype."""
    pools, paged = caches["latent"], plan.paged
    tokens, requests = len(q_nope), plan.batch.num_decodes
    sizes = _Sizes(
        spec.num_heads, spec.latent_dim, spec.rope_dim, spec.nope_dim, spec.v_head_dim,
        tokens, requests, paged.page_size, paged.table.shape[1], pools["c"].stride(1), pools["k_pe"].stride(1),
        spec.scale,
    )  # fmt: skip
    query_size = spec.latent_dim - (-spec.rope_dim // _LANES) * _LANES
    scratch = torch.empty(
        spec.num_heads * (requests * query_size + len(plan.chunks) * (2 + spec.latent_dim)), dtype=torch.float32
    )
    out = q_nope.new_empty(tokens, spec.num_heads, spec.v_head_dim)
    q_nope, q_pe, c, k_pe = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_nope, q_pe, c, k_pe))
    _library(spec.kv_dtype)(
        out.data_ptr(), q_nope.data_ptr(), _STRIDES(*q_nope.stride()[:2]), q_pe.data_ptr(),
        _STRIDES(*q_pe.stride()[:2]), c.data_ptr(), c.stride(0), k_pe.data_ptr(), k_pe.stride(0),
        paged.slots.data_ptr(), pools["c"].data_ptr(), pools["k_pe"].data_ptr(), w_uk.contiguous().data_ptr(),
        w_uv.contiguous().data_ptr(), plan.chunks.data_ptr(), plan.chunk_starts.data_ptr(), plan.kv_lens.data_ptr(),
        paged.table.data_ptr(), scratch.data_ptr(), ctypes.byref(sizes),
    )  # fmt: skip
    if plan.prompts is not None:
        reference.attend_planned(spec, plan.prompts, pools, q_nope, q_pe, w_uk, w_uv, out)
    return out


@cache
def _library(dtype: torch.dtype) -> ctypes._NamedFuncPointer:
    """The C function for a KV cache of a dtype. Raises CannotCompile."""
    source = Path(__file__).with_name("decode.c")
    function = load(source, dtype).store_and_decode
    function.restype = None
    function.argtypes = [*[_POINTER] * 6, _LONG, _POINTER, _LONG, *[_POINTER] * 11]
    return function
