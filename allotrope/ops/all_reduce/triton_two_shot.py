"""The all-reduce by the Simple protocol, two-shot: each row is summed by one rank, which sends the sum to all.

A program walks its rows in chunks of one row for each rank. In step s it sends the parts of chunk s, sums its row of
chunk s - 1 and finishes chunk s - 2, so that links and memory are busy at once, whatever the size of the message; one
fence and one flag end a step. `PARTS` and `SUMS` slots of a chunk are taken by turns. Why they are enough: in step s a
rank knows, until it has waited, that its peers have ended step s - 2, and then step s - 1. Parts of chunk s are sent
before the wait, and those of chunk s - 3 were summed in step s - 2. Sums of chunk s - 1 are sent after it, and those
of chunk s - 3 were read in step s - 1.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton.language as tl

from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.ops.all_reduce.triton_flags import await_peers, signal_peers
from allotrope.ops.all_reduce.triton_row import finish_row, norm_operands, peer_pointer, sum_of_parts


@pdl_jit(do_not_specialize=["rank", "rows", "first", "last"])
def two_shot_kernel(
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
    lanes,
    row_bytes,
    first,
    last,
    RANKS: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SUMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    INNER: tl.constexpr,
    SCALE: tl.constexpr,
    PUSH: tl.constexpr,
    FINISH: tl.constexpr,
):
    """Program p has the rows p, p + `step`, ...; rank (p + k) % RANKS sums the k-th of them. `flags`, `lanes`: bytes up
    to them. `row_bytes`: of a row of a slot. `first`, `last`: the steps of this launch, all unless one process runs all
    ranks; then a launch has either the sends of a step or the rest of it. AT_ONCE: as in `ll_kernel`.
    """
    gdc_wait()
    gdc_launch_dependents()
    DTYPE: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    count = (rows - program + step - 1) // step
    chunks = ((rows + step - 1) // step + RANKS - 1) // RANKS
    begun = tl.load(counters + program)
    lane = lanes + program.to(tl.int64) * row_bytes * ((PARTS + SUMS) * RANKS)
    flags += program * (RANKS * 4)
    column = tl.arange(0, BLOCK)
    mine = peer_pointer(peers, rank, lane, DTYPE)
    part = row_bytes // (DTYPE.primitive_bitwidth // 8)
    for s in range(first, last):
        if PUSH:
            slot = lane + ((s % PARTS) * RANKS + rank) * row_bytes
            for k in range(s * RANKS, min((s + 1) * RANKS, count)):
                row = (program + k * step).to(tl.int64)
                mask = (column < SIZE) & (row * SIZE + column < numbers)
                value = tl.load(x + row * x_stride + column, mask=mask, other=0.0)
                tl.store(peer_pointer(peers, (program + k) % RANKS, slot, DTYPE) + column, value, mask=mask)
        if FINISH:
            if s > 0:
                await_peers(peers, flags, rank, begun + s, abort, RANKS, RANKS_BLOCK)
            # This rank's row of the chunk.
            own = (rank - program % RANKS + RANKS) % RANKS
            k = (s - 1) * RANKS + own
            if (s > 0) & (k < count):
                row = (program + k * step).to(tl.int64)
                mask = (column < SIZE) & (row * SIZE + column < numbers)
                parts = mine + ((s - 1) % PARTS) * RANKS * part
                total = sum_of_parts(parts + column, mask, part, BLOCK, RANKS, AT_ONCE).to(DTYPE)
                slot = lane + ((PARTS + (s - 1) % SUMS) * RANKS + own) * row_bytes
                for i in tl.static_range(RANKS):
                    tl.store(peer_pointer(peers, (rank + i) % RANKS, slot, DTYPE) + column, total, mask=mask)
            for k in range(max(s - 2, 0) * RANKS, min((s - 1) * RANKS, count)):
                row = program + k * step
                mask = (column < SIZE) & (row.to(tl.int64) * SIZE + column < numbers)
                summed = mine + ((PARTS + s % SUMS) * RANKS + k % RANKS) * part
                total = tl.load(summed + column, mask=mask, other=0.0, cache_modifier=".cg")
                operands = norm_operands(
                    residual, inner, scale, weight, row, column, mask, residual_stride, NORM, INNER, SCALE
                )
                finish_row(
                    *(total.to(tl.float32), operands, row, column, mask, residual_out, out, floor, SIZE),
                    *(NORM, INNER, SCALE),
                )
            if s < chunks + 1:
                signal_peers(peers, flags, rank, begun + s + 1, RANKS, RANKS_BLOCK)
            else:
                tl.store(counters + program, begun + s + 1)
