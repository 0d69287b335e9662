"""4-bit experts of many rows on Hopper: one group of warps fetches, two turn codes into bf16 and multiply them in turn.

    y_i = act(W_e x_i + b_e) for row i of expert e; W = value(code) * 2^(exponent - 127)

A program owns 128 rows of one expert by two blocks of 128 outputs: gates and ups, or neighbours. Each multiplying group
owns 64 outputs of both blocks, the left operand of its products: codes go from shared memory through registers to the
tensor cores, and while one group takes codes apart, they work for the other. Memory traffic: a step fetches 48 KiB for
8.4 million operations. Must not know: where rows come from; they are sorted.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.gluon.descriptor import descriptor, descriptor_type
from allotrope.kernels.gluon.ring import ring
from allotrope.kernels.gluon.versions import barrier, load_tile
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, with_pdl
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.gated_activation.triton import ACTIVATIONS, gate, gate_arguments
from allotrope.ops.matmul.mxfp4 import TILE_ROWS
from allotrope.ops.matmul.packed_weight import PackedWeight
from allotrope.ops.matmul.triton_fp4 import numbers

ROWS, COLUMNS = 128, 128
_STAGES, _REGISTERS = 3, 240


@gluon.jit
def _fetch(x, values, x_tiles, w_tiles, ready, free, row, gate_tile, up_tile, steps, STAGES: gl.constexpr):
    """The fetching group: both halves of a step's inputs, and the words of both blocks for both groups. `near`, `far`:
    the first of the blocks' tiles of outputs.
    """
    for i in range(steps):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(free.index(slot), phase ^ 1)
        mbarrier.expect(ready.index(slot), 2 * x.block_type.nbytes + 4 * values.block_type.nbytes)
        load_tile(x, [row, i * 128], ready.index(slot), x_tiles.index(2 * slot))
        load_tile(x, [row, i * 128 + 64], ready.index(slot), x_tiles.index(2 * slot + 1))
        for group in gl.static_range(2):
            to = 4 * slot + 2 * group
            first, second = ((gate_tile + group) * steps + i) * 64, ((up_tile + group) * steps + i) * 64
            load_tile(values, [first, 0], ready.index(slot), w_tiles.index(to))
            load_tile(values, [second, 0], ready.index(slot), w_tiles.index(to + 1))


@gluon.jit
def _add(acc, words, exponents, first_half, second_half, operand: gl.constexpr):
    """Begin to add the products of words [64, 32], with exponents [64] of the four runs that they hold, and of both
    halves [64, rows] of their inputs.
    """
    p, q, r, s = numbers(words, gl.expand_dims(exponents, 1), True)
    w = gl.convert_layout(gl.join(p, q).permute((0, 2, 1)).reshape((64, 64)), operand, assert_trivial=True)
    acc = warpgroup_mma(w, first_half, acc, is_async=True)
    w = gl.convert_layout(gl.join(r, s).permute((0, 2, 1)).reshape((64, 64)), operand, assert_trivial=True)
    return warpgroup_mma(w, second_half, acc, is_async=True)


@gluon.jit
def _multiply(
    work, row, end, WHICH: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, BIAS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One multiplying group: 64 outputs of both blocks over all inputs, of half a tile of rows where that holds all."""
    if end - row > 64:
        _multiply_rows(work, row, end, 128, WHICH, ACTIVATION, LIMIT, BIAS, STAGES)
    else:
        _multiply_rows(work, row, end, 64, WHICH, ACTIVATION, LIMIT, BIAS, STAGES)


