"""The all-reduce by the Simple protocol, one-shot and two-shot: whole rows, a fence, and a flag behind them."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.ops.all_reduce.triton_row import finish_row, given_up, norm_operands, peer_pointer


@triton.jit
def _signal(peers, flags, rank, epoch, RANKS: tl.constexpr, RANKS_BLOCK: tl.constexpr):
    """Tell every peer that all that this program wrote so far is there. `flags`: bytes up to those of a phase."""
    tl.debug_barrier()
    r = tl.arange(0, RANKS_BLOCK)
    start = tl.load(peers + r, mask=r < RANKS, other=0)
    flag = (start + flags + rank * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag, tl.zeros((RANKS_BLOCK,), tl.int32) + epoch, mask=r < RANKS, sem="release", scope="sys")


@triton.jit
def _await(peers, flags, rank, epoch, abort, RANKS: tl.constexpr, RANKS_BLOCK: tl.constexpr):
    """Wait until every peer has signalled."""
    r = tl.arange(0, RANKS_BLOCK)
    mine = (tl.load(peers + rank) + flags).to(tl.pointer_type(tl.int32))
    pending = 1
    polls = 0
    while pending != 0:
        seen = tl.load(mine + r, mask=r < RANKS, other=0, volatile=True)
        pending = tl.max(((r < RANKS) & (seen - epoch < 0)).to(tl.int32), axis=0)
        if given_up(abort, polls):
            pending = 0
        polls += 1
    # Loads that follow see all that was written before the flags.
    tl.atomic_add(mine, 0, sem="acq_rel", scope="sys")
    tl.debug_barrier()


@triton.jit
def _sum_of(start, mask, part, BLOCK: tl.constexpr, RANKS: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sum of the parts of all ranks, `part` numbers apart, in fp32."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, RANKS, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            got = tl.load(start + (first + i) * part, mask=mask, other=0.0, cache_modifier=".cg")
            total += got.to(tl.float32)
    return total


@pdl_jit(do_not_specialize=["rank", "rows"])
def simple_kernel(
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
    TWO_SHOT: tl.constexpr,
    NORM: tl.constexpr,
    INNER: tl.constexpr,
    SCALE: tl.constexpr,
    PUSH: tl.constexpr,
    SUM: tl.constexpr,
    FINISH: tl.constexpr,
):
    """One-shot or two-shot, Simple: program p has the rows p, p + `step`, ... `flags`, `arenas`: bytes up to them.

    `arena`: bytes of a program's rows; of one writer's parts in it `part` numbers, then, two-shot, the sums. A launch
    has all phases, unless one process runs all ranks. AT_ONCE: as in `ll_kernel`.
    """
    gdc_wait()
    gdc_launch_dependents()
    DTYPE: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    count = (rows - program + step - 1) // step
    epoch = tl.load(counters + program) + 1
    own = arenas + ((epoch % 2) * step + program).to(tl.int64) * arena
    flags += program * (2 * RANKS * 4)
    column = tl.arange(0, BLOCK)
    mine = peer_pointer(peers, rank, own, DTYPE)
    sums = RANKS * part
    if PUSH:
        for k in range(count):
            row = program + k * step
            mask = (column < SIZE) & (row.to(tl.int64) * SIZE + column < numbers)
            value = tl.load(x + row.to(tl.int64) * x_stride + column, mask=mask, other=0.0)
            if TWO_SHOT:
                to = peer_pointer(peers, (program + k) % RANKS, own, DTYPE)
                tl.store(to + rank * part + (k // RANKS) * SIZE + column, value, mask=mask)
            else:
                for i in tl.static_range(RANKS):
                    to = peer_pointer(peers, (rank + i) % RANKS, own, DTYPE)
                    tl.store(to + rank * part + k * SIZE + column, value, mask=mask)
        _signal(peers, flags, rank, epoch, RANKS, RANKS_BLOCK)
    if SUM and TWO_SHOT:
        _await(peers, flags, rank, epoch, abort, RANKS, RANKS_BLOCK)
        # The first of this program's rows that this rank sums.
        first = (rank - program % RANKS + RANKS) % RANKS
        for k in range(first, count, RANKS):
            row = program + k * step
            mask = (column < SIZE) & (row.to(tl.int64) * SIZE + column < numbers)
            total = _sum_of(mine + (k // RANKS) * SIZE + column, mask, part, BLOCK, RANKS, AT_ONCE)
            for i in tl.static_range(RANKS):
                to = peer_pointer(peers, (rank + i) % RANKS, own, DTYPE)
                tl.store(to + sums + k * SIZE + column, total.to(DTYPE), mask=mask)
        _signal(peers, flags + RANKS * 4, rank, epoch, RANKS, RANKS_BLOCK)
    if FINISH:
        _await(peers, flags + (RANKS * 4 if TWO_SHOT else 0), rank, epoch, abort, RANKS, RANKS_BLOCK)
        for k in range(count):
            row = program + k * step
            mask = (column < SIZE) & (row.to(tl.int64) * SIZE + column < numbers)
            if TWO_SHOT:
                total = tl.load(mine + sums + k * SIZE + column, mask=mask, other=0.0, cache_modifier=".cg").to(
                    tl.float32
                )
            else:
                total = _sum_of(mine + k * SIZE + column, mask, part, BLOCK, RANKS, AT_ONCE)
            operands = norm_operands(
                residual, inner, scale, weight, row, column, mask, residual_stride, NORM, INNER, SCALE
            )
            finish_row(total, operands, row, column, mask, residual_out, out, floor, SIZE, NORM, INNER, SCALE)
        tl.store(counters + program, epoch)
