"""The middle of a gated feed-forward block in one launch: y = act(gate) * (up + offset), in fp32, rounded once.

A program owns a run of one token's columns. Bytes moved: gate, up and y.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from allotrope.attention.ahead import Variant

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


@triton.jit
def gating_kernel(
    gate_up,
    out,
    width,
    row_stride,
    slope,
    limit,
    offset,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """`gate_up`: [T, 2 * width], gate first. `out`: [T, width], contiguous."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    start = gate_up + token * row_stride
    gate = tl.load(start + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(start + width + column, mask=there, other=0.0).to(tl.float32)
    if LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    # gelu's tanh form is x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else slope * gate
    value = gate * tl.sigmoid(inner) * (up + offset)
    tl.store(out + token * width + column, value.to(out.dtype.element_ty), mask=there)


def config(arch: str, width: int) -> dict[str, int]:
    """Two 16-byte loads a thread."""
    block = min(1024, max(128, triton.next_power_of_2(width)))
    wave = 64 if arch.startswith("gfx") else 32
    return {"BLOCK": block, "num_warps": max(1, block // (8 * wave)), "num_stages": 1}


def gated(
    gate_up: torch.Tensor, activation: str, slope: float = 1.0, limit: float | None = None, offset: float = 0.0
) -> torch.Tensor:
    """act(gate) * (up + offset), gate at most `limit` and up within +-`limit`.

    `gate_up`: [T, 2 * width], gate first, any row stride. `activation`: "silu" (x * sigmoid(slope * x)) or "gelu_tanh".
    Returns [T, width] in the same type.
    """
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if not out.numel():
        return out
    launch = config("gfx942" if torch.version.hip else "sm_90", width)
    gating_kernel[(tokens, triton.cdiv(width, launch["BLOCK"]))](
        gate_up,
        out,
        width,
        gate_up.stride(0),
        slope,
        limit or 0.0,
        offset,
        GELU=activation == "gelu_tanh",
        LIMIT=limit is not None,
        **launch,
    )
    return out


def variants(arch: str) -> list[Variant]:
    """Plain silu, gelu, and a clamped silu."""
    made = []
    for name, kind, gelu, limit in (
        ("gating silu", "*bf16", False, False),
        ("gating gelu", "*bf16", True, False),
        ("gating clamped", "*fp16", False, True),
    ):
        launch = config(arch, 14336)
        signature = {"gate_up": kind, "out": kind, "width": "i32", "row_stride": "i32"}
        signature |= dict.fromkeys(("slope", "limit", "offset"), "fp32")
        constants = {"BLOCK": launch["BLOCK"], "GELU": gelu, "LIMIT": limit}
        made.append(Variant(name, gating_kernel, signature, constants, launch["num_warps"], launch["num_stages"]))
    return made
