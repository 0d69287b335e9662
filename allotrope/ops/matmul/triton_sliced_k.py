"""Products of few rows whose inputs the warps of a program share out (sliced-K): no program waits for others.

    y_i = act(W_e x_i + b_e) for row i of expert e; W = value(code) * scale

A program owns BLOCK_M rows of one expert by BLOCK_N outputs, and walks along the inputs in steps of SLICES runs of
BLOCK_K: a batched product, whose batch lies across warps. At the end the program adds its slices. It has so few outputs
that there are programs enough without sharing inputs between them (split-K), whose parts would go through memory. The
weights are the left operand: the tensor cores take 16 of their rows and 8 of x. Memory traffic: the codes and scales of
chosen experts once per tile of their rows.

FP8 codes of both sides become fp16, which is exact, and the product of a run is scaled by the scales of both.
Activations are quantized before (`quantized_rows.py`): every program reads all rows, and would quantize them again.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.gated_activation.triton import ACTIVATIONS, gate, gate_arguments
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.launch import Launch
from allotrope.ops.matmul.packed_weight import PackedWeight
from allotrope.ops.matmul.plain import PLAIN
from allotrope.ops.matmul.triton_quantize import quantize_rows
from allotrope.ops.matmul.triton_tile_table import most_tiles, rows_of_tile


@triton.jit
def _add_slices(acc, w, w_scale, a, a_scale, there, FP8: tl.constexpr):
    """`acc`: [SLICES, BLOCK_N, BLOCK_M]. `w`: pointers [SLICES, BLOCK_N, BLOCK_K], `w_scale` [SLICES, BLOCK_N or 1];
    `a`: numbers [SLICES, BLOCK_K, BLOCK_M], `a_scale` [SLICES, BLOCK_M]. `there`: which weights to read."""
    codes = tl.load(w, mask=there, other=0.0)
    if FP8:
        part = tl.dot(codes.to(tl.float16), a.to(tl.float16))
        return acc + part * (w_scale[:, :, None] * a_scale[:, None, :])
    return tl.dot(codes, a, acc)


@pdl_jit(do_not_specialize=["rows", "x_scale_stride", "scale_expert", "scale_row"])
def sliced_k_kernel(
    x, x_scales, sorted_token_ids, values, scales, bias, expert_offsets, out, rows, experts, outputs, inputs, x_stride,
    x_scale_stride, expert_stride, code_stride, scale_expert, scale_row, scale_run, bias_stride, out_stride, slope,
    limit, offset, FP8: tl.constexpr, EXPERTS: tl.constexpr, GATHER: tl.constexpr, SCALE_ROWS: tl.constexpr,
    ONE_SCALE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Arguments as of `triton.product_kernel`; `inputs`: with FP8 whole runs of 128. ONE_SCALE: a program's outputs
    share their scales."""
    gdc_wait()
    gdc_launch_dependents()
    tile, block = tl.program_id(1), tl.program_id(0)
    expert = tl.full((), 0, tl.int32)
    first, end = tile * BLOCK_M, rows
    if EXPERTS:
        expert, first, end = rows_of_tile(tile, expert_offsets, experts, EXPERTS, BLOCK_M)
    if first < end:
        row = first + tl.arange(0, BLOCK_M)
        token = tl.minimum(row, end - 1)
        if GATHER:
            token = tl.load(sorted_token_ids + token)
        # All programs read the rows: one that is not there is not read in place of another.
        mine = (row < end)[None, :]
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        # Outputs behind the last are read as the last, and not written.
        own = tl.minimum(column, outputs - 1)
        depth = tl.arange(0, BLOCK_K)
        slice = tl.arange(0, SLICES)
        a = x + token.to(tl.int64)[None, None, :] * x_stride + depth[None, :, None]
        w = values + expert.to(tl.int64) * expert_stride
        w = w + own.to(tl.int64)[None, :, None] * code_stride + depth[None, None, :]
        up = w + tl.cast(outputs, tl.int64) * code_stride
        scaled = block * BLOCK_N + tl.arange(0, 1) if ONE_SCALE else own
        w_scales = scales + expert.to(tl.int64) * scale_expert
        near = w_scales + (scaled // SCALE_ROWS)[None, :] * scale_row
        far = w_scales + ((scaled + outputs) // SCALE_ROWS)[None, :] * scale_row
        a_scales = x_scales + token[None, :] if FP8 else a
        acc = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
        other = acc
        # Of a loop that names its stages Triton fetches scales ahead too, as it does tiles.
        for begin in tl.range(0, inputs, SLICES * BLOCK_K, num_stages=NUM_STAGES):
            run = begin // BLOCK_K + slice
            run_there = (run * BLOCK_K < inputs)[:, None]
            k = (run * BLOCK_K)[:, None, None]
            if FP8:
                # A run is there as a whole.
                rows_there = (run_there & mine)[:, None, :]
                weights_there = run_there[:, :, None]
                a_scale = tl.load(a_scales + run[:, None] * x_scale_stride, mask=run_there & mine, other=0.0)
                near_scale = tl.load(near + run[:, None] * scale_run, mask=run_there, other=0.0)
            else:
                rows_there = (k + depth[None, :, None] < inputs) & mine[:, None, :]
                weights_there = k + depth[None, None, :] < inputs
                # There are no scales.
                a_scale = run_there
                near_scale = run_there
            numbers = tl.load(a + k, mask=rows_there, other=0.0)
            acc = _add_slices(acc, w + k, near_scale, numbers, a_scale, weights_there, FP8)
            if ACTIVATION >= 0:
                far_scale = near_scale
                if FP8:
                    far_scale = tl.load(far + run[:, None] * scale_run, mask=run_there, other=0.0)
                other = _add_slices(other, up + k, far_scale, numbers, a_scale, weights_there, FP8)
        y = tl.sum(acc, 0)
        if BIAS:
            b = bias + expert.to(tl.int64) * bias_stride + own
            y += tl.load(b).to(tl.float32)[:, None]
        if ACTIVATION >= 0:
            gated = tl.sum(other, 0)
            if BIAS:
                gated += tl.load(b + outputs).to(tl.float32)[:, None]
            y = gate(y, gated, slope, limit, offset, ACTIVATION, LIMIT)
        there = mine & (column < outputs)[:, None]
        tl.store(out + row.to(tl.int64)[None, :] * out_stride + column[:, None], y.to(out.dtype.element_ty), mask=there)


def multiply(
    x: torch.Tensor,
    weight: PackedWeight,
    launch: Launch,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    expert_offsets: torch.Tensor | None = None,
    sorted_token_ids: torch.Tensor | None = None,
    gating: GatedActivation | None = None,
) -> None:
    """Arguments as of `providers.multiply`; `out` is written. The weight is FP8 or plain."""
    fp8 = weight.format.name == "fp8"
    x_scales = None
    if fp8:
        x, x_scales = quantize_rows(x)
    rows, outputs = out.shape
    tiles = cdiv(rows, launch.block_m) if expert_offsets is None else most_tiles(rows, expert_offsets, launch.block_m)
    sliced_k_kernel[(cdiv(outputs, launch.block_n), tiles)](
        x, x_scales, sorted_token_ids, weight.values, weight.scales, bias, expert_offsets, out, rows, weight.experts,
        outputs, weight.padded_inputs, x.stride(0), x_scales.stride(1) if x_scales is not None else 0,
        weight.values.stride(0), weight.values.stride(1), weight.scales.stride(0), weight.scales.stride(1),
        0 if weight.row_scales else weight.scales.stride(2),
        bias.stride(0) if bias is not None and bias.dim() == 2 else 0, out.stride(0),
        **gate_arguments(gating), GATHER=sorted_token_ids is not None, BIAS=bias is not None,
        **_constants(weight, outputs, launch), num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip


def _constants(weight: PackedWeight, outputs: int, launch: Launch) -> dict[str, Any]:
    fp8 = weight.format.name == "fp8"
    return {
        "FP8": fp8,
        "EXPERTS": next_power_of_2(weight.experts) if weight.experts else 0,
        "SCALE_ROWS": weight.scale_rows,
        "ONE_SCALE": fp8 and weight.scale_rows % launch.block_n == 0 and outputs % launch.block_n == 0,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "BLOCK_K": 128 if fp8 else launch.block_k,
        "SLICES": launch.split_k,
        "NUM_STAGES": launch.num_stages,
    }


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Few rows of one weight in both formats, and of experts; not fewer than the matrix units of a chip take."""
    made, rows = [], 8 if chip.vendor == "nvidia" else 16
    for name, kind, experts, launch in (
        ("fp8", "fp8", 0, Launch(rows, 16, 8, num_stages=3, provider="sliced_k")),
        ("fp8 experts gated", "fp8", 512, Launch(rows, 16, 4, num_stages=3, provider="sliced_k")),
        ("plain", "plain", 0, Launch(rows, 16, 8, num_stages=3, provider="sliced_k", block_k=64)),
    ):
        fp8 = kind == "fp8"
        none = torch.empty(0)
        weight = PackedWeight(Fp8(128) if fp8 else PLAIN, none, none, 12288, 2048, 2048, 128, False, experts, False)
        numbers = "*fp8e4nv:16" if fp8 else "*bf16:16"
        signature = {"x": numbers, "values": numbers, "scales": "*fp32:16" if fp8 else numbers, "out": "*bf16:16"}
        signature |= dict.fromkeys(("rows", "experts", "x_scale_stride", "scale_expert", "scale_row"), "i32")
        signature |= dict.fromkeys(("outputs", "inputs", "x_stride", "expert_stride"), "i32:16")
        signature |= dict.fromkeys(("code_stride", "out_stride"), "i32:16")
        signature |= dict.fromkeys(("slope", "limit", "offset"), "fp32")
        constants: dict[str, Any] = {"GATHER": experts > 0, "BIAS": False, "LIMIT": False, "bias": None}
        constants |= {"ACTIVATION": ACTIVATIONS["silu"] if experts else -1, "scale_run": 1, "bias_stride": 1}
        constants |= _constants(weight, 6144 if experts else 12288, launch)
        for present, names, kind_of in (
            (fp8, ("x_scales",), "*fp32:16"),
            (experts > 0, ("sorted_token_ids", "expert_offsets"), "*i32:16"),
        ):
            where: dict[str, Any] = signature if present else constants
            where |= dict.fromkeys(names, kind_of if present else None)
        made.append(
            Specialization(
                f"{name} sliced-K", sliced_k_kernel, signature, constants, launch.num_warps, launch.num_stages
            )
        )
    return made
