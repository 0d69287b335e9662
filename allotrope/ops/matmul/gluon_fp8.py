"""One FP8 weight and few rows on Hopper: every multiprocessor reads an equal share of the weight (Stream-K).

    y_i = W x_i for row i; W = value(code) * scale

All rows by 128 outputs are a tile, and 128 inputs of it a step. The steps of all tiles are one line, cut into as
many equal runs as there are multiprocessors: whatever the number of tiles, none of these waits for others at the end. A
program walks along its run. One group of warps fetches, scales too, for a load in the others' loops would hold up each
step; two multiply, each half of a tile's outputs. The sums of a tile that lies in several runs are added, in order, by
the last of its programs. Of a tile in two runs that is as a rule the one that ends with it, for the other began with
it: it reads the other's sums before its own steps, and writes none. Memory traffic: codes and scales once, rows once
per tile (from the L2 cache), and at most two parts of a tile per program. Method: Osama et al., "Stream-K", 2023.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.gluon.descriptor import descriptor, descriptor_type
from allotrope.kernels.gluon.ring import ring
from allotrope.kernels.gluon.versions import barrier, load_rows, load_tile
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, with_pdl
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.side_stream import on_side_stream
from allotrope.kernels.tiles import cdiv
from allotrope.ops.matmul.launch import Launch
from allotrope.ops.matmul.packed_weight import PackedWeight
from allotrope.ops.matmul.scratch import PARTS, TILES, scratch
from allotrope.ops.matmul.triton_quantize import quantize_rows

_REGISTERS = 240
# Bytes of shared memory that tiles may take.
_SHARED = 208 << 10
# Outputs of a tile, and of one group's half.
_BLOCK_N = 128
_COLUMNS = gl.constexpr(_BLOCK_N // 2)
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _fetch(
    x, x_scales, values, scales, x_tiles, x_scale_tiles, w_tiles, w_scale_tiles, ready, free, rows, begin, stop, steps,
    x_scale_stride, scale_row, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The fetching group: rows and both halves of a tile's weights, and their scales, of every step of the run."""
    # Rows behind the last are scaled as the last, and not written.
    row_scales = x_scales + gl.minimum(gl.arange(0, HALVES * 64, layout=_LINE), rows - 1)
    # 128 outputs share a scale, and so a tile has one.
    tile_scales = scales + gl.arange(0, 1, layout=_LINE)
    tile = begin // steps
    step = begin - tile * steps
    for i in range(stop - begin):
        slot = i % STAGES
        mbarrier.wait(free.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(slot), HALVES * x.block_type.nbytes + 2 * values.block_type.nbytes)
        column = tile * (2 * _COLUMNS)
        load_tile(values, [column, step * 128], ready.index(slot), w_tiles.index(2 * slot))
        load_tile(values, [column + _COLUMNS, step * 128], ready.index(slot), w_tiles.index(2 * slot + 1))
        for half in gl.static_range(HALVES):
            load_tile(x, [half * 64, step * 128], ready.index(slot), x_tiles.index(HALVES * slot + half))
        load_rows(x_scale_tiles.index(slot), row_scales + step * x_scale_stride)
        load_rows(w_scale_tiles.index(slot), tile_scales + tile * scale_row + step)
        async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
        step += 1
        if step == steps:
            step = 0
            tile += 1


@gluon.jit
def _run_of(step, steps_of_all, programs):
    """The program in whose run a step of all tiles lies: run i begins with step i * `steps_of_all` // `programs`."""
    return ((step + 1) * programs - 1) // steps_of_all


@gluon.jit
def _scales_of(x_scales, w_scale, sums: gl.constexpr, FIRST: gl.constexpr):
    """Scales of the sums of 64 rows from the one called FIRST."""
    layout: gl.constexpr = gl.SliceLayout(1, sums)
    return gl.expand_dims(x_scales.slice(FIRST, 64).load(layout) * w_scale.load(layout), 1)


@gluon.jit
def _store(out, low, high, rows, outputs, column, out_stride, HALVES: gl.constexpr):
    """`low`: sums of the first 64 rows, `high` of the next if there are two halves."""
    sums: gl.constexpr = low.type.layout
    row = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, sums)), 1)
    at = gl.expand_dims(column + gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, sums)), 0)
    to = out + row.to(gl.int64) * out_stride + at
    gl.store(to, low.to(out.dtype.element_ty), mask=(row < rows) & (at < outputs))
    if HALVES == 2:
        there = (row + 64 < rows) & (at < outputs)
        gl.store(to + 64 * out_stride.to(gl.int64), high.to(out.dtype.element_ty), mask=there)


@gluon.jit
def _part_of(own, program, goes_on, HALVES: gl.constexpr):
    """Where a program's sums of a tile lie: of one that it goes on with, or of one that it begins and does not end.
    `own`: of program 0, of the former."""
    return own + (2 * program + goes_on) * (2 * HALVES * 64 * _COLUMNS)


