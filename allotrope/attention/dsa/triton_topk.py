"""Exact top-k of score rows by radix select, bit by bit: the same indices as `attention/topk.py` on any machine.

A score is mapped to an unsigned key of the same order. The k-th largest key is built from its highest bit: a bit is set
if at least k keys reach the threshold with it, until exactly k do. Keys above the threshold are selected, and of equal
ones the first. Counts are integers, so the result does not depend on their order.

A program holds a block of a row in registers. In a longer row, every block selects its own top-k as candidates, and the
next pass selects from those, until one block is left. The row is read once; a candidate takes 4 bytes.
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
    scores, candidates, kv_lens, tokens, topk_indices, topk, width, scores_t, candidates_t, topk_t, topk_b,
    HAS_CANDIDATES: tl.constexpr, SCATTER: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The top-k positions of one block of one row, ascending, then -1 up to COLUMNS.

    With HAS_CANDIDATES, the kernel selects from `candidates` [t, width], -1 for none; else from the first `kv_lens[i]`
    positions. With SCATTER, row i is written to row `tokens[i]` of `topk_indices`.
    """
    gdc_wait()
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    scores += row * scores_t
    if HAS_CANDIDATES:
        position = tl.load(candidates + row * candidates_t + offs, mask=offs < width, other=-1)
        mask = position >= 0
    else:
        position = offs
        mask = offs < tl.load(kv_lens + row)
    num_candidates = tl.sum(mask.to(tl.int32), 0)
    out_row = row
    if SCATTER:
        out_row = tl.load(tokens + row).to(tl.int64)
    topk_indices += out_row * topk_t + block * topk_b
    selected = mask
    if num_candidates > topk:
        score = tl.load(scores + position, mask=mask, other=0.0)
        bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
        key = tl.where(bits >> 31 != 0, 0xFFFFFFFF - bits, bits | 0x80000000)
        key = tl.where(mask, key, 0)
        threshold = tl.zeros([], tl.uint32)
        bit = tl.full([], 0x80000000, tl.uint32)
        reached = num_candidates
        while (bit != 0) & (reached != topk):
            trial = threshold | bit
            count = tl.sum((key >= trial).to(tl.int32), 0)
            threshold = tl.where(count >= topk, trial, threshold)
            reached = tl.where(count >= topk, count, reached)
            bit = bit >> 1
        selected = mask & (key >= threshold)
        if reached != topk:
            above = key > threshold
            num_ties = topk - tl.sum(above.to(tl.int32), 0)
            equal = (mask & (key == threshold)).to(tl.int32)
            selected = above | ((equal != 0) & (tl.cumsum(equal, 0) <= num_ties))
    out_offset = tl.cumsum(selected.to(tl.int32), 0) - 1
    tl.store(topk_indices + out_offset, position.to(topk_indices.dtype.element_ty), mask=selected)
    column = tl.arange(0, BLOCK_K)
    none = tl.full([BLOCK_K], -1, topk_indices.dtype.element_ty)
    tl.store(topk_indices + column, none, mask=(column >= tl.minimum(num_candidates, topk)) & (column < COLUMNS))


def config(chip: Chip, width: int, topk: int, candidates: bool) -> tuple[int, int]:
    """Scores of a block, at least twice `topk` so that each pass has fewer blocks; and warps. `candidates`: as
    HAS_CANDIDATES, where positions take registers as well.
    """
    if chip.vendor == "cpu":
        return max(64, next_power_of_2(2 * topk)), 4
    # On AMD sixteen warps would leave too few registers to each.
    hopper = chip.has_wgmma
    block = min(16384 if hopper and not candidates else 8192, max(2048, next_power_of_2(width)))
    return max(block, next_power_of_2(2 * topk)), 16 if block >= 8192 and hopper else 8


def top_rows(
    scores: torch.Tensor,
    kv_lens: torch.Tensor,
    topk: int,
    chip: Chip,
    topk_indices: torch.Tensor,
    tokens: torch.Tensor | None,
) -> None:
    """Write the top-k of each row of `scores` [t, L] to `topk_indices` [T, K] int64, rows `tokens` (None: the first t).

    `kv_lens`: [t] int32 valid scores of each row; a row of at most `topk` selects all of them, and is not read. K is at
    least the smaller of `topk` and the largest of `kv_lens`; the rest of a row becomes -1.
    """
    candidates: torch.Tensor | None = None
    width = scores.shape[1]
    while True:
        block, warps = config(chip, width, topk, candidates is not None)
        blocks = cdiv(width, block)
        is_last = blocks == 1
        columns = topk_indices.shape[1] if is_last else topk
        out = (
            topk_indices
            if is_last
            else torch.empty(len(kv_lens), blocks * topk, dtype=torch.int32, device=scores.device)
        )
        scatter = is_last and tokens is not None
        topk_kernel[(len(kv_lens), blocks)](
            scores, kv_lens if candidates is None else candidates, kv_lens, tokens if scatter else kv_lens, out, topk,
            width, scores.stride(0), 0 if candidates is None else candidates.stride(0), out.stride(0), topk,
            HAS_CANDIDATES=candidates is not None, SCATTER=scatter, BLOCK=block, COLUMNS=columns,
            BLOCK_K=next_power_of_2(columns), num_warps=warps,
        )  # fmt: skip
        if is_last:
            return
        candidates, width = out, blocks * topk


@specializations
def released(chip: Chip) -> list[Specialization]:
    """The first and the last pass of a long row."""
    made = []
    for name, is_last in (("first", False), ("last", True)):
        block, warps = config(chip, 131072, 2048, is_last)
        signature = {"scores": "*fp32:16", "candidates": "*i32:16", "kv_lens": "*i32:16", "tokens": "*i32:16"}
        signature |= {"topk_indices": "*i64:16" if is_last else "*i32:16"}
        signature |= dict.fromkeys(("topk", "width", "scores_t", "candidates_t", "topk_t", "topk_b"), "i32:16")
        constants = {"HAS_CANDIDATES": is_last, "SCATTER": False, "BLOCK": block, "COLUMNS": 2048, "BLOCK_K": 2048}
        made.append(Specialization(f"dsa top-k {name}", topk_kernel, signature, constants, warps, 1))
    return made
