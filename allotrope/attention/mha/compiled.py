"""Attention on a CPU by C that is compiled for the layer's sizes: decodes by `decode.c`, prompts by `prefill.c`.

Keys and values are read from their pages, without gathering and without padding. One call stores the step's keys and
values and attends for all decodes; another attends for all prompts. Prompts run as in `cpu` where the processor lacks
the instructions of `prefill.c`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex
from allotrope.attention.family import CacheViews
from allotrope.attention.mha import cpu, reference
from allotrope.attention.mha.inputs import MhaInputs, normed_and_rotated
from allotrope.attention.mha.plan import SubBatch, build_plan, plan_of, prefill_sub_batches
from allotrope.attention.mha.spec import MhaSpec
from allotrope.kernels.c.compiler import UNSUITED, CannotCompile, load
from allotrope.kernels.c.function import CFunction
from allotrope.kernels.chip import Chip

_LANES = 16
# Keys of one chunk of a decode: the unit of work of a thread.
_CHUNK = 64
# Query tokens of one block of a prompt: the unit of work of a thread.
_BLOCK = 64
# The least number of chunks for which there is scratch in a decode step.
_MIN_CAPACITY = 8
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class _Strides(ctypes.Structure):
    _fields_ = (("page", _LONG), ("row", _LONG), ("head", _LONG))


def rejects(spec: MhaSpec, chip: Chip) -> list[str]:
    """Why this backend cannot run a layer."""
    reasons = cpu.rejects(spec, chip)
    for name, dim in (("head_dim", spec.head_dim), ("v_head_dim", spec.value_dim)):
        if dim % _LANES:
            reasons.append(f"{name}={dim} (needs a multiple of {_LANES})")
    if spec.kv_dtype not in (torch.float32, torch.bfloat16):
        reasons.append(f"kv_dtype={spec.kv_dtype} (needs float32 or bfloat16)")
    if not reasons:
        try:
            _decode(spec)
        except CannotCompile as reason:
            reasons.append(str(reason))
    return reasons


def fallbacks(spec: MhaSpec, dtype: torch.dtype, chip: Chip) -> list[str]:
    """The steps that run as `cpu` instead, each with its reason."""
    if dtype != spec.kv_dtype:
        return [f"every step runs as cpu: dtype={dtype} (needs kv_dtype={spec.kv_dtype})"]
    prefill = _prefill_library(spec)
    return [f"prompts run as cpu: {prefill}"] if isinstance(prefill, str) else []


@dataclass(eq=False)
class CompiledPlan:
    """`chunks`: [n, 3] int64 request, first key and end of each chunk of keys of the decodes, which are the first
    requests of the batch. `chunk_starts`: [decodes + 1] int64, first chunk of each decode. `blocks`: [n, 4] int64
    request, first token, number of tokens and first position of each block of query tokens of the prompts, those with
    the most keys first.
    """

    batch: BatchLayout
    paged: PageIndex
    window: int | None
    chunks: torch.Tensor
    chunk_starts: torch.Tensor
    blocks: torch.Tensor
    _scratch: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def capacity(self) -> int:
        """Chunks for which there is scratch: more than there are, so that steps to come need no more."""
        return max(_MIN_CAPACITY, 1 << (len(self.chunks) - 1).bit_length()) if len(self.chunks) else 0

    @cached_property
    def prompts(self) -> tuple[SubBatch, ...]:
        """The requests of `blocks`, as sub-batches for `cpu`."""
        return tuple(prefill_sub_batches(self.window, self.batch, self.paged))

    def scratch(self, size: int) -> torch.Tensor:
        """[size] bytes that all layers share."""
        if size not in self._scratch:
            self._scratch[size] = torch.empty(size, dtype=torch.uint8)
        return self._scratch[size]


def plan(spec: MhaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> CompiledPlan:
    """Plan one step for every layer that has `spec`'s window. `index` has the entry "kv"."""
    paged = index["kv"]
    assert isinstance(paged, PageIndex)
    chunks: list[tuple[int, int, int]] = []
    chunk_starts = [0]
    for b, kv_len in enumerate(batch.seq_lens[: batch.num_decodes]):
        first = 0 if spec.window is None else max(0, kv_len - spec.window)
        chunks.extend((b, begin, min(begin + _CHUNK, kv_len)) for begin in range(first, kv_len, _CHUNK))
        chunk_starts.append(len(chunks))
    blocks = [
        (b, batch.query_start[b] + begin, min(_BLOCK, batch.query_lens[b] - begin), batch.context_lens[b] + begin)
        for b in range(batch.num_decodes, batch.num_requests)
        for begin in range(0, batch.query_lens[b], _BLOCK)
    ]
    blocks.sort(key=lambda block: -block[3])
    return CompiledPlan(
        batch, paged, spec.window, torch.tensor(chunks), torch.tensor(chunk_starts), torch.tensor(blocks)
    )