@gluon.jit
def _add_parts(own, size, there, begins, ends, HALVES: gl.constexpr):
    """Sums of a tile's programs, in order; `size`: of what lies before them in a part."""
    sums = gl.load(_part_of(own, begins, 1, HALVES) + size, mask=there, cache_modifier=".cg")
    for other in range(begins + 1, ends + 1):
        sums += gl.load(_part_of(own, other, 0, HALVES) + size, mask=there, cache_modifier=".cg")
    return sums


@gluon.jit
def _finish(
    out, low, high, own, arrived, there_low, there_high, rows, outputs, column, out_stride, first, begins, ends,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Store this program's sums of a tile, from step `first` of it. The last of the tile's programs, `begins` to
    `ends`, adds those of all. `arrived`: the count of them. `there_low`, `there_high`: which rows there are."""
    size: gl.constexpr = 64 * _COLUMNS
    mine = _part_of(own, gl.program_id(0), (first == 0).to(gl.int32), HALVES)
    gl.store(mine, low, mask=there_low)
    if HALVES == 2:
        gl.store(mine + size, high, mask=there_high)
    # All threads have written before the program says so.
    barrier()
    if gl.atomic_add(arrived, 1, sem="acq_rel") == ends - begins:
        barrier()
        low = _add_parts(own, 0, there_low, begins, ends, HALVES)
        if HALVES == 2:
            high = _add_parts(own, size, there_high, begins, ends, HALVES)
        gl.store(arrived, 0)
        _store(out, low, high, rows, outputs, column, out_stride, HALVES)


@gluon.jit
def _multiply(
    x_tiles, x_scale_tiles, w_tiles, w_scale_tiles, ready, free, out, parts, arrivals, rows, outputs, begin, stop,
    steps, tiles, out_stride, WHICH: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One multiplying group: all rows by one half of the outputs of each tile of the run."""
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 32])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    inside = gl.expand_dims(row * _COLUMNS, 1)
    inside += gl.expand_dims(gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, sums)), 0)
    own = parts + WHICH * (HALVES * 64 * _COLUMNS) + inside
    there_low, there_high = gl.expand_dims(row < rows, 1), gl.expand_dims(row + 64 < rows, 1)
    position, count = begin, begin * 0
    while position < stop:
        tile = position // steps
        first = position - tile * steps
        last = gl.minimum(steps, first + stop - position)
        column = tile * (2 * _COLUMNS) + WHICH * _COLUMNS
        low = gl.zeros([64, _COLUMNS], gl.float32, sums)
        high = gl.zeros([64, _COLUMNS], gl.float32, sums)
        # Overwritten by each product: it has registers of its own that nothing else waits for.
        part = gl.zeros([64, _COLUMNS], gl.float32, sums)
        begins = _run_of(tile * steps, tiles * steps, gl.num_programs(0))
        ends = _run_of(tile * steps + steps - 1, tiles * steps, gl.num_programs(0))
        arrived = arrivals + 2 * tile + WHICH
        # Whether this program stores the tile: it has all steps, or the sums of the one other program are there.
        stores = last - first == steps
        others_low = gl.zeros([64, _COLUMNS], gl.float32, sums)
        others_high = gl.zeros([64, _COLUMNS], gl.float32, sums)
        if (first == 0) & (ends - begins == 1):
            stores = gl.atomic_add(arrived, 0, sem="acquire") == 1
            if stores:
                barrier()
                theirs = _part_of(own, ends, 0, HALVES)
                others_low = gl.load(theirs, mask=there_low, other=0.0, cache_modifier=".cg")
                if HALVES == 2:
                    others_high = gl.load(theirs + 64 * _COLUMNS, mask=there_high, other=0.0, cache_modifier=".cg")
        for _ in range(first, last):
            slot = count % STAGES
            mbarrier.wait(ready.index(slot), (count // STAGES) & 1)
            x_scales, w_scale = x_scale_tiles.index(slot), w_scale_tiles.index(slot)
            scale = _scales_of(x_scales, w_scale, sums, 0)
            w = w_tiles.index(2 * slot + WHICH).permute((1, 0))
            part = warpgroup_mma(x_tiles.index(HALVES * slot), w, part, use_acc=False)
            if HALVES == 2:
                low += part * scale
                scale = _scales_of(x_scales, w_scale, sums, 64)
                part = warpgroup_mma(x_tiles.index(HALVES * slot + 1), w, part, use_acc=False)
                mbarrier.arrive(free.index(slot), count=1)
                high += part * scale
            else:
                mbarrier.arrive(free.index(slot), count=1)
                low += part * scale
            count += 1
        if stores:
            if last - first < steps:
                gl.store(arrived, 0)
            _store(out, low + others_low, high + others_high, rows, outputs, column, out_stride, HALVES)
        else:
            _finish(
                out, low, high, own, arrived, there_low, there_high, rows, outputs, column, out_stride, first, begins,
                ends, HALVES,
            )  # fmt: skip
        position += last - first


@with_pdl
@gluon.jit(do_not_specialize=["rows", "steps", "tiles", "x_scale_stride"])
def stream_kernel(
    x, x_scales, values, scales, out, parts, arrivals, rows, outputs, steps, tiles, x_scale_stride, scale_row,
    out_stride, HALVES: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """`x`: [rows, padded] e4m3, by [64, 128]; at most HALVES * 64 rows. `values`: [outputs, padded], by half of the
    outputs of a tile and 128 inputs. `tiles`: of `steps` steps each. `arrivals`: of both halves of each tile; they end
    as they begin, 0.
    """
    all_steps = tiles * steps
    begin = gl.program_id(0) * all_steps // gl.num_programs(0)
    stop = (gl.program_id(0) + 1) * all_steps // gl.num_programs(0)
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [HALVES * STAGES, 64, 128], x.layout)
    x_scale_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, HALVES * 64], _SCALES)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, _COLUMNS, 128], values.layout)
    w_scale_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1], _SCALES)
    # Each of the fetching threads arrives with the scales that it copies, one of them with the rest as well.
    ready, free = ring(STAGES, 2, 128 + 1)
    fence_async_shared()
    barrier()
    gdc_wait()
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_multiply, (x_tiles, x_scale_tiles, w_tiles, w_scale_tiles, ready, free, out, parts, arrivals, rows,
                         outputs, begin, stop, steps, tiles, out_stride, 0, HALVES, STAGES)),
            (_multiply, (x_tiles, x_scale_tiles, w_tiles, w_scale_tiles, ready, free, out, parts, arrivals, rows,
                         outputs, begin, stop, steps, tiles, out_stride, 1, HALVES, STAGES)),
            (_fetch, (x, x_scales, values, scales, x_tiles, x_scale_tiles, w_tiles, w_scale_tiles, ready, free, rows,
                      begin, stop, steps, x_scale_stride, scale_row, HALVES, STAGES)),
        ],
        [4, 4],
        [REGISTERS, 24],
    )  # fmt: skip


