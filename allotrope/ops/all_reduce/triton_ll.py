"""The all-reduce by the LL protocol: words that hold half data and half flag."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.ops.all_reduce.triton_row import finish_row, given_up, norm_operands, peer_pointer


@triton.jit
def half(words, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    """The lower or upper 16 bits of each word, a number of DTYPE, in fp32."""
    return (words >> SHIFT).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@pdl_jit(do_not_specialize=["rank"])
def ll_kernel(
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
    slots,
    chunk,
    RANKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    INNER: tl.constexpr,
    SCALE: tl.constexpr,
    PUSH: tl.constexpr,
    FINISH: tl.constexpr,
):
    """One-shot, LL: program r sends, gets and finishes row r. `numbers`: of all rows together.

    `slots`: rows that there is room for. `chunk`: 64-bit words of one writer's row. `x_stride`: in words of 32 bits. A
    launch has both phases, unless one process runs all ranks. AT_ONCE: ranks whose parts are loaded together.
    """
    gdc_wait()
    gdc_launch_dependents()
    DTYPE: tl.constexpr = x.dtype.element_ty
    # Numbers of a word.
    PACK: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    WORDS: tl.constexpr = BLOCK // PACK
    row = tl.program_id(0)
    epoch = tl.load(counters + row) + 1
    word = tl.arange(0, WORDS)
    word_mask = (word < SIZE // PACK) & (row.to(tl.int64) * (SIZE // PACK) + word < numbers // PACK)
    slot = ((epoch % 2) * slots + row).to(tl.int64) * (RANKS * 8) * chunk
    if PUSH:
        start = x.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * x_stride
        data = tl.load(start + word, mask=word_mask, other=0)
        sent = (epoch.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF)
        for i in tl.static_range(RANKS):
            # Each rank begins with itself, so that no link is the first of all.
            to = peer_pointer(peers, (rank + i) % RANKS, slot, tl.int64)
            tl.store(to + rank * chunk + word, sent, mask=word_mask, cache_modifier=".wt")
    if FINISH:
        column = tl.arange(0, BLOCK)
        mask = (column < SIZE) & (row.to(tl.int64) * SIZE + column < numbers)
        # While the parts are on their way.
        operands = norm_operands(residual, inner, scale, weight, row, column, mask, residual_stride, NORM, INNER, SCALE)
        mine = peer_pointer(peers, rank, slot, tl.int64)
        low = tl.zeros((WORDS,), tl.float32)
        high = tl.zeros((WORDS,), tl.float32)
        pending = 1
        polls = 0
        while pending != 0:
            # Summed at each poll: the one that finds all parts complete has the sum.
            low = tl.zeros((WORDS,), tl.float32)
            high = tl.zeros((WORDS,), tl.float32)
            late = tl.zeros((WORDS,), tl.int32)
            for first in range(0, RANKS, AT_ONCE):
                for i in tl.static_range(AT_ONCE):
                    got = tl.load(mine + (first + i) * chunk + word, mask=word_mask, other=0, volatile=True)
                    late |= tl.where(word_mask, (got >> 32).to(tl.int32) ^ epoch, 0)
                    if PACK == 1:
                        low += got.to(tl.int32).to(tl.float32, bitcast=True)
                    else:
                        low += half(got, 0, DTYPE)
                        high += half(got, 16, DTYPE)
            pending = tl.max((late != 0).to(tl.int32), axis=0)
            if given_up(abort, polls):
                pending = 0
            polls += 1
        value = low
        if PACK == 2:
            value = tl.interleave(low, high)
        finish_row(value, operands, row, column, mask, residual_out, out, floor, SIZE, NORM, INNER, SCALE)
        tl.store(counters + row, epoch)
