"""One FP8 weight by few rows on Hopper: one group of warps fetches weights far ahead, two multiply and scale.

    y_i = W x_i;  W = value(code) * scale

A program owns two neighbouring blocks of outputs, one for each multiplying group, and all rows; programs of one tile
share its inputs, and the last of them to end adds their parts. Memory traffic: the weights once, and the rows, as
codes, once for each program. Must not know: how rows were rounded.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from allotrope.attention.ahead import Variant
from allotrope.attention.early import await_turn, early
from allotrope.attention.gluon_ring import ring
from allotrope.attention.gluon_versions import barrier
from allotrope.layers.quant.launch import Launch, on_hopper
from allotrope.layers.quant.prepare import Prepared

MOST_ROWS = 64
_REGISTERS = 240
# Bytes that the tiles of a ring may take.
_SHARED = 208 * 1024


@gluon.jit
def _fetch(x, codes, x_tiles, w_tiles, ready, free, column, begin, end, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """The fetching group: rows and both blocks of weights of every step, to the next tiles that are free."""
    for i in range(begin, end):
        slot = (i - begin) % STAGES
        phase = ((i - begin) // STAGES) & 1
        mbarrier.wait(free.index(slot), phase ^ 1)
        mbarrier.expect(ready.index(slot), x.block_type.nbytes + 2 * codes.block_type.nbytes)
        near, far, rows = w_tiles.index(2 * slot), w_tiles.index(2 * slot + 1), x_tiles.index(slot)
        tma.async_copy_global_to_shared(codes, [column, i * 128], ready.index(slot), near)
        tma.async_copy_global_to_shared(codes, [column + BLOCK, i * 128], ready.index(slot), far)
        tma.async_copy_global_to_shared(x, [0, i * 128], ready.index(slot), rows)


@gluon.jit
def _multiply(
    x_tiles, w_tiles, ready, free, x_scales, scales, out, parts, arrivals, rows, outputs, column, begin, end,
    x_scale_stride, out_stride,
    WHICH: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One multiplying group: a block of outputs by all rows, over the program's share of the inputs."""
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    token = gl.arange(0, ROWS, layout=gl.SliceLayout(0, sums))
    # Rows behind the last are scaled as the last, and not written.
    own = x_scales + gl.minimum(token, rows - 1)
    total = gl.zeros([BLOCK, ROWS], gl.float32, sums)
    part = gl.zeros([BLOCK, ROWS], gl.float32, sums)
    # A program without a share reads what is there, and uses none of it.
    first = gl.minimum(begin, gl.maximum(end - 1, 0))
    factor = gl.load(own + first * x_scale_stride) * gl.load(scales + first)
    for i in range(begin, end):
        slot = (i - begin) % STAGES
        ahead = gl.minimum(i + 1, end - 1)
        next_rows, next_scale = gl.load(own + ahead * x_scale_stride), gl.load(scales + ahead)
        mbarrier.wait(ready.index(slot), ((i - begin) // STAGES) & 1)
        given = x_tiles.index(slot).permute((1, 0))
        part = warpgroup_mma(w_tiles.index(2 * slot + WHICH), given, part, use_acc=False)
        mbarrier.arrive(free.index(slot), count=1)
        total += part * gl.expand_dims(factor, 0)
        factor = next_rows * next_scale
    at = column + WHICH * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, sums))
    last = True
    if SPLITS > 1:
        place = 2 * gl.program_id(0) + WHICH
        line = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, sums))
        inside = gl.expand_dims(line * ROWS, 1) + gl.expand_dims(token, 0)
        all_parts = parts + place.to(gl.int64) * (SPLITS * BLOCK * ROWS) + inside
        gl.store(all_parts + gl.program_id(1) * (BLOCK * ROWS), total)
        # All threads have written before the group says so.
        barrier()
        last = gl.atomic_add(arrivals + place, 1, sem="acq_rel") == SPLITS - 1
        if last:
            barrier()
            total = gl.load(all_parts, cache_modifier=".cg")
            for other in gl.static_range(1, SPLITS):
                total += gl.load(all_parts + other * (BLOCK * ROWS), cache_modifier=".cg")
            gl.store(arrivals + place, 0)
    if last:
        to = out + gl.expand_dims(token.to(gl.int64) * out_stride, 0) + gl.expand_dims(at, 1)
        written = gl.expand_dims(token < rows, 0) & gl.expand_dims(at < outputs, 1)
        gl.store(to, total.to(out.dtype.element_ty), mask=written)