def recorded(plan: CompiledPlan) -> tuple[Hashable, tuple[torch.Tensor, ...]]:
    """As `AttentionBackend.recorded`."""
    paged = plan.paged
    key = plan.capacity, paged.table.shape[1], len(plan.blocks)
    return key, (plan.chunks, plan.chunk_starts, paged.table, paged.slots)


def run(spec: MhaSpec, plan: CompiledPlan, caches: CacheViews, inputs: MhaInputs) -> torch.Tensor:
    """As `reference.run`. Where the queries have another dtype than the KV cache, `cpu` runs the whole step."""
    if inputs.projected.dtype != spec.kv_dtype:
        reference_plan = build_plan(spec, plan.batch, {"kv": plan.paged})
        return reference.run(spec, reference_plan, caches, inputs, core=cpu.attend)
    return store_and_attend(spec, plan, caches, *normed_and_rotated(inputs), inputs.sinks)


def store_only(spec: MhaSpec, plan: CompiledPlan, caches: CacheViews, inputs: MhaInputs) -> None:
    """As `reference.store_only`."""
    reference.store_only(spec, plan_of(plan.paged, ()), caches, inputs)


def store_and_attend(
    spec: MhaSpec,
    plan: CompiledPlan,
    caches: CacheViews,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `reference.store_and_attend`, of queries that have the dtype of the KV cache."""
    decode, partial_bytes = _decode(spec)
    keys = caches["kv"]["k"]
    values = keys if spec.values_are_keys else caches["kv"]["v"]
    if keys.stride(3) != 1 or values.stride(3) != 1:
        raise ValueError(f"strides of keys {keys.stride()} and values {values.stride()}; the last must be 1")
    requests, paged = plan.batch.num_decodes, plan.paged
    out = q.new_empty(len(q), spec.num_heads, spec.value_dim)
    q = _contiguous_heads(q)
    stores = k is not None and v is not None
    k, v = (_contiguous_heads(k), _contiguous_heads(v)) if k is not None and v is not None else (q, q)
    fp32_sinks = None if sinks is None else sinks.float()
    scratch = plan.scratch(plan.capacity * spec.num_kv_heads * partial_bytes)
    decode(
        out, q, q.stride(0), k if stores else None, k.stride(0), v, v.stride(0), paged.slots, len(q),
        keys, *keys.stride()[:3], values, *values.stride()[:3], spec.num_kv_heads, paged.page_size,
        plan.chunks, plan.chunk_starts, requests, paged.table, paged.table.shape[1], fp32_sinks, scratch, spec.scale,
    )  # fmt: skip
    if not len(plan.blocks):
        return out
    prefill = _prefill_library(spec)
    if isinstance(prefill, str):
        return reference.attend_sub_batches(spec, plan.prompts, caches, q, sinks, cpu.attend, out)
    prefill.prefill(
        out.data_ptr(), q.data_ptr(), q.stride(0), keys.data_ptr(), _Strides(*keys.stride()[:3]), values.data_ptr(),
        _Strides(*values.stride()[:3]), spec.num_kv_heads, paged.page_size, plan.blocks.data_ptr(), len(plan.blocks),
        paged.table.data_ptr(), paged.table.shape[1], spec.window or 0, spec.scale,
        None if fp32_sinks is None else fp32_sinks.data_ptr(),
    )  # fmt: skip
    return out


def _contiguous_heads(x: torch.Tensor) -> torch.Tensor:
    """`x` [T, heads, dim] with the heads of a token contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@cache
def _decode(spec: MhaSpec) -> tuple[CFunction, int]:
    """The layer's decode function, and the bytes of one partial result. Raises CannotCompile."""
    source, defines = Path(__file__).with_name("decode.c"), {"CHUNK": _CHUNK, **_sizes(spec)}
    partial_bytes = load(source, spec.kv_dtype, **defines).partial_bytes
    partial_bytes.restype = _LONG
    signature = "pplplplplplllplllllpplplppf"
    return CFunction(source, "store_and_decode", spec.kv_dtype, signature, **defines), partial_bytes()


@cache
def _prefill_library(spec: MhaSpec) -> ctypes.CDLL | str:
    """The layer's prefill library, or why this machine has none."""
    try:
        library = load(Path(__file__).with_name("prefill.c"), spec.kv_dtype, BLOCK=_BLOCK, **_sizes(spec))
    except CannotCompile as reason:
        return str(reason)
    if not library.suits():
        return UNSUITED
    library.prefill.restype = None
    library.prefill.argtypes = [
        _POINTER, _POINTER, _LONG, _POINTER, _Strides, _POINTER, _Strides, _LONG, _LONG, _POINTER, _LONG, _POINTER,
        _LONG, _LONG, _FLOAT, _POINTER,
    ]  # fmt: skip
    return library


def _sizes(spec: MhaSpec) -> dict[str, int]:
    """The constants that a layer's C is compiled for."""
    return {
        "DIM": spec.head_dim,
        "VALUE_DIM": spec.value_dim,
        "Q_PER_KV": spec.num_heads // spec.num_kv_heads,
    }
