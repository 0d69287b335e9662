"""Exact top-k of score rows by the bits of the k-th largest: the same picks as `attention/topk.py` on any machine.

A score becomes an unsigned number of the same order. The k-th largest is found bit by bit: a bit is set if k numbers or
more are at least so large, until k are. What is larger is taken, and of what is equal the first. Counts are integers,
so no result depends on the order of anything.

A program holds a block of a row in registers. Of a longer row every block names its own k best, which are the only ones
that can be among the row's; they are picked from in the same way, until one block is left. Bytes moved: the row once,
and 4 bytes for each pick of a block.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2


@pdl_jit
def topk_kernel(
    scores, named, seen, tokens, picks, topk, width, scores_t, named_t, picks_t, picks_b,
    GIVEN: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of one row: its best, ascending, then -1 up to COLUMNS.

    With GIVEN, candidates are `named` [t, width], -1 for none; else the first `seen[i]` positions. LISTED: row i is
    written to row `tokens[i]` of `picks`.
    """
    gdc_wait()
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    scores += row * scores_t
    if GIVEN:
        position = tl.load(named + row * named_t + index, mask=index < width, other=-1)
        there = position >= 0
    else:
        position = index
        there = index < tl.load(seen + row)
    candidates = tl.sum(there.to(tl.int32), 0)
    to = row
    if LISTED:
        to = tl.load(tokens + row).to(tl.int64)
    picks += to * picks_t + block * picks_b
    taken = there
    if candidates > topk:
        score = tl.load(scores + position, mask=there, other=0.0)
        bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
        key = tl.where(bits >> 31 != 0, 0xFFFFFFFF - bits, bits | 0x80000000)
        key = tl.where(there, key, 0)
        least = tl.zeros([], tl.uint32)
        bit = tl.full([], 0x80000000, tl.uint32)
        reached = candidates
        while (bit != 0) & (reached != topk):
            tried = least | bit
            count = tl.sum((key >= tried).to(tl.int32), 0)
            least = tl.where(count >= topk, tried, least)
            reached = tl.where(count >= topk, count, reached)
            bit = bit >> 1
        taken = there & (key >= least)
        if reached != topk:
            above = key > least
            rest = topk - tl.sum(above.to(tl.int32), 0)
            equal = (there & (key == least)).to(tl.int32)
            taken = above | ((equal != 0) & (tl.cumsum(equal, 0) <= rest))
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(picks + place, position.to(picks.dtype.element_ty), mask=taken)
    column = tl.arange(0, BLOCK_K)
    left = tl.full([BLOCK_K], -1, picks.dtype.element_ty)
    tl.store(picks + column, left, mask=(column >= tl.minimum(candidates, topk)) & (column < COLUMNS))


def config(chip: Chip, width: int, topk: int, named: bool) -> tuple[int, int]:
    """Scores of a block, at least twice `topk` so that blocks grow fewer; and warps. `named`: as GIVEN, positions take
    registers then.
    """
    if chip.vendor == "cpu":
        return max(64, next_power_of_2(2 * topk)), 4
    # On AMD sixteen warps leave each too few registers.
    hopper = chip.has_wgmma
    block = min(16384 if hopper and not named else 8192, max(2048, next_power_of_2(width)))
    return max(block, next_power_of_2(2 * topk)), 16 if block >= 8192 and hopper else 8


def top_rows(
    scores: torch.Tensor, seen: torch.Tensor, topk: int, chip: Chip, picks: torch.Tensor, tokens: torch.Tensor | None
) -> None:
    """Write picks of each row of `scores` [t, L] into rows `tokens` (None: the first t) of `picks` [T, K] int64.

    `seen`: [t] int32 scores that count; a row of at most `topk` of them picks all, and is not read. K is at least the
    smaller of `topk` and the largest of `seen`; what is left of a row becomes -1.
    """
    named: torch.Tensor | None = None
    width = scores.shape[1]
    while True:
        block, warps = config(chip, width, topk, named is not None)
        blocks = cdiv(width, block)
        last = blocks == 1
        columns = picks.shape[1] if last else topk
        found = picks if last else torch.empty(len(seen), blocks * topk, dtype=torch.int32, device=scores.device)
        listed = last and tokens is not None
        topk_kernel[(len(seen), blocks)](
            scores, seen if named is None else named, seen, tokens if listed else seen, found, topk, width,
            scores.stride(0), 0 if named is None else named.stride(0), found.stride(0), topk,
            GIVEN=named is not None, LISTED=listed, BLOCK=block, COLUMNS=columns,
            BLOCK_K=next_power_of_2(columns), num_warps=warps,
        )  # fmt: skip
        if last:
            return
        named, width = found, blocks * topk


@specializations
def released(chip: Chip) -> list[Specialization]:
    """The first and the last pass over a long row."""
    made = []
    for name, given in (("first", False), ("last", True)):
        block, warps = config(chip, 131072, 2048, given)
        signature = {"scores": "*fp32:16", "named": "*i32:16", "seen": "*i32:16", "tokens": "*i32:16"}
        signature |= {"picks": "*i64:16" if given else "*i32:16"}
        signature |= dict.fromkeys(("topk", "width", "scores_t", "named_t", "picks_t", "picks_b"), "i32:16")
        constants = {"GIVEN": given, "LISTED": False, "BLOCK": block, "COLUMNS": 2048, "BLOCK_K": 2048}
        made.append(Specialization(f"dsa top-k {name}", topk_kernel, signature, constants, warps, 1))
    return made