@early
@gluon.jit(do_not_specialize=["rows", "x_scale_stride"])
def few_kernel(
    x, x_scales, codes, scales, out, parts, arrivals, rows, outputs, steps, x_scale_stride, scale_row, out_stride,
    ROWS: gl.constexpr, BLOCK: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """`x`: [n, padded] codes, by [ROWS, 128]; at most ROWS of them. `codes`: [outputs, padded], by [BLOCK, 128].
    `x_scales`: the runs of a row lie `x_scale_stride` apart. `steps`: of 128 inputs. `parts`, `arrivals`: as in
    `product_kernel`, for tiles of BLOCK outputs.
    """
    await_turn()
    column = gl.program_id(0) * (2 * BLOCK)
    share = gl.cdiv(steps, SPLITS)
    begin = gl.minimum(gl.program_id(1) * share, steps)
    end = gl.minimum(begin + share, steps)
    # The neighbour of a last block may not be there; nothing of it is written.
    far = gl.minimum(column + BLOCK, outputs - 1)
    near_scales, far_scales = scales + column // 128 * scale_row, scales + far // 128 * scale_row
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, 128], x.layout)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, BLOCK, 128], codes.layout)
    ready, free = ring(STAGES, 2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_multiply, (x_tiles, w_tiles, ready, free, x_scales, near_scales, out, parts, arrivals, rows, outputs,
                         column, begin, end, x_scale_stride, out_stride, 0, ROWS, BLOCK, SPLITS, STAGES)),
            (_multiply, (x_tiles, w_tiles, ready, free, x_scales, far_scales, out, parts, arrivals, rows, outputs,
                         column, begin, end, x_scale_stride, out_stride, 1, ROWS, BLOCK, SPLITS, STAGES)),
            (_fetch, (x, codes, x_tiles, w_tiles, ready, free, column, begin, end, BLOCK, STAGES)),
        ],
        [4, 4],
        [REGISTERS, 24],
    )  # fmt: skip


def knows(weight: Prepared, rows: int, bias: torch.Tensor | None) -> bool:
    """Whether this kernel knows the product on the weight's device."""
    return (
        weight.kind == "fp8"
        and not weight.experts
        and weight.scale_rows == 128
        and not weight.row_scales
        and rows <= MOST_ROWS
        and bias is None
        and on_hopper(weight.codes.device)
    )


def multiply(
    codes: torch.Tensor,
    x_scales: torch.Tensor,
    weight: Prepared,
    out: torch.Tensor,
    launch: Launch,
    parts: torch.Tensor,
    arrivals: torch.Tensor,
) -> None:
    """`codes`, `x_scales`: rows as `quantize_rows` gives them. `out`: [n, outputs], written into. `launch`: its
    `columns` are of both groups. Needs `knows`.
    """
    rows, outputs = len(codes), weight.outputs
    tall = max(16, triton.next_power_of_2(rows))
    block = launch.columns // 2
    few_kernel[(triton.cdiv(outputs, launch.columns), launch.splits)](
        _descriptor(codes, tall), x_scales, _descriptor(weight.codes[0], block), weight.scales, out, parts, arrivals,
        rows, outputs, weight.padded // 128, x_scales.stride(1), weight.scales.stride(1), out.stride(0),
        ROWS=tall, BLOCK=block, SPLITS=launch.splits, STAGES=_stages(tall, block), REGISTERS=_REGISTERS, num_warps=4,
    )  # fmt: skip


def _stages(rows: int, block: int) -> int:
    """As many as there is room for: what is on its way is what fills the memory's time."""
    return min(8, _SHARED // (128 * (rows + 2 * block)))


def _descriptor(codes: torch.Tensor, rows: int) -> Any:
    return TensorDescriptor(codes, list(codes.shape), list(codes.stride()), [rows, 128], _layout(rows))


def _layout(rows: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, 128], gl.float8e4nv)


def variants(arch: str) -> list[Variant]:
    """Few and most rows; nothing but for Hopper."""
    if arch != "sm_90":
        return []
    made = []
    for rows, block, splits in ((16, 64, 1), (64, 128, 4)):
        given = {"x": rows, "codes": block}
        signature = {name: f"tensordesc<fp8e4nv[{n},128],{_layout(n)!r}>" for name, n in given.items()}
        signature |= {"x_scales": "*fp32:16", "scales": "*fp32:16", "out": "*bf16:16"}
        signature |= {"parts": "*fp32:16", "arrivals": "*i32:16"}
        signature |= dict.fromkeys(("rows", "steps", "x_scale_stride", "scale_row"), "i32")
        signature |= {"outputs": "i32:16", "out_stride": "i32:16"}
        constants = {"ROWS": rows, "BLOCK": block, "SPLITS": splits, "STAGES": _stages(rows, block)}
        constants |= {"REGISTERS": _REGISTERS}
        made.append(Variant(f"fp8 {rows} rows, warps apart", few_kernel, signature, constants, 4, 1))
    return made
