"""The flags of the Simple protocol: a program tells the same program of every peer how far it is, behind a fence."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from allotrope.ops.all_reduce.triton_row import given_up


@triton.jit
def signal_peers(peers, flags, rank, epoch, RANKS: tl.constexpr, RANKS_BLOCK: tl.constexpr):
    """Tell every peer that all that this program wrote so far is there. `flags`: bytes up to those of the program."""
    tl.debug_barrier()
    r = tl.arange(0, RANKS_BLOCK)
    start = tl.load(peers + r, mask=r < RANKS, other=0)
    flag = (start + flags + rank * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag, tl.zeros((RANKS_BLOCK,), tl.int32) + epoch, mask=r < RANKS, sem="release", scope="sys")


@triton.jit
def await_peers(peers, flags, rank, epoch, abort, RANKS: tl.constexpr, RANKS_BLOCK: tl.constexpr):
    """Wait until every peer has signalled `epoch`, or a later one."""
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
