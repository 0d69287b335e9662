"""Attention by C that is compiled for the layer's own sizes: decoding by `decode.c`, prompts by `prefill.c`.

Keys and values are read where they lie: no rows are gathered, nothing is padded. One call stores the step's rows and
attends for all decoding requests, and one attends for all prompts. Where the processor lacks what `prefill.c` is made
for, prompts go as in `cpu`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex
from allotrope.attention.family import CacheViews
from allotrope.attention.mha import cpu, reference
from allotrope.attention.mha.inputs import MhaInputs, normed_and_rotated
from allotrope.attention.mha.plan import Part, build_plan, prefill_parts
from allotrope.attention.mha.spec import MhaSpec
from allotrope.kernels.c.compiler import UNSUITED, CannotCompile, load
from allotrope.kernels.chip import Chip

_LANES = 16
# Keys that one thread scores at a time.
_PIECE = 64
# Tokens of a prompt that one thread attends for at a time.
_BLOCK = 64
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
            _library(spec)
        except CannotCompile as reason:
            reasons.append(str(reason))
    return reasons


def fallbacks(spec: MhaSpec, dtype: torch.dtype, chip: Chip) -> list[str]:
    """Which steps go the way of `cpu`, and why."""
    if dtype != spec.kv_dtype:
        return [f"every step runs as cpu: dtype={dtype} (needs kv_dtype={spec.kv_dtype})"]
    prefill = _prefill_library(spec)
    return [f"prompts run as cpu: {prefill}"] if isinstance(prefill, str) else []


@dataclass(eq=False)
class CompiledPlan:
    """`pieces`: [n, 3] int64 request, first key and end of each run of keys that a thread scores at a time; only of
    requests with one new token, which are the first of the batch. `starts`: [decodes + 1] int64, first piece of each.
    `blocks`: [n, 4] int64 request, first token, number of tokens and first position of each run of tokens of the other
    requests, those with the most keys first.
    """

    batch: BatchLayout
    paged: PageIndex
    window: int | None
    pieces: torch.Tensor
    starts: torch.Tensor
    blocks: torch.Tensor
    _scratch: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def prompts(self) -> tuple[Part, ...]:
        """The requests of `blocks` as `cpu` takes them."""
        return tuple(prefill_parts(self.window, self.batch, self.paged))

    def scratch(self, size: int) -> torch.Tensor:
        """[size] bytes, the same ones for every layer."""
        if size not in self._scratch:
            self._scratch[size] = torch.empty(size, dtype=torch.uint8)
        return self._scratch[size]


def plan(spec: MhaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> CompiledPlan:
    """Plan one step for every layer that has `spec`'s window. `index` has the entry "kv"."""
    paged = index["kv"]
    assert isinstance(paged, PageIndex)
    pieces: list[tuple[int, int, int]] = []
    starts = [0]
    for b, seen in enumerate(batch.seq_lens[: batch.num_decodes]):
        first = 0 if spec.window is None else max(0, seen - spec.window)
        pieces.extend((b, begin, min(begin + _PIECE, seen)) for begin in range(first, seen, _PIECE))
        starts.append(len(pieces))
    blocks = [
        (b, batch.query_start[b] + begin, min(_BLOCK, batch.query_lens[b] - begin), batch.context_lens[b] + begin)
        for b in range(batch.num_decodes, batch.num_requests)
        for begin in range(0, batch.query_lens[b], _BLOCK)
    ]
    blocks.sort(key=lambda block: -block[3])
    return CompiledPlan(batch, paged, spec.window, torch.tensor(pieces), torch.tensor(starts), torch.tensor(blocks))


def run(spec: MhaSpec, plan: CompiledPlan, caches: CacheViews, inputs: MhaInputs) -> torch.Tensor:
    """As `reference.run`. Where the queries are not of the cached rows' type, `cpu` runs the whole step."""
    if inputs.projected.dtype != spec.kv_dtype:
        whole = build_plan(spec, plan.batch, {"kv": plan.paged})
        return reference.run(spec, whole, caches, inputs, core=cpu.attend)
    return store_and_attend(spec, plan, caches, *normed_and_rotated(inputs), inputs.sinks)


