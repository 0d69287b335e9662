"""Experts of many rows on Hopper: one group of warps fetches, two multiply FP8 codes and scale their sums in turn.

    y_i = act(W_e x_i) for row i of expert e; W = value(code) * scale

A program owns 128 rows of one expert by two blocks of 128 outputs: gates and ups, or neighbours. Each multiplying group
owns 64 of the rows. While one scales the sums of a step of 128 inputs, the tensor cores work for the other. Memory
traffic: a step fetches 48 KiB for 8.4 million operations. Must not know: where rows come from; they are sorted.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.gluon.descriptor import descriptor, descriptor_type
from allotrope.kernels.gluon.ring import ring
from allotrope.kernels.gluon.versions import barrier, load_tile
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, with_pdl
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.matmul.packed_weight import PackedWeight

ROWS, COLUMNS = 128, 128
_STAGES, _REGISTERS = 4, 240


@gluon.jit
def _fetch(x, values, x_tiles, w_tiles, ready, free, row, gate_tile, up_tile, steps, STAGES: gl.constexpr):
    """The fetching group: rows and both blocks of weights of every step, to the next tiles that are free."""
    for i in range(steps):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(free.index(slot), phase ^ 1)
        mbarrier.expect(ready.index(slot), 2 * x.block_type.nbytes + 2 * values.block_type.nbytes)
        load_tile(x, [row, i * 128], ready.index(slot), x_tiles.index(2 * slot))
        load_tile(x, [row + 64, i * 128], ready.index(slot), x_tiles.index(2 * slot + 1))
        load_tile(values, [gate_tile, i * 128], ready.index(slot), w_tiles.index(2 * slot))
        load_tile(values, [up_tile, i * 128], ready.index(slot), w_tiles.index(2 * slot + 1))


@gluon.jit
def _multiply(
    x_tiles, w_tiles, ready, free, x_scales, near_scales, far_scales, out, row, end, column, outputs, steps,
    x_scale_stride, out_stride, WHICH: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One multiplying group: 64 rows by both blocks, over all inputs."""
    if row + WHICH * 64 >= end:
        for i in range(steps):
            mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1)
            mbarrier.arrive(free.index(i % STAGES), count=1)
    else:
        sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
        mine = row + WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
        # Rows behind the last are scaled as the last, and not written.
        scales = x_scales + gl.minimum(mine, end - 1)
        first = gl.zeros([64, 128], gl.float32, sums)
        second = gl.zeros([64, 128], gl.float32, sums)
        # Overwritten by each product: it has registers of its own that nothing else waits for.
        part = gl.zeros([64, 128], gl.float32, sums)
        rows, gate_tile, up_tile = gl.load(scales), gl.load(near_scales), gl.load(far_scales)
        for i in range(steps):
            slot = i % STAGES
            ahead = gl.minimum(i + 1, steps - 1)
            next_rows = gl.load(scales + ahead * x_scale_stride)
            next_gate_tile, next_up_tile = gl.load(near_scales + ahead), gl.load(far_scales + ahead)
            mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
            a = x_tiles.index(2 * slot + WHICH)
            part = warpgroup_mma(a, w_tiles.index(2 * slot).permute((1, 0)), part, use_acc=False)
            first += part * gl.expand_dims(rows * gate_tile, 1)
            part = warpgroup_mma(a, w_tiles.index(2 * slot + 1).permute((1, 0)), part, use_acc=False)
            mbarrier.arrive(free.index(slot), count=1)
            second += part * gl.expand_dims(rows * up_tile, 1)
            rows, gate_tile, up_tile = next_rows, next_gate_tile, next_up_tile
        at = gl.expand_dims(column + gl.arange(0, 128, layout=gl.SliceLayout(0, sums)), 0)
        to = out + gl.expand_dims(mine.to(gl.int64) * out_stride, 1) + at
        written = gl.expand_dims(mine < end, 1)
        if GATED:
            first = first / (1.0 + gl.exp2(first * -1.4426950408889634)) * second
        gl.store(to, first.to(out.dtype.element_ty), mask=written)
        if not GATED:  # noqa: SIM102
            # A branch, not a mask: with that, the sums did not stay in registers.
            if column + 128 < outputs:
                gl.store(to + 128, second.to(out.dtype.element_ty), mask=written)


