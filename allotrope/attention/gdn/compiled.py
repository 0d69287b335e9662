"""Decode by C (`decode.c`), which updates states in place; prompts as in `chunked`, with the convolution by C."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, SlotIndex
from allotrope.attention.family import CacheViews
from allotrope.attention.gdn import chunked, reference
from allotrope.attention.gdn.inputs import GdnInputs
from allotrope.attention.gdn.plan import GdnPlan, build_plan
from allotrope.attention.gdn.spec import GdnSpec
from allotrope.attention.gdn.verify import Pools, VerifyPlan, holds_drafts, plan_verify, run_verify
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
    """`new_slots`: [F] slots that are cleared first, or None. `slots`: [n] int64 of the decodes, the first n requests.
    `prompts`: the other requests; None if there are none. `verify`: in a step with drafts, its decodes."""

    new_slots: torch.Tensor | None
    slots: torch.Tensor
    prompts: GdnPlan | None
    verify: VerifyPlan | None = None


def plan(spec: GdnSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> CompiledPlan:
    """Plan one step. `index` has the entry "state"; requests whose slot is 0 or less are padding."""
    slot_index = index["state"]
    assert isinstance(slot_index, SlotIndex)
    decodes = batch.num_decodes
    prompts = build_plan(spec, batch, index, first=decodes) if decodes < batch.num_requests else None
    slots = slot_index.slots[:decodes]
    if decodes and holds_drafts(spec, batch):
        return CompiledPlan(None, slots, prompts, plan_verify(batch, slots.tolist()))
    decodes_with_context = zip(slots.tolist(), batch.context_lens, strict=False)
    new_slots = [slot for slot, context in decodes_with_context if slot > 0 and context == 0]
    return CompiledPlan(torch.tensor(new_slots, device=batch.device) if new_slots else None, slots, prompts)


def run(spec: GdnSpec, plan: CompiledPlan, caches: CacheViews, inputs: GdnInputs) -> torch.Tensor:
    """As `reference.run`."""
    pools, qkv = caches["state"], inputs.qkv
    if plan.new_slots is not None:
        for pool in pools.values():
            pool.index_fill_(0, plan.new_slots, 0)
    shape = (len(qkv), spec.num_v_heads, spec.v_head_dim)
    out = qkv.new_empty(shape) if plan.prompts is None or plan.prompts.complete else qkv.new_zeros(shape)
    requests = len(plan.slots)
    if plan.verify is not None:
        if len(plan.verify.slots) < requests:
            # The rows of drafts are written again.
            out[:requests] = 0
        run_verify(plan.verify, pools, inputs, functools.partial(_decode, spec), out)
    elif requests:
        decodes = dataclasses.replace(inputs, qkv=qkv[:requests], b=inputs.b[:requests], a=inputs.a[:requests])
        result = out[:requests] if out.dtype == spec.conv_dtype else None
        decoded = _decode(spec, pools, plan.slots, decodes, result)
        if result is None:
            out[:requests] = decoded
    if plan.prompts is not None:
        reference.run(spec, plan.prompts, caches, inputs, core=chunked.advance, out=out, feed=_conv_prompts)
    return out


def _decode(
    spec: GdnSpec, pools: Pools, slots: torch.Tensor, inputs: GdnInputs, out: torch.Tensor | None = None
) -> torch.Tensor:
    """One token for each of `slots` [n]. `out`: [n, Hv, Dv] in `conv_dtype`, overwritten; None allocates it."""
    requests = len(slots)
    if out is None:
        out = inputs.qkv.new_empty((requests, spec.num_v_heads, spec.v_head_dim), dtype=spec.conv_dtype)
    new, b, a = (x.to(spec.conv_dtype) for x in (inputs.qkv, inputs.b, inputs.a))
    new, b, a = (x if x.stride(1) == 1 else x.contiguous() for x in (new, b, a))
    fp32_weight = inputs.conv_weight.float().t().contiguous()
    fp32_bias = None if inputs.conv_bias is None else inputs.conv_bias.float()
    fp32_A_log, fp32_dt_bias = inputs.A_log.float(), inputs.dt_bias.float()
    scratch = torch.empty(requests * (spec.conv_dim + spec.num_v_heads * spec.k_head_dim), dtype=torch.float32)
    sizes = _Sizes(
        requests, spec.num_k_heads, spec.num_v_heads, spec.k_head_dim, spec.v_head_dim, spec.conv_width,
        spec.channel_decay, new.stride(0), b.stride(0), a.stride(0), pools["conv"].stride(0), pools["ssm"].stride(0),
    )  # fmt: skip
    _library(spec.conv_dtype).decode(
        out.data_ptr(), new.data_ptr(), b.data_ptr(), a.data_ptr(), pools["conv"].data_ptr(), pools["ssm"].data_ptr(),
        slots.data_ptr(), fp32_weight.data_ptr(), None if fp32_bias is None else fp32_bias.data_ptr(),
        fp32_A_log.data_ptr(), fp32_dt_bias.data_ptr(), scratch.data_ptr(), ctypes.byref(sizes),
    )  # fmt: skip
    return out


def _conv_prompts(
    spec: GdnSpec, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> reference.Heads | None:
    """Convolution, SiLU and norms of prompts as `reference` computes them; None if C does not support `inputs`."""
    if inputs.dtype != spec.conv_dtype or not inputs.is_contiguous():
        return None
    width = weight.shape[1]
    requests, length = inputs.shape[0], inputs.shape[1] - width + 1
    conv_out = torch.empty(requests, length, spec.conv_dim, dtype=torch.float32)
    fp32_weight, fp32_bias = weight.float().t().contiguous(), None if bias is None else bias.float()
    _library(spec.conv_dtype).conv_prompts(
        conv_out.data_ptr(), inputs.data_ptr(), fp32_weight.data_ptr(),
        None if fp32_bias is None else fp32_bias.data_ptr(), requests, length, spec.conv_dim, spec.num_k_heads,
        spec.k_head_dim, width,
    )  # fmt: skip
    qk = conv_out[..., : 2 * spec.key_dim].unflatten(-1, (2, spec.num_k_heads, spec.k_head_dim))
    return qk[:, :, 0], qk[:, :, 1], conv_out[..., 2 * spec.key_dim :].unflatten(-1, (spec.num_v_heads, -1))


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """The library for activations of a dtype. Raises CannotCompile."""
    library = load(Path(__file__).with_name("decode.c"), dtype)
    library.decode.argtypes = [_POINTER] * 13
    library.conv_prompts.argtypes = [_POINTER] * 4 + [_LONG] * 6
    for function in (library.decode, library.conv_prompts):
        function.restype = None
    return library
