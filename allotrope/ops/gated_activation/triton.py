"""Gated activations in one launch: y = act(gate) * (up + offset), in fp32, rounded once.

A program owns a run of one token's columns. Bytes moved: gate, up and y, and y as e4m3 where FP8 weights read it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_most, clamped
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.gated_activation import reference
from allotrope.ops.gated_activation.spec import GatedActivation
from allotrope.ops.matmul.quantized_rows import keep_quantized, of_kernel
from allotrope.ops.matmul.triton_quantize import store_quantized

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "sigmoid": 2}


@triton.jit
def gate(x, y, slope, limit, offset, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """act(x) * (y + offset), all fp32."""
    if LIMIT:
        x = at_most(x, limit)
        y = clamped(y, limit)
    y += offset
    if ACTIVATION == 0:
        value = x * tl.sigmoid(slope * x) * y
    elif ACTIVATION == 1:
        # x * sigmoid(2 u) is x (1 + tanh u) / 2; u = sqrt(2 / pi) (x + 0.044715 x^3).
        value = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x)) * y
    else:
        value = tl.sigmoid(x) * y
    return value


def gate_arguments(gating: GatedActivation | None) -> dict[str, Any]:
    """What kernels of products hand to `gate`, by name; None: they gate nothing."""
    one = gating or GatedActivation()
    return {
        "slope": one.slope,
        "limit": one.limit or 0.0,
        "offset": one.offset,
        "ACTIVATION": ACTIVATIONS[one.activation] if gating else -1,
        "LIMIT": one.limit is not None,
    }


@pdl_jit(do_not_specialize=["scale_stride"])
def gating_kernel(
    gates,
    up,
    out,
    values,
    scales,
    value_stride,
    scale_stride,
    width,
    gate_stride,
    up_stride,
    slope,
    limit,
    offset,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """`gates`, `up`: [T, width], any row strides. `out`: [T, width], contiguous. `ACTIVATION`: as in `ACTIVATIONS`.
    With QUANTIZE the result is also stored as e4m3, into `values`.
    """
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(gates + token * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + token * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    value = gate(x, y, slope, limit, offset, ACTIVATION, LIMIT)
    value = value.to(out.dtype.element_ty)
    tl.store(out + token * width + column, value, mask=mask)
    if QUANTIZE:
        run = tl.program_id(1) * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
        runs = tl.reshape(value.to(tl.float32), (BLOCK // 128, 128))
        store_quantized(
            runs, values, scales, token + tl.zeros_like(run), run, run * 128 < width, value_stride, scale_stride
        )


def config(chip: Chip, width: int) -> dict[str, int]:
    """Two 16-byte loads a thread."""
    block = min(1024, max(128, next_power_of_2(width)))
    warp_size = 64 if chip.vendor == "amd" else 32
    return {"BLOCK": block, "num_warps": max(1, block // (8 * warp_size)), "num_stages": 1}


def gated_activation(
    gate_up: torch.Tensor, activation: GatedActivation, *, quantized_from: int | None = None
) -> torch.Tensor:
    """As `reference.gated_activation`, of a matrix with any row stride; others go to the reference. `quantized_from`:
    the number of rows from which they are kept quantized to e4m3 with the result, None for never."""
    if gate_up.dim() != 2 or gate_up.stride(1) != 1:
        return reference.gated_activation(gate_up, activation)
    width = gate_up.shape[1] // 2
    name, slope, limit = activation.activation, activation.slope, activation.limit
    return _launch(gate_up[:, :width], gate_up[:, width:], name, slope, limit, activation.offset, quantized_from)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, *, quantized_from: int | None = None) -> torch.Tensor:
    """As `reference.sigmoid_gate`, of rows of any strides. `quantized_from`: as in `gated_activation`."""
    return _launch(gate, x, "sigmoid", 1.0, None, 0.0, quantized_from)


def _launch(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    slope: float,
    limit: float | None,
    offset: float,
    quantized_from: int | None,
) -> torch.Tensor:
    """Absent tensors are passed as `up`, and never written."""
    assert gate.stride(1) == 1 and up.stride(1) == 1
    tokens, width = gate.shape
    out = torch.empty((tokens, width), dtype=up.dtype, device=up.device)
    if not out.numel():
        return out
    launch = config(chip_of(gate.device), width)
    kept = keep_quantized(out, quantized_from)
    gating_kernel[(tokens, cdiv(width, launch["BLOCK"]))](
        gate,
        up,
        out,
        *of_kernel(kept, up),
        width,
        gate.stride(0),
        up.stride(0),
        slope,
        limit or 0.0,
        offset,
        ACTIVATION=ACTIVATIONS[activation],
        LIMIT=limit is not None,
        QUANTIZE=kept is not None,
        **launch,
    )
    return out


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Plain silu, gelu, sigmoid, a clamped silu, and silu before an FP8 weight."""
    listed = []
    for name, kind, activation, limit, quantizes in (
        ("gating silu", "*bf16", "silu", False, False),
        ("gating gelu", "*bf16", "gelu_tanh", False, False),
        ("gating sigmoid", "*bf16", "sigmoid", False, False),
        ("gating clamped", "*fp16", "silu", True, False),
        ("gating silu quantized", "*bf16", "silu", False, True),
    ):
        launch = config(chip, 14336)
        signature = dict.fromkeys(("gates", "up", "out"), kind)
        signature |= {"values": "*fp8e4nv:16" if quantizes else kind, "scales": "*fp32:16" if quantizes else kind}
        signature |= dict.fromkeys(("width", "gate_stride", "up_stride", "value_stride", "scale_stride"), "i32")
        signature |= dict.fromkeys(("slope", "limit", "offset"), "fp32")
        constants = {"BLOCK": launch["BLOCK"], "ACTIVATION": ACTIVATIONS[activation], "LIMIT": limit}
        constants |= {"QUANTIZE": quantizes}
        listed.append(
            Specialization(name, gating_kernel, signature, constants, launch["num_warps"], launch["num_stages"])
        )
    return listed
