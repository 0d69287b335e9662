"""Activations as e4m3, each run of 128 numbers of a row with a scale of its own.

    scale = max |x| / 448;  code = x / scale

A program owns a few runs, of as many rows as have them. Bytes moved: x once, codes and scales once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_least, largest_of
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv
from allotrope.ops.matmul.fp8 import FP8_MAX, SMALLEST_SCALE
from allotrope.ops.matmul.quantized_rows import allocate, quantized_rows

_MANY_RUNS = 1 << 15
_LARGEST, _SMALLEST = tl.constexpr(FP8_MAX), tl.constexpr(SMALLEST_SCALE)


@triton.jit
def quantize(x):
    """`x`: [n, 128] fp32. Returns e4m3 values and scales [n]. What `fp8.quantize_rows` does to runs."""
    scale = at_least(largest_of(x, 1) / _LARGEST, _SMALLEST)
    return (x / scale[:, None]).to(tl.float8e4nv), scale


@triton.jit
def store_quantized(x, values, scales, row, run, mask, value_stride, scale_stride):
    """Store runs [n, 128] of fp32 numbers as e4m3, and their scales. `row` (int64), `run`, `mask`: [n]; the scales of a
    run lie `scale_stride` behind those of the one before, rows side by side."""
    value, scale = quantize(x)
    column = run[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(values + row[:, None] * value_stride + column, value, mask=mask[:, None])
    tl.store(scales + run.to(tl.int64) * scale_stride + row, scale, mask=mask)


@pdl_jit(do_not_specialize=["tokens", "scale_stride"])
def quantize_kernel(
    x, sorted_token_ids, quantized, scales, tokens, inputs, runs, x_stride, value_stride, scale_stride,
    RUNS: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """With GATHER, row i is row `sorted_token_ids[i]` of `x`. Strides: as in `store_quantized`."""
    gdc_wait()
    gdc_launch_dependents()
    # Runs are counted through all rows: neither short rows nor long ones leave a part of a program without work.
    one = tl.program_id(0) * RUNS + tl.arange(0, RUNS)
    row, run = (one // runs).to(tl.int64), one % runs
    mask = row < tokens
    token = row
    if GATHER:
        token = tl.load(sorted_token_ids + row, mask=mask, other=0).to(tl.int64)
    column = run[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = mask[:, None] & (column < inputs)
    values = tl.load(x + token[:, None] * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    store_quantized(values, quantized, scales, row, run, mask, value_stride, scale_stride)


def quantize_rows(
    x: torch.Tensor, *, sorted_token_ids: torch.Tensor | None = None, whole: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fp8.quantize_rows`. `x`: any row stride; what is kept with it is taken (`quantized_rows.py`). The scales are
    a view whose rows lie side by side in memory.

    `sorted_token_ids`: rows of x to take, None for all. `whole`: rows are rounded up to fours, with anything in those
    that are not in x.
    """
    if x.shape[1] == 1:
        # Triton makes a constant of a 1, and of columns that are zero by that ptxas 12.8 leaves half of the values as
        # they were in its registers.
        x = torch.nn.functional.pad(x, (0, 1))
    tokens, inputs = len(x) if sorted_token_ids is None else len(sorted_token_ids), x.shape[1]
    kept = quantized_rows(x) if sorted_token_ids is None else None
    values, scales = kept or allocate(tokens, inputs, x.device)
    if tokens and kept is None:
        runs = len(scales)
        # Of many runs a thread asks for 64 bytes at once; few are shared out to as many programs as can be.
        each, warps = (16, 2) if tokens * runs >= _MANY_RUNS else (8, 4)
        quantize_kernel[(cdiv(tokens * runs, each),)](
            x, sorted_token_ids, values, scales, tokens, inputs, runs, x.stride(0), values.stride(0), scales.stride(0),
            RUNS=each, GATHER=sorted_token_ids is not None, num_warps=warps,
        )  # fmt: skip
    if whole or len(values) == tokens:
        return values, scales.t()
    return values[:tokens], scales[:, :tokens].t()


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Of bf16 activations."""
    signature = {"x": "*bf16:16", "quantized": "*fp8e4nv:16", "scales": "*fp32:16"}
    signature |= dict.fromkeys(("tokens", "inputs", "runs"), "i32") | {"x_stride": "i32:16", "value_stride": "i32:16"}
    signature |= {"scale_stride": "i32"}
    constants = {"GATHER": False, "sorted_token_ids": None}
    return [
        Specialization(
            f"activations to e4m3, {name} rows", quantize_kernel, signature, constants | {"RUNS": runs}, warps, 1
        )
        for name, runs, warps in (("few", 8, 4), ("many", 16, 2))
    ]
