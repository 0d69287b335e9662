"""Gated activations in one launch: y = act(gate) * (up + offset), in fp32, rounded once.

A program owns a run of one token's columns. Bytes moved: gate, up and y.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

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


@pdl_jit
def gating_kernel(
    gates,
    up,
    out,
    width,
    gate_stride,
    up_stride,
    slope,
    limit,
    offset,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """`gates`, `up`: [T, width], any row strides. `out`: [T, width], contiguous. `ACTIVATION`: as in `ACTIVATIONS`."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(gates + token * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + token * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    value = gate(x, y, slope, limit, offset, ACTIVATION, LIMIT)
    tl.store(out + token * width + column, value.to(out.dtype.element_ty), mask=mask)


def config(chip: Chip, width: int) -> dict[str, int]:
    """Two 16-byte loads a thread."""
    block = min(1024, max(128, next_power_of_2(width)))
    warp_size = 64 if chip.vendor == "amd" else 32
    return {"BLOCK": block, "num_warps": max(1, block // (8 * warp_size)), "num_stages": 1}


def gated_activation(gate_up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """As `reference.gated_activation`, of a matrix with any row stride; others go to the reference."""
    if gate_up.dim() != 2 or gate_up.stride(1) != 1:
        return reference.gated_activation(gate_up, activation)
    width = gate_up.shape[1] // 2
    name, slope, limit = activation.activation, activation.slope, activation.limit
    return _launch(gate_up[:, :width], gate_up[:, width:], name, slope, limit, activation.offset)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """As `reference.sigmoid_gate`; `x` and `gate` may have any row strides."""
    return _launch(gate, x, "sigmoid", 1.0, None, 0.0)


def _launch(
    gate: torch.Tensor, up: torch.Tensor, activation: str, slope: float, limit: float | None, offset: float
) -> torch.Tensor:
    assert gate.stride(1) == 1 and up.stride(1) == 1
    tokens, width = gate.shape
    out = torch.empty((tokens, width), dtype=up.dtype, device=up.device)
    if not out.numel():
        return out
    launch = config(chip_of(gate.device), width)
    gating_kernel[(tokens, cdiv(width, launch["BLOCK"]))](
        gate,
        up,
        out,
        width,
        gate.stride(0),
        up.stride(0),
        slope,
        limit or 0.0,
        offset,
        ACTIVATION=ACTIVATIONS[activation],
        LIMIT=limit is not None,
        **launch,
    )
    return out


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Plain silu, gelu, sigmoid, and a clamped silu."""
    listed = []
    for name, kind, activation, limit in (
        ("gating silu", "*bf16", "silu", False),
        ("gating gelu", "*bf16", "gelu_tanh", False),
        ("gating sigmoid", "*bf16", "sigmoid", False),
        ("gating clamped", "*fp16", "silu", True),
    ):
        launch = config(chip, 14336)
        signature = dict.fromkeys(("gates", "up", "out"), kind)
        signature |= dict.fromkeys(("width", "gate_stride", "up_stride"), "i32")
        signature |= dict.fromkeys(("slope", "limit", "offset"), "fp32")
        constants = {"BLOCK": launch["BLOCK"], "ACTIVATION": ACTIVATIONS[activation], "LIMIT": limit}
        listed.append(
            Specialization(name, gating_kernel, signature, constants, launch["num_warps"], launch["num_stages"])
        )
    return listed
