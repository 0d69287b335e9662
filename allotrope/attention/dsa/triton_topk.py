"""Exact top-k of score rows by the digits of their bits: the same picks as `attention/topk.py`, whatever the machine.

A score becomes an unsigned number of the same order. Four times, the scores that agree with what is known of the k-th
largest are counted by their next 8 bits, which tells its next 8 bits; then one pass takes what is larger, and of what
is equal the first ones. Counts are integers: no result depends on the order of anything.

A program owns a row. Bytes moved: the row, five times, from the second time on mostly out of L2.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from allotrope.attention.ahead import Variant

_DIGITS = tl.constexpr(256)


@triton.jit
def _ordered(scores, index, inside):
    """Scores as numbers of 32 bits, without sign, of the same order; both zeros are one."""
    score = tl.load(scores + index, mask=inside, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, 0xFFFFFFFF - bits, bits | 0x80000000)


@triton.jit
def topk_kernel(
    scores, seen, tokens, picks, topk, columns, scores_t, picks_t, LISTED: tl.constexpr, BLOCK: tl.constexpr
):
    """One row. `picks` [T, columns] int64: row `tokens[i]` with LISTED, else row i, gets all its columns written."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.load(seen + row)
    to = row
    if LISTED:
        to = tl.load(tokens + row).to(tl.int64)
    scores += row * scores_t
    picks += to * picks_t
    if n <= topk:
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(picks + column, tl.where(column < n, column, -1).to(tl.int64), mask=column < columns)
    else:
        digit = tl.arange(0, _DIGITS)
        known = tl.zeros([], tl.uint32)
        rest = topk
        for shift in tl.static_range(24, -1, -8):
            counts = tl.zeros([_DIGITS], tl.int32)
            for start in range(0, n, BLOCK):
                index = start + tl.arange(0, BLOCK)
                inside = index < n
                key = _ordered(scores, index, inside)
                if shift < 24:
                    inside = inside & ((key >> (shift + 8)) == known)
                counts += tl.histogram(((key >> shift) & 0xFF).to(tl.int32), _DIGITS, mask=inside)
            # Scores whose digit is at least this one: falls with the digit, and is `rest` or more up to that of the k-th.
            reached = tl.cumsum(counts, 0, reverse=True)
            found = tl.sum((reached >= rest).to(tl.int32), 0) - 1
            rest -= tl.sum(tl.where(digit > found, counts, 0), 0)
            known = (known << 8) | found.to(tl.uint32)
        written = 0
        equals = 0
        for start in range(0, n, BLOCK):
            index = start + tl.arange(0, BLOCK)
            inside = index < n
            key = _ordered(scores, index, inside)
            equal = (inside & (key == known)).to(tl.int32)
            rank = equals + tl.cumsum(equal, 0)
            taken = (inside & (key > known)) | ((equal != 0) & (rank <= rest))
            place = written + tl.cumsum(taken.to(tl.int32), 0) - 1
            tl.store(picks + place, index.to(tl.int64), mask=taken)
            written += tl.sum(taken.to(tl.int32), 0)
            equals += tl.sum(equal, 0)


def config(arch: str, bound: int) -> tuple[int, int]:
    """Scores at a time, and warps."""
    if arch == "interpreter":
        return 64, 4
    return (4096, 16) if bound > 2048 and arch == "sm_90" else (2048, 8)


def top_rows(
    scores: torch.Tensor, seen: torch.Tensor, topk: int, arch: str, picks: torch.Tensor, tokens: torch.Tensor | None
) -> None:
    """Write picks of each row of `scores` [t, L] into rows `tokens` (None: the first t) of `picks` [T, K] int64.

    `seen`: [t] int32 scores that count; a row of at most `topk` of them picks all, and is not read. K is at least the
    smaller of `topk` and the largest of `seen`; what is left of a row becomes -1.
    """
    block, warps = config(arch, scores.shape[1])
    topk_kernel[(len(seen),)](
        scores, seen, seen if tokens is None else tokens, picks, topk, picks.shape[1], scores.stride(0),
        picks.stride(0), LISTED=tokens is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def variants(arch: str) -> list[Variant]:
    """Long rows."""
    block, warps = config(arch, 131072)
    signature = {"scores": "*fp32:16", "seen": "*i32:16", "tokens": "*i64:16", "picks": "*i64:16", "topk": "i32"}
    signature |= {"columns": "i32", "scores_t": "i32:16", "picks_t": "i32:16"}
    constants = {"LISTED": True, "BLOCK": block}
    return [Variant("dsa top-k", topk_kernel, signature, constants, warps, 1)]
