"""Activations as e4m3, each run of 128 numbers of a row with a scale of its own.

    scale = max |x| / 448;  code = x / scale

A program owns a few runs of one row. Bytes moved: x once, codes and scales once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from allotrope.attention.ahead import Variant
from allotrope.attention.early import await_turn, early_jit
from allotrope.attention.mla.rows import FP8_MAX
from allotrope.attention.tile_sizes import cdiv, next_power_of_2
from allotrope.layers.quant.format import ACTIVATION_RUN, SMALLEST_SCALE

_MANY_RUNS = 1 << 15
_LARGEST, _SMALLEST = tl.constexpr(FP8_MAX), tl.constexpr(SMALLEST_SCALE)


@triton.jit
def to_codes(x):
    """`x`: [n, 128] fp32. Returns codes and scales [n]. What `format.quantize_rows` does to runs."""
    scale = tl.maximum(tl.max(tl.abs(x), 1) / _LARGEST, _SMALLEST)
    return (x / scale[:, None]).to(tl.float8e4nv), scale


@early_jit(do_not_specialize=["scale_stride"])
def quantize_kernel(
    x, source, codes, scales, inputs, runs, x_stride, code_stride, scale_stride, RUNS: tl.constexpr,
    GATHER: tl.constexpr,
):  # fmt: skip
    """Row i is row `source[i]` of `x` with GATHER. `scales`: the runs of a row lie `scale_stride` apart, rows side by
    side."""
    await_turn()
    row = tl.program_id(0).to(tl.int64)
    token = row
    if GATHER:
        token = tl.load(source + row).to(tl.int64)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    column = run[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + token * x_stride + column, mask=column < inputs, other=0.0).to(tl.float32)
    code, scale = to_codes(values)
    tl.store(codes + row * code_stride + column, code, mask=(run < runs)[:, None])
    tl.store(scales + run.to(tl.int64) * scale_stride + row, scale, mask=run < runs)


def quantize_rows(
    x: torch.Tensor, *, source: torch.Tensor | None = None, whole: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `format.quantize_rows`. `x`: any row stride. The scales are a view whose rows lie side by side in memory.

    `source`: which rows of x, all in their order if None. `whole`: rows are rounded up to fours, with anything in those
    that are not in x.
    """
    tokens, inputs = len(x) if source is None else len(source), x.shape[1]
    runs = cdiv(inputs, ACTIVATION_RUN)
    rows = -(-tokens // 4) * 4
    codes = torch.empty((rows, runs * ACTIVATION_RUN), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((runs, rows), dtype=torch.float32, device=x.device)
    if tokens:
        # Of many rows a thread asks for 64 bytes at once; of few, as many programs as there are to share them.
        many = tokens * runs >= _MANY_RUNS
        each = min(16 if many else 8, next_power_of_2(runs))
        strides = x.stride(0), codes.stride(0), scales.stride(0)
        grid = (tokens, cdiv(runs, each))
        quantize_kernel[grid](
            x, source, codes, scales, inputs, runs, *strides, RUNS=each, GATHER=source is not None,
            num_warps=max(1, each // (8 if many else 2)),
        )  # fmt: skip
    if whole or rows == tokens:
        return codes, scales.t()
    return codes[:tokens], scales[:, :tokens].t()


def variants(arch: str) -> list[Variant]:
    """Of bf16 activations."""
    signature = {"x": "*bf16:16", "codes": "*fp8e4nv:16", "scales": "*fp32:16"}
    signature |= dict.fromkeys(("inputs", "runs"), "i32") | {"x_stride": "i32:16", "code_stride": "i32:16"}
    signature |= {"scale_stride": "i32"}
    constants = {"GATHER": False, "source": None}
    return [
        Variant(f"activations to e4m3, {name} rows", quantize_kernel, signature, constants | {"RUNS": runs}, warps, 1)
        for name, runs, warps in (("few", 8, 4), ("many", 16, 2))
    ]
