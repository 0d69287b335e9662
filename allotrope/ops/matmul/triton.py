"""Products of rows with quantized weights, or plain ones: one weight or one per expert, in one kernel.

    y_i = act(W_e x_i + b_e) for row i of expert e; W = value(code) * scale

A program owns BLOCK_M rows of one expert by BLOCK_N outputs and walks along the inputs, 128 at a time. For few rows the
weights are the left operand of the product, whose rows the tensor cores want in large numbers, and the inputs may be
shared by several programs; the last to finish adds their parts, in order. Memory traffic: the codes and scales of
chosen experts once per tile of their rows.

Plain weights are multiplied as they are; so are FP8 ones, by activations that are rounded here or were before. 4-bit
weights become bf16 in registers, which is exact (`triton_fp4`).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.side_stream import on_side_stream
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.gated_activation.triton import ACTIVATIONS, gate, gate_arguments
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.int4 import Int4
from allotrope.ops.matmul.launch import (
    Launch,
    Shape,
    rule_of_thumb,
    within,
)
from allotrope.ops.matmul.mxfp4 import MXFP4
from allotrope.ops.matmul.packed_weight import PackedWeight, multiplies_pairs
from allotrope.ops.matmul.plain import PLAIN
from allotrope.ops.matmul.scratch import PARTS, TILES, scratch
from allotrope.ops.matmul.tile_tables import TileTables
from allotrope.ops.matmul.triton_fp4 import walk_fp4
from allotrope.ops.matmul.triton_int4 import walk_int4
from allotrope.ops.matmul.triton_quantize import quantize, quantize_rows
from allotrope.ops.matmul.triton_tile_table import most_tiles, rows_of_tile, table_of_tiles
from allotrope.ops.matmul.weight import Format


@triton.jit
def _add_fp8(acc, a, a_scale, w, w_scale, SWAP_AB: tl.constexpr, UPCAST: tl.constexpr, ONE_SCALE: tl.constexpr):
    """`w_scale`: [BLOCK_N], or with ONE_SCALE the same number for each row [BLOCK_M]."""
    if UPCAST:
        a, w = a.to(tl.bfloat16), w.to(tl.bfloat16)
    if SWAP_AB:
        if ONE_SCALE:
            acc += tl.dot(w, tl.trans(a)) * (w_scale * a_scale)[None, :]
        else:
            acc += tl.dot(w, tl.trans(a)) * (w_scale[:, None] * a_scale[None, :])
    else:
        if ONE_SCALE:
            acc += tl.dot(a, tl.trans(w)) * (a_scale * w_scale)[:, None]
        else:
            acc += tl.dot(a, tl.trans(w)) * (a_scale[:, None] * w_scale[None, :])
    return acc


@triton.jit
def _walk_fp8(
    acc, x, x_scales, row_mask, gate_tile, up_tile, near_scales, far_scales, column_mask, begin, stop, inputs,
    x_scale_stride, scale_run, GATED: tl.constexpr, QUANTIZE: tl.constexpr, SWAP_AB: tl.constexpr, UPCAST: tl.constexpr,
    ONE_SCALE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Inputs from `begin` to `stop`. `x`: pointers [BLOCK_M, 1]; `x_scales`: [BLOCK_M]; `near`, `far`: [BLOCK_N, 1];
    `near_scales`, `far_scales`: as of `_add_fp8`. Returns the sums of the near weights and of the far."""
    other = acc
    depth = tl.arange(0, 128)
    row_there = tl.max(row_mask.to(tl.int32), 1) > 0
    there = (begin < stop) if ONE_SCALE else tl.max(column_mask.to(tl.int32), 1) > 0
    # Of a loop that names its stages Triton fetches scales ahead too, as it does tiles.
    for k in tl.range(begin, stop, 128, num_stages=NUM_STAGES):
        run = k // 128
        near_scale = tl.load(near_scales + run * scale_run, mask=there, other=0.0)
        if QUANTIZE:
            inside = row_mask & (k + depth < inputs)[None, :]
            a, a_scale = quantize(tl.load(x + (k + depth)[None, :], mask=inside, other=0.0).to(tl.float32))
        else:
            a_scale = tl.load(x_scales + run * x_scale_stride, mask=row_there, other=0.0)
            a = tl.load(x + (k + depth)[None, :], mask=row_mask, other=0.0)
        w = tl.load(gate_tile + (k + depth)[None, :], mask=column_mask, other=0.0)
        acc = _add_fp8(acc, a, a_scale, w, near_scale, SWAP_AB, UPCAST, ONE_SCALE)
        if GATED:
            far_scale = tl.load(far_scales + run * scale_run, mask=there, other=0.0)
            w = tl.load(up_tile + (k + depth)[None, :], mask=column_mask, other=0.0)
            other = _add_fp8(other, a, a_scale, w, far_scale, SWAP_AB, UPCAST, ONE_SCALE)
    return acc, other