@with_pdl
@gluon.jit(do_not_specialize=["x_scale_stride"])
def experts_kernel(
    x, x_scales, values, scales, expert_offsets, table, out, experts, outputs, steps, x_scale_stride, scale_expert,
    scale_row,
    out_stride, GATED: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """`x`: [n, padded] e4m3, by [64, 128]. `values`: [experts * outputs (twice that if GATED), padded], by [128, 128].
    `expert_offsets`, `table`: as in `product_kernel`, for tiles of 128 rows. `outputs`: columns of `out`, a multiple of
    128.
    """
    gdc_wait()
    gdc_launch_dependents()
    expert = gl.load(table + 2 * gl.program_id(1))
    if expert < experts:
        row = gl.load(table + 2 * gl.program_id(1) + 1)
        end = gl.load(expert_offsets + expert)
        if row < end:
            WIDE: gl.constexpr = 128 if GATED else 256
            BLOCKS: gl.constexpr = 2 if GATED else 1
            column = gl.program_id(0) * WIDE
            apart = outputs if GATED else 128
            gate_tile = expert * outputs * BLOCKS + column
            own = scales + expert.to(gl.int64) * scale_expert
            near_scales = own + column // 128 * scale_row
            # The neighbour of a last block may not be there; nothing of it is written.
            far_block = (column + apart) // 128 if GATED else gl.minimum(column // 128 + 1, outputs // 128 - 1)
            far_scales = own + far_block * scale_row
            x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 64, 128], x.layout)
            w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], values.layout)
            ready, free = ring(STAGES, 2)
            fence_async_shared()
            barrier()
            gl.warp_specialize(
                [
                    (_multiply, (x_tiles, w_tiles, ready, free, x_scales, near_scales, far_scales, out, row, end,
                                 column, outputs, steps, x_scale_stride, out_stride, 0, GATED, STAGES)),
                    (_multiply, (x_tiles, w_tiles, ready, free, x_scales, near_scales, far_scales, out, row, end,
                                 column, outputs, steps, x_scale_stride, out_stride, 1, GATED, STAGES)),
                    (_fetch, (x, values, x_tiles, w_tiles, ready, free, row, gate_tile, gate_tile + apart, steps,
                              STAGES)),
                ],
                [4, 4],
                [REGISTERS, 24],
            )  # fmt: skip


def supports(weight: PackedWeight, gating: GatedActivation | None, bias: torch.Tensor | None) -> bool:
    """Whether this kernel supports the product on the weight's device."""
    return (
        weight.format.name == "fp8"
        and weight.experts > 0
        and weight.scale_rows == 128
        and not weight.row_scales
        and weight.outputs % (256 if gating else 128) == 0
        and gating in (None, GatedActivation())
        and bias is None
        and chip_of(weight.values.device).has_wgmma
    )


def multiply(
    values: torch.Tensor,
    x_scales: torch.Tensor,
    weight: PackedWeight,
    expert_offsets: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`values`, `x_scales`: rows in the order of experts, as `quantize_rows` gives them. `table`: [tiles, 2], as
    `tiles_kernel` writes it for tiles of `ROWS`. `out`: [n, outputs], written into. Needs `supports`.
    """
    outputs = out.shape[1]
    gated = outputs < weight.outputs
    grid = (cdiv(outputs, COLUMNS if gated else 2 * COLUMNS), len(table))
    experts_kernel[grid](
        descriptor(values, [64, 128]), x_scales, descriptor(weight.values.flatten(0, 1), [128, 128]), weight.scales,
        expert_offsets, table, out, weight.experts, outputs, weight.padded_inputs // 128, x_scales.stride(1),
        *weight.scales.stride()[:2], out.stride(0),
        GATED=gated, STAGES=_STAGES, REGISTERS=_REGISTERS, num_warps=4,
    )  # fmt: skip


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Both products of an expert; nothing but for Hopper."""
    if not chip.has_wgmma:
        return []
    made = []
    for gated in (True, False):
        blocks = {"x": [64, 128], "values": [128, 128]}
        signature = {name: descriptor_type(torch.float8_e4m3fn, block) for name, block in blocks.items()}
        signature |= {"x_scales": "*fp32:16", "scales": "*fp32:16"}
        signature |= {"expert_offsets": "*i32:16", "table": "*i32:16", "out": "*bf16:16"}
        signature |= dict.fromkeys(("experts", "steps", "x_scale_stride", "scale_expert", "scale_row"), "i32")
        signature |= {"outputs": "i32:16", "out_stride": "i32:16"}
        constants = {"GATED": gated, "STAGES": _STAGES, "REGISTERS": _REGISTERS}
        name = f"fp8 experts, warps apart{' gated' * gated}"
        made.append(Specialization(name, experts_kernel, signature, constants, 4, 1))
    return made
