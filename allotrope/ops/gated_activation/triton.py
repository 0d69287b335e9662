"""Gates in one launch: y = act(gate) * (up + offset), in fp32, rounded once.

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
    there = column < width
    x = tl.load(gates + token * gate_stride + column, mask=there, other=0.0).to(tl.float32)
    y = tl.load(up + token * up_stride + column, mask=there, other=0.0).to(tl.float32)
    value = gate(x, y, slope, limit, offset, ACTIVATION, LIMIT)
    tl.store(out + token * width + column, value.to(out.dtype.element_ty), mask=there)


def config(chip: Chip, width: int) -> dict[str, int]:
    """Two 16-byte loads a thread."""
    block = min(1024, max(128, next_power_of_2(width)))
    wave = 64 if chip.vendor == "amd" else 32
    return {"BLOCK": block, "num_warps": max(1, block // (8 * wave)), "num_stages": 1}


def gated(
    gate_up: torch.Tensor, activation: str, slope: float = 1.0, limit: float | None = None, offset: float = 0.0
) -> torch.Tensor:
    """act(gate) * (up + offset), gate at most `limit` and up within +-`limit`.

    `gate_up`: [T, 2 * width], gate first, any row stride. `activation`: "silu" (x * sigmoid(slope * x)) or "gelu_tanh".
    Returns [T, width] in the same type.
    """
    width = gate_up.shape[1] // 2
    return _launch(gate_up[:, :width], gate_up[:, width:], activation, slope, limit, offset)


def opened(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate). `x`, `gate`: [T, width], any row strides. Returns [T, width]."""
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
    """Plain silu, gelu, and a clamped silu."""
    made = []
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
        made.append(
            Specialization(name, gating_kernel, signature, constants, launch["num_warps"], launch["num_stages"])
        )
    return made
