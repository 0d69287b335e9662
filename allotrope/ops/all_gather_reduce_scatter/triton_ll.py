"""Gathers and reduce-scatters by the LL protocol: words that hold half data and half flag."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton.language as tl

from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.ops.all_reduce.triton_ll import half
from allotrope.ops.all_reduce.triton_row import given_up, peer_pointer


@pdl_jit(do_not_specialize=["rank"])
def ll_kernel(
    x,
    out,
    peers,
    counters,
    abort,
    rank,
    words,
    slots,
    chunk,
    RANKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
    REDUCE: tl.constexpr,
    PUSH: tl.constexpr,
    FINISH: tl.constexpr,
):
    """Program p sends, gets and finishes block p of a message of `words` of 32 bits.

    With REDUCE `x` has a message for each rank, of which `out` gets the sum; else all ranks get the one that it has.
    `slots`, `chunk`, AT_ONCE and the phases: as in the all-reduce's kernel.
    """
    gdc_wait()
    gdc_launch_dependents()
    DTYPE: tl.constexpr = x.dtype.element_ty
    # Numbers of a word.
    PACK: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    block = tl.program_id(0)
    epoch = tl.load(counters + block) + 1
    within = tl.arange(0, BLOCK)
    word = block * BLOCK + within
    mask = word < words
    slot = ((epoch % 2) * slots + block).to(tl.int64) * (RANKS * 8) * chunk
    if PUSH:
        start = x.to(tl.pointer_type(tl.int32))
        data = tl.zeros((BLOCK,), tl.int32)
        if not REDUCE:
            data = tl.load(start + word, mask=mask, other=0)
        for i in tl.static_range(RANKS):
            # Each rank begins with itself, so that no link is the first of all.
            peer = (rank + i) % RANKS
            if REDUCE:
                data = tl.load(start + peer * words + word, mask=mask, other=0)
            sent = (epoch.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF)
            to = peer_pointer(peers, peer, slot, tl.int64)
            tl.store(to + rank * chunk + within, sent, mask=mask, cache_modifier=".wt")
    if FINISH:
        mine = peer_pointer(peers, rank, slot, tl.int64)
        pending = 1
        polls = 0
        while pending != 0:
            late = tl.zeros((BLOCK,), tl.int32)
            for first in range(0, RANKS, AT_ONCE):
                for i in tl.static_range(AT_ONCE):
                    got = tl.load(mine + (first + i) * chunk + within, mask=mask, other=0, volatile=True)
                    late |= tl.where(mask, (got >> 32).to(tl.int32) ^ epoch, 0)
            pending = tl.max((late != 0).to(tl.int32), axis=0)
            if given_up(abort, polls):
                pending = 0
            polls += 1
        if REDUCE:
            low = tl.zeros((BLOCK,), tl.float32)
            high = tl.zeros((BLOCK,), tl.float32)
            for i in range(RANKS):
                got = tl.load(mine + i * chunk + within, mask=mask, other=0, volatile=True)
                if PACK == 1:
                    low += got.to(tl.int32).to(tl.float32, bitcast=True)
                else:
                    low += half(got, 0, DTYPE)
                    high += half(got, 16, DTYPE)
            if PACK == 1:
                tl.store(out + word, low, mask=mask)
            else:
                number = tl.arange(0, 2 * BLOCK)
                at = block * (2 * BLOCK) + number
                tl.store(out + at, tl.interleave(low, high).to(DTYPE), mask=at < 2 * words)
        else:
            for i in range(RANKS):
                got = tl.load(mine + i * chunk + within, mask=mask, other=0, volatile=True)
                tl.store(out + i * words + word, got.to(tl.int32), mask=mask)
        tl.store(counters + block, epoch)
