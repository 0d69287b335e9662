"""What the protocols of the all-reduce share: reaching a peer, giving up, the sum of a row and what follows it."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

# Polls between two looks at the abort flag, a power of two: some 50 ms. It lies in the host's memory, where the reads
# of all threads of all programs take 2 ms: looks after 1 ms made ranks that were apart by as much stay apart.
POLLS = tl.constexpr(1 << 16)


@triton.jit
def peer_pointer(peers, rank, offset, dtype: tl.constexpr):
    """Pointer to `offset` bytes behind the start of a rank's buffer."""
    return tl.multiple_of((tl.load(peers + rank) + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def given_up(abort, polls):
    """Whether a poll is the last one, for a rank has died."""
    stop = False
    if polls & (POLLS - 1) == POLLS - 1:
        stop = tl.load(abort, volatile=True) != 0
    return stop


@triton.jit
def sum_of_parts(start, mask, part, BLOCK: tl.constexpr, RANKS: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sum of the parts of all ranks, `part` numbers apart, in fp32."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, RANKS, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            got = tl.load(start + (first + i) * part, mask=mask, other=0.0, cache_modifier=".cg")
            total += got.to(tl.float32)
    return total


@triton.jit
def norm_operands(
    residual,
    inner,
    scale,
    weight,
    row,
    column,
    mask,
    residual_stride,
    NORM: tl.constexpr,
    INNER: tl.constexpr,
    SCALE: tl.constexpr,
):
    """All that a row's norms read beside its sum: a row of the residual, both weights, the factor."""
    r = 0.0
    inner_weight = 0.0
    factor = 1.0
    w = 0.0
    if NORM:
        r = tl.load(residual + row.to(tl.int64) * residual_stride + column, mask=mask, other=0.0)
        w = tl.load(weight + column, mask=mask, other=0.0)
        if INNER:
            inner_weight = tl.load(inner + column, mask=mask, other=0.0)
        if SCALE:
            factor = tl.load(scale).to(tl.float32)
    return r, inner_weight, factor, w


@triton.jit
def finish_row(
    value,
    operands,
    row,
    column,
    mask,
    residual_out,
    out,
    floor,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    INNER: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Write one row from its sum `value` in fp32: as the norm's own kernel, which gets it rounded."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    r, inner_weight, factor, w = operands
    offset = row.to(tl.int64) * SIZE + column
    value = value.to(DTYPE)
    if NORM:
        value = value.to(tl.float32)
        if INNER:
            sum_sq = tl.sum(value * value, axis=0) + floor
            value = (value * tl.rsqrt(sum_sq) * inner_weight).to(DTYPE).to(tl.float32)
        rounded = (value + r.to(tl.float32)).to(DTYPE)
        if SCALE:
            rounded = (rounded.to(tl.float32) * factor).to(DTYPE)
        tl.store(residual_out + offset, rounded, mask=mask)
        value = rounded.to(tl.float32)
        sum_sq = tl.sum(value * value, axis=0) + floor
        value = (value * tl.rsqrt(sum_sq) * w).to(DTYPE)
    tl.store(out + offset, value, mask=mask)