@gluon.jit
def _multiply_rows(
    work, row, end, N: gl.constexpr, WHICH: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr,
    BIAS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `_multiply`, of the first N rows of the tile. `apart`: from the outputs of one block to those of the other."""
    (x_tiles, w_tiles, ready, free, scales, bias, out, column, apart, outputs, steps, out_stride, slope, limit,
     offset) = work  # fmt: skip
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    # What `operand` has of each run: words side by side are pairs of inputs.
    taken: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 32]
    )
    last = outputs - 1
    mine = column + WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, taken))
    # Outputs behind the last are scaled as the last, and not written.
    beyond = gl.minimum(mine + apart, apart + last if ACTIVATION >= 0 else last)
    mine = gl.minimum(mine, last)
    near_scales = scales + (mine // 64 * steps * 64 + mine % 64)
    far_scales = scales + (beyond // 64 * steps * 64 + beyond % 64)
    first = gl.zeros([64, N], gl.float32, sums)
    second = gl.zeros([64, N], gl.float32, sums)
    gate_tile, up_tile = gl.load(near_scales), gl.load(far_scales)
    for i in range(steps):
        slot = i % STAGES
        ahead = gl.minimum(i + 1, steps - 1)
        next_gate_tile, next_up_tile = gl.load(near_scales + ahead * 64), gl.load(far_scales + ahead * 64)
        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        begin = x_tiles.index(2 * slot).slice(0, N).permute((1, 0))
        rest = x_tiles.index(2 * slot + 1).slice(0, N).permute((1, 0))
        first = _add(first, w_tiles.index(4 * slot + 2 * WHICH).load(taken), gate_tile, begin, rest, operand)
        second = _add(second, w_tiles.index(4 * slot + 2 * WHICH + 1).load(taken), up_tile, begin, rest, operand)
        first, second = warpgroup_mma_wait(0, (first, second))
        mbarrier.arrive(free.index(slot), count=1)
        gate_tile, up_tile = next_gate_tile, next_up_tile
    at = column + WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    if BIAS:
        first += gl.expand_dims(gl.load(bias + gl.minimum(at, last)).to(gl.float32), 1)
        up_offset = gl.minimum(at + apart, apart + last if ACTIVATION >= 0 else last)
        second += gl.expand_dims(gl.load(bias + up_offset).to(gl.float32), 1)
    written: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = row + gl.arange(0, N, layout=gl.SliceLayout(1, written))
    offsets = column + WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, written))
    to = out + gl.expand_dims(token.to(gl.int64) * out_stride, 1) + gl.expand_dims(offsets, 0)
    mask = gl.expand_dims(token < end, 1)
    if ACTIVATION >= 0:
        first = gate(first, second, slope, limit, offset, ACTIVATION, LIMIT)
    transposed = gl.convert_layout(first.to(out.dtype.element_ty).permute((1, 0)), written)
    gl.store(to, transposed, mask=mask & gl.expand_dims(offsets < outputs, 0))
    if ACTIVATION < 0:
        transposed = gl.convert_layout(second.to(out.dtype.element_ty).permute((1, 0)), written)
        gl.store(to + apart, transposed, mask=mask & gl.expand_dims(offsets + apart < outputs, 0))


@with_pdl
@gluon.jit
def experts_kernel(
    x, values, scales, bias, expert_offsets, table, out, experts, outputs, tiles, steps, scale_expert, bias_stride,
    out_stride,
    slope, limit, offset, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, BIAS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """`x`: [n, inputs], by [128, 64]. `values`: [experts * tiles * steps * 64, 32], by [64, 32]. `tiles`: an expert's
    outputs, which with an ACTIVATION are twice `outputs`, the columns of `out`. `expert_offsets`, `table`: as in
    `product_kernel`, for tiles of 128 rows. `bias`: not read without BIAS.
    """
    gdc_wait()
    gdc_launch_dependents()
    expert = gl.load(table + 2 * gl.program_id(1))
    if expert < experts:
        row = gl.load(table + 2 * gl.program_id(1) + 1)
        end = gl.load(expert_offsets + expert)
        if row < end:
            GATED: gl.constexpr = ACTIVATION >= 0
            column = gl.program_id(0) * (128 if GATED else 256)
            apart = outputs if GATED else 128
            gate_tile = expert * tiles + column // 64
            own = scales + expert.to(gl.int64) * scale_expert
            own_bias = bias + expert.to(gl.int64) * bias_stride
            x_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 128, 64], x.layout)
            w_tiles = gl.allocate_shared_memory(gl.int16, [4 * STAGES, 64, 32], values.layout)
            ready, free = ring(STAGES, 2)
            fence_async_shared()
            barrier()
            work = (x_tiles, w_tiles, ready, free, own, own_bias, out, column, apart, outputs, steps, out_stride, slope,
                    limit, offset)  # fmt: skip
            gl.warp_specialize(
                [
                    (_multiply, (work, row, end, 0, ACTIVATION, LIMIT, BIAS, STAGES)),
                    (_multiply, (work, row, end, 1, ACTIVATION, LIMIT, BIAS, STAGES)),
                    (_fetch, (x, values, x_tiles, w_tiles, ready, free, row, gate_tile, gate_tile + apart // 64, steps,
                              STAGES)),
                ],
                [4, 4],
                [REGISTERS, 24],
            )  # fmt: skip


def supports(x: torch.Tensor, weight: PackedWeight, gating: GatedActivation | None) -> bool:
    """Whether this kernel can multiply `x` on its device."""
    return (
        weight.format.name == "mxfp4"
        and weight.experts > 0
        and weight.fast
        and x.dtype == torch.bfloat16
        and x.stride(0) % 8 == 0
        and weight.outputs % (2 * TILE_ROWS if gating else 16) == 0
        and weight.inputs % 8 == 0
        and chip_of(x.device).has_wgmma
    )


def multiply(
    x: torch.Tensor,
    weight: PackedWeight,
    expert_offsets: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    gating: GatedActivation | None,
) -> None:
    """`x`: [n, inputs], rows in the order of experts. `table`: [tiles, 2], as `tiles_kernel` writes it for tiles of
    `ROWS`. `out`: [n, outputs], written into. Needs `supports`.
    """
    outputs = out.shape[1]
    grid = (cdiv(outputs, COLUMNS if gating else 2 * COLUMNS), len(table))
    experts_kernel[grid](
        descriptor(x, [128, 64]), descriptor(weight.values.flatten(0, 3), [64, 32]), weight.scales,
        out if bias is None else bias, expert_offsets, table, out, weight.experts, outputs, *weight.values.shape[1:3],
        weight.scales.stride(0), 0 if bias is None else bias.stride(0), out.stride(0),
        **gate_arguments(gating), BIAS=bias is not None, STAGES=_STAGES, REGISTERS=_REGISTERS, num_warps=4,
    )  # fmt: skip


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Both products of an expert; nothing but for Hopper."""
    if not chip.has_wgmma:
        return []
    made = []
    for gated in (True, False):
        signature = {"x": descriptor_type(torch.bfloat16, [128, 64]), "values": descriptor_type(torch.int16, [64, 32])}
        signature |= {"scales": "*i32:16", "expert_offsets": "*i32:16", "table": "*i32:16", "out": "*bf16:16"}
        signature |= dict.fromkeys(("experts", "tiles", "steps", "scale_expert"), "i32")
        signature |= {"outputs": "i32:16", "out_stride": "i32:16"} | dict.fromkeys(("slope", "limit", "offset"), "fp32")
        constants = {"ACTIVATION": ACTIVATIONS["silu"] if gated else -1, "LIMIT": gated, "BIAS": gated}
        constants |= {"STAGES": _STAGES, "REGISTERS": _REGISTERS}
        signature |= {"bias": "*bf16:16", "bias_stride": "i32:16"}
        made.append(
            Specialization(f"mxfp4 experts, warps apart{' gated' * gated}", experts_kernel, signature, constants, 4, 1)
        )
    return made
