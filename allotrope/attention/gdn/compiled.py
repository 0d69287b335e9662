"""Decoding by C (`decode.c`), which advances states where they lie; prompts as in `chunked`, fed by C."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, SlotIndex
from allotrope.attention.family import CacheViews
from allotrope.attention.gdn import chunked, reference
from allotrope.attention.gdn.inputs import GdnInputs
from allotrope.attention.gdn.plan import GdnPlan, build_plan
from allotrope.attention.gdn.spec import GdnSpec
from allotrope.kernels.c.compiler import CannotCompile, load
from allotrope.kernels.chip import Chip

_LANES = 16
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long


class _Sizes(ctypes.Structure):
    _fields_ = tuple(
        (name, _LONG)
        for name in (
            *("requests", "key_heads", "value_heads", "key_dim", "value_dim", "conv_width", "channel_decay"),
            *("qkv_stride", "b_stride", "a_stride", "conv_slot", "ssm_slot"),
        )
    )


def rejects(spec: GdnSpec, chip: Chip) -> list[str]:
    """Why this backend cannot run a layer."""
    reasons = [] if chip.vendor == "cpu" else [f"chip={chip.arch} (needs cpu)"]
    for name, size in (("v_head_dim", spec.v_head_dim), ("conv_dim", spec.conv_dim)):
        if size % _LANES:
            reasons.append(f"{name}={size} (needs a multiple of {_LANES})")
    if spec.conv_dtype not in (torch.float32, torch.bfloat16):
        reasons.append(f"conv_dtype={spec.conv_dtype} (needs float32 or bfloat16)")
    if spec.state_dtype != torch.float32:
        reasons.append(f"state_dtype={spec.state_dtype} (needs float32)")
    if not reasons:
        try:
            _library(spec.conv_dtype)
        except CannotCompile as reason:
            reasons.append(str(reason))
    return reasons


@dataclass(frozen=True)
class CompiledPlan:
    """`fresh`: [F] slots that are cleared first, or None. `slots`: [n] int64, of the first n requests, one new token
    each. `prompts`: the other requests; None if there are none."""

    fresh: torch.Tensor | None
    slots: torch.Tensor
    prompts: GdnPlan | None


def plan(spec: GdnSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> CompiledPlan:
    """Plan one step. `index` has the entry "state"; requests whose slot is 0 or less are padding."""
    where = index["state"]
    assert isinstance(where, SlotIndex)
    decodes = batch.num_decodes
    prompts = build_plan(spec, batch, index, first=decodes) if decodes < batch.num_requests else None
    slots = where.slots[:decodes]
    started = zip(slots.tolist(), batch.context_lens, strict=False)
    fresh = [slot for slot, context in started if slot > 0 and context == 0]
    return CompiledPlan(torch.tensor(fresh, device=batch.device) if fresh else None, slots, prompts)


def run(spec: GdnSpec, plan: CompiledPlan, caches: CacheViews, inputs: GdnInputs) -> torch.Tensor:
    """As `reference.run`."""
    pools, qkv, b, a = caches["state"], inputs.qkv, inputs.b, inputs.a
    if plan.fresh is not None:
        for pool in pools.values():
            pool.index_fill_(0, plan.fresh, 0)
    shape = (len(qkv), spec.num_v_heads, spec.v_head_dim)
    out = qkv.new_empty(shape) if plan.prompts is None or plan.prompts.complete else qkv.new_zeros(shape)
    requests = len(plan.slots)
    if requests:
        new, b_new, a_new = (x[:requests].to(spec.conv_dtype) for x in (qkv, b, a))
        new, b_new, a_new = (x if x.stride(1) == 1 else x.contiguous() for x in (new, b_new, a_new))
        result = out if out.dtype == spec.conv_dtype else out.new_empty(out[:requests].shape, dtype=spec.conv_dtype)
        taps = inputs.conv_weight.float().t().contiguous()
        bias = None if inputs.conv_bias is None else inputs.conv_bias.float()
        rates, shift = inputs.A_log.float(), inputs.dt_bias.float()
        scratch = torch.empty(requests * (spec.conv_dim + spec.num_v_heads * spec.k_head_dim), dtype=torch.float32)
        sizes = _Sizes(
            requests, spec.num_k_heads, spec.num_v_heads, spec.k_head_dim, spec.v_head_dim, spec.conv_width,
            spec.channel_decay, new.stride(0), b_new.stride(0), a_new.stride(0), pools["conv"].stride(0),
            pools["ssm"].stride(0),
        )  # fmt: skip
        _library(spec.conv_dtype).decode(
            result.data_ptr(), new.data_ptr(), b_new.data_ptr(), a_new.data_ptr(), pools["conv"].data_ptr(),
            pools["ssm"].data_ptr(), plan.slots.data_ptr(), taps.data_ptr(), None if bias is None else bias.data_ptr(),
            rates.data_ptr(), shift.data_ptr(), scratch.data_ptr(), ctypes.byref(sizes),
        )  # fmt: skip
        if result is not out:
            out[:requests] = result
    if plan.prompts is not None:
        reference.run(spec, plan.prompts, caches, inputs, core=chunked.advance, out=out, feed=_feed)
    return out


def _feed(
    spec: GdnSpec, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> reference.Heads | None:
    if inputs.dtype != spec.conv_dtype or not inputs.is_contiguous():
        return None
    width = weight.shape[1]
    requests, length = inputs.shape[0], inputs.shape[1] - width + 1
    mixed = torch.empty(requests, length, spec.conv_dim, dtype=torch.float32)
    taps, shift = weight.float().t().contiguous(), None if bias is None else bias.float()
    _library(spec.conv_dtype).feed(
        mixed.data_ptr(), inputs.data_ptr(), taps.data_ptr(), None if shift is None else shift.data_ptr(),
        requests, length, spec.conv_dim, spec.num_k_heads, spec.k_head_dim, width,
    )  # fmt: skip
    qk = mixed[..., : 2 * spec.key_dim].unflatten(-1, (2, spec.num_k_heads, spec.k_head_dim))
    return qk[:, :, 0], qk[:, :, 1], mixed[..., 2 * spec.key_dim :].unflatten(-1, (spec.num_v_heads, -1))


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """The functions for activations of a type. Raises CannotCompile."""
    library = load(Path(__file__).with_name("decode.c"), dtype)
    library.decode.argtypes = [_POINTER] * 13
    library.feed.argtypes = [_POINTER] * 4 + [_LONG] * 6
    for function in (library.decode, library.feed):
        function.restype = None
    return library