def supports(weight: PackedWeight, rows: int, launch: Launch, bias: torch.Tensor | None) -> bool:
    """Whether this kernel supports the product on the weight's device."""
    chip = chip_of(weight.values.device)
    return (
        weight.format.name == "fp8"
        and not weight.experts
        and weight.scale_rows == 128
        and not weight.row_scales
        and rows <= launch.block_m
        and launch.block_n == _BLOCK_N
        and bias is None
        and chip.has_wgmma
        and 2 * chip.num_sms * launch.block_m * _BLOCK_N <= PARTS
        and 2 * cdiv(weight.outputs, _BLOCK_N) <= TILES
    )


def multiply(x: torch.Tensor, weight: PackedWeight, launch: Launch, out: torch.Tensor) -> None:
    """`out`: [n, outputs], written into. `launch`: `block_m` 64 or 128. Needs `supports`."""
    values, x_scales = quantize_rows(x)
    chip = chip_of(x.device)
    steps, tiles = weight.padded_inputs // 128, cdiv(weight.outputs, _BLOCK_N)
    parts, arrivals = scratch(x.device, on_side_stream(x.device))
    stream_kernel[(min(chip.num_sms, tiles * steps),)](
        descriptor(values, [64, 128]), x_scales, descriptor(weight.values[0], [_BLOCK_N // 2, 128]),
        weight.scales, out, parts, arrivals, len(out), weight.outputs, steps, tiles, x_scales.stride(1),
        weight.scales.stride(1), out.stride(0), HALVES=launch.block_m // 64, STAGES=_stages(launch.block_m),
        REGISTERS=_REGISTERS, num_warps=4,
    )  # fmt: skip


def _stages(block_m: int) -> int:
    return _SHARED // ((block_m + _BLOCK_N) * 128)


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Tiles of each size; nothing but for Hopper."""
    if not chip.has_wgmma:
        return []
    made = []
    for block_m in (64, 128):
        blocks = {"x": [64, 128], "values": [_BLOCK_N // 2, 128]}
        signature = {name: descriptor_type(torch.float8_e4m3fn, block) for name, block in blocks.items()}
        signature |= {"x_scales": "*fp32:16", "scales": "*fp32:16", "out": "*bf16:16"}
        signature |= {"parts": "*fp32:16", "arrivals": "*i32:16"}
        signature |= dict.fromkeys(("rows", "steps", "tiles", "x_scale_stride", "scale_row"), "i32")
        signature |= {"outputs": "i32:16", "out_stride": "i32:16"}
        constants = {"HALVES": block_m // 64, "STAGES": _stages(block_m)}
        constants |= {"REGISTERS": _REGISTERS}
        made.append(Specialization(f"fp8 Stream-K, {block_m} rows", stream_kernel, signature, constants, 4, 1))
    return made
