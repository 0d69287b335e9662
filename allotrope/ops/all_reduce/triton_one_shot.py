"""The all-reduce by the Simple protocol, one-shot: whole rows, a fence, and a flag behind them."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton.language as tl

from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.ops.all_reduce.triton_flags import await_peers, signal_peers
from allotrope.ops.all_reduce.triton_row import finish_row, norm_operands, peer_pointer, sum_of_parts


@pdl_jit(do_not_specialize=["rank", "rows"])
def one_shot_kernel(
    x,
    residual,
    inner,
    scale,
    weight,
    residual_out,
    out,
    peers,
    counters,
    abort,
    rank,
    numbers,
    x_stride,
    residual_stride,
    floor,
    rows,
    step,
    flags,
    arenas,
    arena,
    part,
    RANKS: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    INNER: tl.constexpr,
    SCALE: tl.constexpr,
    PUSH: tl.constexpr,
    FINISH: tl.constexpr,
):
    """One-shot, Simple: program p has the rows p, p + `step`, ... `flags`, `arenas`: bytes up to them.

    `arena`: bytes of a program's rows; of one writer's parts in it `part` numbers. A launch has both phases, unless one
    process runs all ranks. AT_ONCE: as in `ll_kernel`.
    """
    gdc_wait()
    gdc_launch_dependents()
    DTYPE: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    count = (rows - program + step - 1) // step
    epoch = tl.load(counters + program) + 1
    own = arenas + ((epoch % 2) * step + program).to(tl.int64) * arena
    flags += program * (RANKS * 4)
    column = tl.arange(0, BLOCK)
    mine = peer_pointer(peers, rank, own, DTYPE)
    if PUSH:
        for k in range(count):
            row = program + k * step
            mask = (column < SIZE) & (row.to(tl.int64) * SIZE + column < numbers)
            value = tl.load(x + row.to(tl.int64) * x_stride + column, mask=mask, other=0.0)
            for i in tl.static_range(RANKS):
                to = peer_pointer(peers, (rank + i) % RANKS, own, DTYPE)
                tl.store(to + rank * part + k * SIZE + column, value, mask=mask)
        signal_peers(peers, flags, rank, epoch, RANKS, RANKS_BLOCK)
    if FINISH:
        await_peers(peers, flags, rank, epoch, abort, RANKS, RANKS_BLOCK)
        for k in range(count):
            row = program + k * step
            mask = (column < SIZE) & (row.to(tl.int64) * SIZE + column < numbers)
            total = sum_of_parts(mine + k * SIZE + column, mask, part, BLOCK, RANKS, AT_ONCE)
            operands = norm_operands(
                residual, inner, scale, weight, row, column, mask, residual_stride, NORM, INNER, SCALE
            )
            finish_row(total, operands, row, column, mask, residual_out, out, floor, SIZE, NORM, INNER, SCALE)
        tl.store(counters + program, epoch)