def store_and_attend(
    spec: MhaSpec,
    plan: CompiledPlan,
    caches: CacheViews,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `reference.store_and_attend`, of rows of the queries' type."""
    library, partial_bytes = _library(spec)
    keys = caches["kv"]["k"]
    values = keys if spec.values_are_keys else caches["kv"]["v"]
    if keys.stride(3) != 1 or values.stride(3) != 1:
        raise ValueError(f"strides of keys {keys.stride()} and values {values.stride()}; the last must be 1")
    requests, paged = plan.batch.num_decodes, plan.paged
    out = q.new_empty(len(q), spec.num_heads, spec.value_dim)
    q = _side_by_side(q)
    stores = k is not None and v is not None
    k, v = (_side_by_side(k), _side_by_side(v)) if k is not None and v is not None else (q, q)
    exact_sinks = None if sinks is None else sinks.float()
    scratch = plan.scratch(len(plan.pieces) * spec.num_kv_heads * partial_bytes)
    library.store_and_attend(
        out.data_ptr(), q.data_ptr(), q.stride(0),
        k.data_ptr() if stores else None, k.stride(0), v.data_ptr(), v.stride(0), paged.slots.data_ptr(), len(q),
        keys.data_ptr(), _Strides(*keys.stride()[:3]), values.data_ptr(), _Strides(*values.stride()[:3]),
        spec.num_kv_heads, paged.page_size,
        plan.pieces.data_ptr(), plan.starts.data_ptr(), requests, paged.table.data_ptr(), paged.table.shape[1],
        spec.scale, None if exact_sinks is None else exact_sinks.data_ptr(), scratch.data_ptr(),
    )  # fmt: skip
    if not len(plan.blocks):
        return out
    prefill = _prefill_library(spec)
    if isinstance(prefill, str):
        return reference.attend_parts(spec, plan.prompts, caches, q, sinks, cpu.attend, out)
    prefill.attend_prompts(
        out.data_ptr(), q.data_ptr(), q.stride(0), keys.data_ptr(), _Strides(*keys.stride()[:3]), values.data_ptr(),
        _Strides(*values.stride()[:3]), spec.num_kv_heads, paged.page_size, plan.blocks.data_ptr(), len(plan.blocks),
        paged.table.data_ptr(), paged.table.shape[1], spec.window or 0, spec.scale,
        None if exact_sinks is None else exact_sinks.data_ptr(),
    )  # fmt: skip
    return out


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """`x`: [T, heads, dim] with the heads of a token in one piece."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@cache
def _library(spec: MhaSpec) -> tuple[ctypes.CDLL, int]:
    """The layer's functions, and the bytes of one partial result. Raises CannotCompile."""
    library = load(Path(__file__).with_name("decode.c"), spec.kv_dtype, PIECE=_PIECE, **_sizes(spec))
    library.partial_bytes.restype = _LONG
    library.store_and_attend.restype = None
    library.store_and_attend.argtypes = [
        _POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _Strides, _POINTER,
        _Strides, _LONG, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _FLOAT, _POINTER, _POINTER,
    ]  # fmt: skip
    return library, library.partial_bytes()


@cache
def _prefill_library(spec: MhaSpec) -> ctypes.CDLL | str:
    """The layer's function for prompts, or why this machine has none."""
    try:
        library = load(Path(__file__).with_name("prefill.c"), spec.kv_dtype, BLOCK=_BLOCK, **_sizes(spec))
    except CannotCompile as reason:
        return str(reason)
    if not library.suits():
        return UNSUITED
    library.attend_prompts.restype = None
    library.attend_prompts.argtypes = [
        _POINTER, _POINTER, _LONG, _POINTER, _Strides, _POINTER, _Strides, _LONG, _LONG, _POINTER, _LONG, _POINTER,
        _LONG, _LONG, _FLOAT, _POINTER,
    ]  # fmt: skip
    return library


def _sizes(spec: MhaSpec) -> dict[str, int]:
    """What the C of a layer is compiled for."""
    return {
        "DIM": spec.head_dim,
        "VALUE_DIM": spec.value_dim,
        "REPEAT": spec.num_heads // spec.num_kv_heads,
    }
