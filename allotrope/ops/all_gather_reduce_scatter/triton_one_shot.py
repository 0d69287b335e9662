"""Gathers and reduce-scatters by the Simple protocol: whole blocks, a fence, and a flag behind them."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton.language as tl

from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.ops.all_reduce.triton_flags import await_peers, signal_peers
from allotrope.ops.all_reduce.triton_row import peer_pointer, sum_of_parts


@pdl_jit(do_not_specialize=["rank", "blocks"])
def one_shot_kernel(
    x,
    out,
    peers,
    counters,
    abort,
    rank,
    numbers,
    blocks,
    step,
    flags,
    arenas,
    arena,
    part,
    RANKS: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
    REDUCE: tl.constexpr,
    PUSH: tl.constexpr,
    FINISH: tl.constexpr,
):
    """Program p has the blocks p, p + `step`, ... of a message of `numbers`. REDUCE: as in the LL kernel.

    `flags`, `arenas`, `arena`, `part`, AT_ONCE and the phases: as in the all-reduce's kernel.
    """
    gdc_wait()
    gdc_launch_dependents()
    DTYPE: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    count = (blocks - program + step - 1) // step
    epoch = tl.load(counters + program) + 1
    own = arenas + ((epoch % 2) * step + program).to(tl.int64) * arena
    flags += program * (RANKS * 4)
    within = tl.arange(0, BLOCK)
    if PUSH:
        for k in range(count):
            number = (program + k * step) * BLOCK + within
            mask = number < numbers
            value = tl.zeros((BLOCK,), DTYPE)
            if not REDUCE:
                value = tl.load(x + number, mask=mask, other=0)
            for i in tl.static_range(RANKS):
                peer = (rank + i) % RANKS
                if REDUCE:
                    value = tl.load(x + peer * numbers + number, mask=mask, other=0)
                to = peer_pointer(peers, peer, own, DTYPE)
                tl.store(to + rank * part + k * BLOCK + within, value, mask=mask)
        signal_peers(peers, flags, rank, epoch, RANKS, RANKS_BLOCK)
    if FINISH:
        mine = peer_pointer(peers, rank, own, DTYPE)
        await_peers(peers, flags, rank, epoch, abort, RANKS, RANKS_BLOCK)
        for k in range(count):
            number = (program + k * step) * BLOCK + within
            mask = number < numbers
            start = mine + k * BLOCK + within
            if REDUCE:
                total = sum_of_parts(start, mask, part, BLOCK, RANKS, AT_ONCE)
                tl.store(out + number, total.to(DTYPE), mask=mask)
            else:
                for i in range(RANKS):
                    got = tl.load(start + i * part, mask=mask, other=0, cache_modifier=".cg")
                    tl.store(out + i * numbers + number, got, mask=mask)
        tl.store(counters + program, epoch)
