"""RMS norms in one launch, with the residual sum before them and the gate after them.

A program owns a few whole rows: it reads each number once, sums in fp32, and rounds once. Bytes moved: x and y, with a
residual also the residual and the sum, with a gate also the gate, and y as e4m3 where FP8 weights read it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.matmul.fp8 import ACTIVATION_GROUP
from allotrope.ops.matmul.quantized_rows import keep_quantized, of_kernel
from allotrope.ops.matmul.triton_quantize import store_quantized
from allotrope.ops.rms_norm.reference import GateActivation

_GATES = {"": 0, "silu": 1, "sigmoid": 2}
# Numbers of a program of short rows, and of a thread.
_BLOCK = 1024
_PER_THREAD = 8


@pdl_jit(do_not_specialize=["scale_stride"])
def norm_kernel(
    x,
    residual,
    inner,
    scale,
    weight,
    gate,
    residual_out,
    out,
    values,
    scales,
    value_stride,
    scale_stride,
    rows,
    heads,
    x_token,
    x_head,
    residual_token,
    gate_token,
    gate_head,
    floor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    INNER: tl.constexpr,
    SCALE: tl.constexpr,
    GATE: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """Rows are heads of tokens: row r is head r % heads of token r // heads. Outputs are contiguous. With QUANTIZE the
    result is also stored as e4m3, into `values`; heads are then whole runs of 128 numbers, if there are several."""
    gdc_wait()
    gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < SIZE)
    token = (row // heads).to(tl.int64)
    head = row % heads
    value = tl.load(x + token * x_token + head * x_head + column, mask=mask, other=0.0).to(tl.float32)
    if INNER:
        sum_sq = tl.sum(value * value, axis=1)[:, None] + floor
        w = tl.load(inner + column, mask=column < SIZE, other=0.0).to(tl.float32)
        value = (value * tl.rsqrt(sum_sq) * w).to(x.dtype.element_ty).to(tl.float32)
    offset = row.to(tl.int64) * SIZE + column
    if RESIDUAL:
        value += tl.load(residual + token * residual_token + column, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(residual_out.dtype.element_ty)
        if SCALE:
            rounded = (rounded.to(tl.float32) * tl.load(scale).to(tl.float32)).to(residual_out.dtype.element_ty)
        tl.store(residual_out + offset, rounded, mask=mask)
        value = rounded.to(tl.float32)
    sum_sq = tl.sum(value * value, axis=1)[:, None] + floor
    value = value * tl.rsqrt(sum_sq)
    value *= tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if GATE != 0:
        z = tl.load(gate + token * gate_token + head * gate_head + column, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(z)
        value *= z * sigmoid if GATE == 1 else sigmoid
    value = value.to(out.dtype.element_ty)
    tl.store(out + offset, value, mask=mask)
    if QUANTIZE:
        RUNS: tl.constexpr = BLOCK // 128
        one = tl.arange(0, ROWS * RUNS)
        row, run = tl.program_id(0) * ROWS + one // RUNS, one % RUNS
        store_quantized(
            tl.reshape(value.to(tl.float32), (ROWS * RUNS, 128)), values, scales, (row // heads).to(tl.int64),
            row % heads * (SIZE // 128) + run, (row < rows) & (run * 128 < SIZE), value_stride, scale_stride,
        )  # fmt: skip


def config(chip: Chip, size: int) -> dict[str, int]:
    """Launch parameters by row size alone, so that a row's sum does not depend on the number of rows."""
    block = next_power_of_2(size)
    rows = max(1, _BLOCK // block)
    warp_size = 64 if chip.vendor == "amd" else 32
    num_warps = max(1, min(16 * 32 // warp_size, block * rows // (_PER_THREAD * warp_size)))
    return {"BLOCK": block, "ROWS": rows, "num_warps": next_power_of_2(num_warps), "num_stages": 1}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, floor: float, *, quantized_from: int | None = None) -> torch.Tensor:
    """As `reference.rms_norm`; of three dimensions the first two may have any strides. `quantized_from`:
    the number of rows from which those of a matrix are kept quantized to e4m3 with the result, None for never."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        view = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
        _launch(view, None, None, None, weight, None, None, out, floor, "silu", quantized_from)
    return out


def gated_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    floor: float,
    gate: torch.Tensor,
    activation: GateActivation,
    *,
    quantized_from: int | None = None,
) -> torch.Tensor:
    """As `reference.gated_rms_norm`; `x` and `gate` may have any strides but the last. `quantized_from`: as in
    `rms_norm`."""
    out = torch.empty((len(x), x.shape[1] * x.shape[2]), dtype=gate.dtype, device=x.device)
    if out.numel():
        view = gate.unflatten(1, x.shape[1:])
        _launch(x, None, None, None, weight, view, None, out, floor, activation, quantized_from)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    floor: float,
    inner: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    quantized_from: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.add_rms_norm`. `quantized_from`: as in `rms_norm`."""
    residual_out, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if out.numel():
        _launch(x[:, None], residual, inner, scale, weight, None, residual_out, out, floor, "silu", quantized_from)
    return residual_out, out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    inner: torch.Tensor | None,
    scale: torch.Tensor | None,
    weight: torch.Tensor,
    gate: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    out: torch.Tensor,
    floor: float,
    activation: GateActivation,
    quantized_from: int | None,
) -> None:
    """`x`: [T, heads, size]. Absent tensors are passed as `x`, and never read."""
    tokens, heads, size = x.shape
    assert x.stride(-1) == 1 and (gate is None or gate.stride(-1) == 1)
    launch = config(chip_of(x.device), size)
    rows = tokens * heads
    whole_runs = size % ACTIVATION_GROUP == 0 or (heads == 1 and launch["BLOCK"] >= ACTIVATION_GROUP)
    kept = keep_quantized(out, quantized_from) if whole_runs and out.dim() == 2 else None
    norm_kernel[(cdiv(rows, launch["ROWS"]),)](
        x,
        x if residual is None else residual,
        x if inner is None else inner,
        x if scale is None else scale,
        weight,
        x if gate is None else gate,
        x if residual_out is None else residual_out,
        out,
        *of_kernel(kept, x),
        rows,
        heads,
        x.stride(0),
        x.stride(1),
        0 if residual is None else residual.stride(0),
        0 if gate is None else gate.stride(0),
        0 if gate is None else gate.stride(1),
        floor,
        SIZE=size,
        RESIDUAL=residual is not None,
        INNER=inner is not None,
        SCALE=scale is not None,
        GATE=_GATES["" if gate is None else activation],
        QUANTIZE=kept is not None,
        **launch,
    )


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes: a residual of 4096 and 7168, Gemma's three steps and four, heads of a gated rule."""
    listed = []
    for name, size, dtype, flags in (
        ("norm residual 4096", 4096, "*bf16", {"RESIDUAL": True}),
        ("norm residual 7168", 7168, "*fp16", {"RESIDUAL": True}),
        ("norm sandwich 5376", 5376, "*bf16", {"RESIDUAL": True, "INNER": True}),
        ("norm sandwich scaled 5376", 5376, "*bf16", {"RESIDUAL": True, "INNER": True, "SCALE": True}),
        ("norm gated 128", 128, "*bf16", {"GATE": 1}),
        ("norm residual quantized 5120", 5120, "*bf16", {"RESIDUAL": True, "QUANTIZE": True}),
        ("norm gated quantized 128", 128, "*bf16", {"GATE": 1, "QUANTIZE": True}),
    ):
        constants: dict[str, Any] = {"SIZE": size, "RESIDUAL": False, "INNER": False}
        constants |= {"SCALE": False, "GATE": 0, "QUANTIZE": False, **flags}
        launch = config(chip, size)
        constants |= {key: launch[key] for key in ("BLOCK", "ROWS")}
        signature = dict.fromkeys(("x", "residual", "scale", "gate", "residual_out", "out"), dtype)
        signature |= (
            {"values": "*fp8e4nv:16", "scales": "*fp32:16"}
            if constants["QUANTIZE"]
            else dict.fromkeys(("values", "scales"), dtype)
        )
        signature |= dict.fromkeys(("inner", "weight"), "*fp32")
        strides = ("x_token", "x_head", "residual_token", "gate_token", "gate_head", "value_stride", "scale_stride")
        signature |= dict.fromkeys(("rows", "heads", *strides), "i32")
        signature |= {"floor": "fp32"}
        listed.append(
            Specialization(name, norm_kernel, signature, constants, launch["num_warps"], launch["num_stages"])
        )
    return listed