@triton.jit
def _walk_plain(
    acc, x, row_mask, gate_tile, up_tile, column_mask, begin, stop, inputs, GATED: tl.constexpr, SWAP_AB: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `_walk_fp8`, with weights that are not quantized, BLOCK_K inputs at a time."""
    other = acc
    depth = tl.arange(0, BLOCK_K)
    for k in range(begin, stop, BLOCK_K):
        inside = (k + depth < inputs)[None, :]
        a = tl.load(x + (k + depth)[None, :], mask=row_mask & inside, other=0.0)
        w = tl.load(gate_tile + (k + depth)[None, :], mask=column_mask & inside, other=0.0)
        if SWAP_AB:
            acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            w = tl.load(up_tile + (k + depth)[None, :], mask=column_mask & inside, other=0.0)
            if SWAP_AB:
                other = tl.dot(w, tl.trans(a), other, input_precision="ieee")
            else:
                other = tl.dot(a, tl.trans(w), other, input_precision="ieee")
    return acc, other


# Numbers of rows change from step to step: none of them is worth a kernel of its own. Nor are strides of scales, which
# are read one by one.
@pdl_jit(do_not_specialize=["rows", "x_scale_stride", "scale_expert", "scale_row"])
def product_kernel(
    x,
    x_scales,
    sorted_token_ids,
    values,
    scales,
    bias,
    expert_offsets,
    table,
    out,
    parts,
    arrivals,
    rows,
    experts,
    outputs,
    inputs,
    padded,
    x_stride,
    x_scale_stride,
    expert_stride,
    code_stride,
    scale_expert,
    scale_row,
    scale_run,
    bias_stride,
    out_stride,
    slope,
    limit,
    offset,
    KIND: tl.constexpr,
    EXPERTS: tl.constexpr,
    TABLE: tl.constexpr,
    GATHER: tl.constexpr,
    QUANTIZE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    HOPPER: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """`x`: [.., inputs]; with GATHER row i is its row `sorted_token_ids[i]`. `values`: [experts, outputs (twice that
    with an ACTIVATION, gates first), padded], or tiles of 4-bit ones. `expert_offsets`: [experts] int32, none without
    experts. `table`: with TABLE, the output of `tiles_kernel`. `outputs`: columns of `out`. ACTIVATION -1: none.
    `parts`, `arrivals`: of the SPLIT_K programs of each tile; arrivals end as they begin, 0.
    """
    gdc_wait()
    gdc_launch_dependents()
    # Of experts, neighbours share rows and walk along an expert's weights; of one weight, they share its columns.
    tile, block = tl.program_id(1 if EXPERTS else 0), tl.program_id(0 if EXPERTS else 1)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.full((), 0, tl.int32)
    first = tile * BLOCK_M
    end = rows
    if TABLE:
        expert = tl.load(table + 2 * tile)
        first = tl.load(table + 2 * tile + 1)
        end = tl.load(expert_offsets + tl.minimum(expert, experts - 1))
        first = tl.where(expert < experts, first, end)
    elif EXPERTS:
        expert, first, end = rows_of_tile(tile, expert_offsets, experts, EXPERTS, BLOCK_M)
    if first < end:
        row = first + tl.arange(0, BLOCK_M)
        # Rows behind the last are read as the last, and not written.
        token = tl.minimum(row, end - 1)
        if GATHER:
            token = tl.load(sorted_token_ids + token)
        row_mask = (row < end)[:, None]
        column_mask = (column < outputs)[:, None]
        a = x + token.to(tl.int64)[:, None] * x_stride
        own = values + expert.to(tl.int64) * expert_stride
        w = own + column.to(tl.int64)[:, None] * code_stride
        v = w + tl.cast(outputs, tl.int64) * code_stride
        s = scales + expert.to(tl.int64) * scale_expert
        scaled = block * BLOCK_N + tl.zeros((BLOCK_M,), tl.int32) if ONE_SCALE else column
        gate_tile = s + (scaled // SCALE_ROWS).to(tl.int64) * scale_row
        up_tile = s + ((scaled + outputs) // SCALE_ROWS).to(tl.int64) * scale_row
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
        steps = tl.cdiv(tl.cdiv(padded, 128), SPLIT_K) * 128
        begin = tl.program_id(2) * steps
        stop = tl.minimum(begin + steps, padded)
        GATED: tl.constexpr = ACTIVATION >= 0
        if KIND == "fp8":
            # Not read where activations are rounded here.
            taken = a if QUANTIZE else x_scales + token
            acc, other = _walk_fp8(
                acc, a, taken, row_mask, w, v, gate_tile, up_tile, column_mask, begin, stop, inputs, x_scale_stride,
                0 if ROW_SCALES else scale_run, GATED, QUANTIZE, SWAP_AB, UPCAST, ONE_SCALE,
                NUM_STAGES,
            )  # fmt: skip
        elif KIND == "plain":
            acc, other = _walk_plain(
                acc, a, row_mask, w, v, column_mask, begin, stop, inputs, GATED, SWAP_AB, BLOCK_K
            )  # fmt: skip
        elif KIND == "int4":
            acc, other = walk_int4(
                acc, a, row_mask, w, v, gate_tile, up_tile, column_mask, begin, stop, inputs, GROUP, GATED, SWAP_AB,
                BLOCK_N
            )  # fmt: skip
        else:
            acc, other = walk_fp4(
                a, row_mask, own, s, block * BLOCK_N, outputs, inputs, padded, begin, stop,
                GATED, HOPPER, SWAP_AB, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        last = True
        if SPLIT_K > 1:
            offsets = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
            if not SWAP_AB:
                inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            part = parts + (offsets.to(tl.int64) * SPLIT_K) * (BLOCK_M * BLOCK_N) + inside
            tl.store(part + tl.program_id(2) * (BLOCK_M * BLOCK_N), acc)
            # All threads have written before the program says so.
            tl.debug_barrier()
            last = tl.atomic_add(arrivals + offsets, 1, sem="acq_rel") == SPLIT_K - 1
            if last:
                tl.debug_barrier()
                acc = tl.load(part, cache_modifier=".cg")
                for i in tl.static_range(1, SPLIT_K):
                    acc += tl.load(part + i * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
                tl.store(arrivals + offsets, 0)
        if last:
            if BIAS:
                more = tl.load(bias + expert.to(tl.int64) * bias_stride + column, mask=column < outputs, other=0.0)
                acc += more.to(tl.float32)[:, None] if SWAP_AB else more.to(tl.float32)[None, :]
            if ACTIVATION >= 0:
                if BIAS:
                    up = bias + expert.to(tl.int64) * bias_stride + outputs + column
                    more = tl.load(up, mask=column < outputs, other=0.0)
                    other += more.to(tl.float32)[:, None] if SWAP_AB else more.to(tl.float32)[None, :]
                acc = gate(acc, other, slope, limit, offset, ACTIVATION, LIMIT)
            if SWAP_AB:
                place_out = out + row.to(tl.int64)[None, :] * out_stride + column[:, None]
                tl.store(place_out, acc.to(out.dtype.element_ty), mask=(row < end)[None, :] & column_mask)
            else:
                place_out = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
                tl.store(place_out, acc.to(out.dtype.element_ty), mask=row_mask & (column < outputs)[None, :])


def launch_product(
    x: torch.Tensor,
    weight: PackedWeight,
    launch: Launch,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    expert_offsets: torch.Tensor | None = None,
    sorted_token_ids: torch.Tensor | None = None,
    gating: GatedActivation | None = None,
    tile_tables: TileTables | None = None,
) -> torch.Tensor:
    """Launch `product_kernel`. Arguments as of `providers.multiply`; `out` is written and returned."""
    rows, outputs = len(out), out.shape[1]
    fp8 = weight.format.name == "fp8"
    x_scales = None
    if fp8 and not launch.quantize:
        x, x_scales = quantize_rows(x)
    tiles = cdiv(rows, launch.block_m) if expert_offsets is None else most_tiles(rows, expert_offsets, launch.block_m)
    blocks = cdiv(outputs, launch.block_n)
    table = None
    if expert_offsets is not None and tiles * blocks > _SEARCHED:
        table = table_of_tiles(rows, expert_offsets, launch.block_m, tile_tables)
    parts, arrivals = None, None
    if launch.split_k > 1:
        if tiles * blocks > TILES or tiles * blocks * launch.split_k * launch.block_m * launch.block_n > PARTS:
            launch = replace(launch, split_k=1)
        else:
            parts, arrivals = scratch(x.device, on_side_stream(x.device))
    grid = (tiles, blocks) if expert_offsets is None else (blocks, tiles)
    product_kernel[*grid, launch.split_k](
        x,
        x_scales,
        sorted_token_ids,
        weight.values,
        weight.scales,
        bias,
        expert_offsets,
        table,
        out,
        parts,
        arrivals,
        rows,
        weight.experts,
        outputs,
        weight.inputs,
        weight.padded_inputs,
        x.stride(0),
        x_scales.stride(1) if x_scales is not None else 0,
        weight.values.stride(0),
        weight.values.stride(1),
        weight.scales.stride(0),
        weight.scales.stride(1),
        weight.scales.stride(2),
        bias.stride(0) if bias is not None and bias.dim() == 2 else 0,
        out.stride(0),
        TABLE=table is not None,
        GATHER=sorted_token_ids is not None,
        BIAS=bias is not None,
        **gate_arguments(gating),
        **_constants(weight, outputs, launch, chip_of(x.device)),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


def _constants(weight: PackedWeight, outputs: int, launch: Launch, chip: Chip) -> dict[str, Any]:
    whole_tiles = weight.scale_rows % launch.block_n == 0 and outputs % launch.block_n == 0
    return {
        "KIND": weight.format.name,
        "EXPERTS": next_power_of_2(weight.experts) if weight.experts else 0,
        "QUANTIZE": launch.quantize and weight.format.name == "fp8",
        "SCALE_ROWS": weight.scale_rows,
        "ONE_SCALE": weight.format.name == "fp8" and whole_tiles,
        "ROW_SCALES": weight.row_scales,
        "HOPPER": weight.fast and chip.vendor == "nvidia",
        # This chip's e4m3 has another bias.
        "UPCAST": chip.has_e4m3fnuz,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "SPLIT_K": launch.split_k,
        "SWAP_AB": launch.swap_ab,
        "BLOCK_K": launch.block_k if weight.format.name != "fp8" else 128,
        "NUM_STAGES": launch.num_stages,
        "GROUP": weight.format.group_size if weight.format.name == "int4" else 0,
    }


# Programs up to which each finds its expert by itself; for more, a table that is made first was faster.
_SEARCHED = 4096

_RELEASED: dict[str, Format] = {"plain": PLAIN, "fp32": PLAIN, "fp8": Fp8(128), "mxfp4": MXFP4, "int4": Int4(32)}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Few and many rows of one weight and of experts, in both formats."""
    made = []
    tuned = "nvidia_h200" if chip.arch == "sm_90" else chip.arch
    cases: tuple[tuple[str, Any, int, int, bool], ...] = (
        ("fp8 few rows", "fp8", 0, 16, False),
        ("fp8 64 rows", "fp8", 0, 64, False),
        ("fp8 many rows", "fp8", 0, 8192, False),
        ("fp8 experts few rows gated", "fp8", 256, 128, True),
        ("fp8 experts many rows gated", "fp8", 256, 65536, True),
        ("mxfp4 experts few rows", "mxfp4", 128, 64, False),
        ("mxfp4 experts few rows gated", "mxfp4", 128, 64, True),
        ("mxfp4 experts many rows", "mxfp4", 128, 32768, False),
        ("plain few rows", "plain", 0, 16, False),
        ("plain 64 rows", "plain", 0, 64, False),
        ("plain few outputs", "plain", 0, 16, False),
        ("plain experts few rows gated", "plain", 128, 64, True),
        ("plain experts many rows", "plain", 128, 32768, False),
        ("int4 few rows", "int4", 0, 16, False),
        ("int4 many rows", "int4", 0, 8192, False),
        ("int4 experts few rows gated", "int4", 384, 64, True),
        ("int4 experts few rows", "int4", 384, 64, False),
        ("int4 experts many rows gated", "int4", 384, 65536, True),
        ("int4 experts many rows", "int4", 384, 65536, False),
        ("fp32 experts few rows gated", "fp32", 128, 64, True),
        ("fp32 experts many rows gated", "fp32", 128, 32768, True),
    )
    for name, kind, experts, rows, gated in cases:
        outputs = 131072 if kind == "plain" and not experts else 12288
        if name == "plain few outputs":
            outputs = 128
        shape = Shape(kind, experts, outputs, 2048, gated)
        launch = within(rule_of_thumb(shape, rows, tuned), shape, chip)
        if launch.provider == "pytorch" and kind == "plain":
            # There is nothing of ours to compile.
            continue
        rounded = kind == "fp8" and not launch.quantize
        none = torch.empty(0)
        group, fast = 128 if kind == "fp8" else 1, multiplies_pairs(chip)
        weight = PackedWeight(_RELEASED[kind], none, none, outputs, 2048, 2048, group, False, experts, fast)
        numbers = "*fp32:16" if kind == "fp32" else "*bf16:16"
        signature = {"x": "*fp8e4nv:16" if rounded else numbers, "expert_offsets": "*i32:16", "out": numbers}
        signature |= {"values": {"fp8": "*fp8e4nv:16", "mxfp4": "*i16:16", "int4": "*i32:16"}.get(kind, numbers)}
        signature |= {"scales": {"fp8": "*fp32:16", "mxfp4": "*i32:16"}.get(kind, numbers)}
        signature |= dict.fromkeys(("rows", "experts", "x_scale_stride", "scale_expert", "scale_row"), "i32")
        signature |= dict.fromkeys(("outputs", "inputs", "padded", "x_stride"), "i32:16")
        signature |= dict.fromkeys(("expert_stride", "code_stride", "out_stride"), "i32:16")
        signature |= dict.fromkeys(("slope", "limit", "offset"), "fp32")
        constants: dict[str, Any] = {
            "TABLE": rows > 1024 and experts > 0,
            "GATHER": experts > 0,
            "BIAS": kind == "mxfp4",
            "LIMIT": kind == "mxfp4",
        }
        constants |= {"ACTIVATION": ACTIVATIONS["silu"] if gated else -1}
        constants |= {"scale_run": 1, "bias_stride": 1} | _constants(weight, outputs, launch, chip)
        for present, names, kinds in (
            (rounded, ("x_scales",), "*fp32:16"),
            (experts > 0, ("sorted_token_ids",), "*i32:16"),
            (rows > 1024 and experts > 0, ("table",), "*i32:16"),
            (kind == "mxfp4", ("bias",), "*bf16:16"),
            (launch.split_k > 1, ("parts",), "*fp32:16"),
            (launch.split_k > 1, ("arrivals",), "*i32:16"),
        ):
            where = signature if present else constants
            where |= dict.fromkeys(names, kinds if present else None)
        if not experts:
            del signature["expert_offsets"]
            constants["expert_offsets"] = None
        if kind == "mxfp4":
            del constants["bias_stride"]
            signature["bias_stride"] = "i32"
        made.append(Specialization(name, product_kernel, signature, constants, launch.num_warps, launch.num_stages))
    return made
