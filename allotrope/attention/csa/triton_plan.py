"""What a step's layers of one kind share, in one launch: rotations, and the rows that each query reads.

A program makes a run of one token's lists; the first of a token also makes its numbers. Bytes moved: what is written,
and the tables' pages.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from allotrope.attention.batch import BatchTensors, PageIndex
from allotrope.attention.csa.rotary import table
from allotrope.attention.csa.spec import CsaSpec
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.rope.triton import rotation

Angles = tuple[torch.Tensor, torch.Tensor]

# Rows of a list that a program makes, at most.
_RUN = 1024


@dataclass(frozen=True)
class Lists:
    """`angles`, `first_angles`: cos and sin [T, R] fp32 at each token and at the first token of its entry.

    `window_list`: [T, n] int32 rows of the window that each query sees, `window_seen`: [T] int32 how many; `entry_list`
    and `entry_seen` likewise of the entries; -1 behind the last row, and n filled up to 16 bytes. `entry_list` is None
    where each layer picks its own, from `visible` [T] int32 of them.
    """

    angles: Angles
    first_angles: Angles
    window_list: torch.Tensor
    window_seen: torch.Tensor
    entry_list: torch.Tensor | None
    entry_seen: torch.Tensor
    visible: torch.Tensor


@triton.jit
def _rows(pages, place, first, count, columns, listed, length, PER_PAGE: tl.constexpr):
    """Rows of `count` items from `first` on, into a list of `length`."""
    item = first + place
    page = tl.load(pages + tl.minimum(item // PER_PAGE, columns - 1), mask=place < count, other=-1)
    row = tl.where(page >= 0, page * PER_PAGE + item % PER_PAGE, -1)
    tl.store(listed + place, row.to(tl.int32), mask=place < length)


@triton.jit
def _turned(position, freq, sign, factor, cos, sin, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """cos and sin of one position, to their places."""
    dim = tl.arange(0, BLOCK_R)
    c, s = rotation(position, freq, sign, factor, dim, R)
    tl.store(cos + dim, c, mask=dim < R)
    tl.store(sin + dim, s, mask=dim < R)


@pdl_jit
def plan_kernel(
    positions, requests, seq_lens, freq, sign, factor, window_table, entry_table,
    cos, sin, first_cos, first_sin, window_list, window_seen, entry_list, entry_seen, visible,
    window, most, window_columns, entry_columns, window_row, entry_row, w_length, e_length,
    W_PAGE: tl.constexpr, E_PAGE: tl.constexpr, RATIO: tl.constexpr, LISTED: tl.constexpr,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `Lists`. `most`: entries that a query reads. `W_PAGE`, `E_PAGE`: rows of a page. RATIO 0 has no entries.
    `window_row`, `entry_row`: strides of the tables. `w_length`, `e_length`: of the lists.
    """
    gdc_wait()
    gdc_launch_dependents()
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, request = tl.load(positions + token), tl.load(requests + token)
    seen = tl.where(tl.load(seq_lens + request) > 0, position + 1, 0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    in_window = tl.minimum(seen, window)
    _rows(window_table + request * window_row, place, tl.maximum(position + 1 - window, 0), in_window, window_columns,
          window_list + token * w_length, w_length, W_PAGE)  # fmt: skip
    entries = seen // RATIO if RATIO else seen * 0
    if LISTED:
        _rows(entry_table + request * entry_row, place, 0, entries, entry_columns,
              entry_list + token * e_length, e_length, E_PAGE)  # fmt: skip
    if block == 0:
        tl.store(window_seen + token, in_window.to(tl.int32))
        tl.store(visible + token, entries.to(tl.int32))
        tl.store(entry_seen + token, tl.minimum(entries, most).to(tl.int32))
        _turned(position, freq, sign, factor, cos + token * R, sin + token * R, R, BLOCK_R)
        if RATIO:
            first = position // RATIO * RATIO
            _turned(first, freq, sign, factor, first_cos + token * R, first_sin + token * R, R, BLOCK_R)


def make_lists(
    spec: CsaSpec, tensors: BatchTensors, window: PageIndex, entries: PageIndex | None, longest: int, *, listed: bool
) -> Lists:
    """`longest`: no query sees more tokens. `listed`: whether all entries that a query sees are."""
    tokens, device = len(tensors.positions), tensors.positions.device
    rope, most = table(spec.rope, device), spec.visible_entries(longest)
    w_length, e_length = _filled(min(longest, spec.window)), _filled(most) if listed else 0
    dim = len(rope.freq)

    def angles() -> Angles:
        made = torch.empty(2, tokens, dim, dtype=torch.float32, device=device)
        return made[0], made[1]

    at = angles()
    first = angles() if spec.ratio else at
    window_list = torch.empty(tokens, w_length, dtype=torch.int32, device=device)
    entry_list = torch.empty(tokens, e_length, dtype=torch.int32, device=device) if listed else None
    window_seen, entry_seen, visible = torch.empty(3, tokens, dtype=torch.int32, device=device)
    paged = window if entries is None else entries
    block = min(_RUN, next_power_of_2(max(w_length, e_length)))
    plan_kernel[(tokens, cdiv(max(w_length, e_length), block))](
        tensors.positions, tensors.request_of_token, tensors.seq_lens, rope.freq, rope.sign, rope.factor,
        window.table, paged.table, *at, *first, window_list, window_seen,
        window_list if entry_list is None else entry_list, entry_seen, visible,
        spec.window, most if spec.indexer is None else spec.indexer.topk, window.table.shape[1], paged.table.shape[1],
        window.table.stride(0), paged.table.stride(0), w_length, e_length,
        W_PAGE=window.page_size, E_PAGE=paged.page_size // max(1, spec.ratio), RATIO=spec.ratio,
        LISTED=listed, R=dim, BLOCK_R=next_power_of_2(dim), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return Lists(at, first, window_list, window_seen, entry_list, entry_seen, visible)


def _filled(length: int) -> int:
    """Filled up to 16 bytes of int32."""
    return -(-max(length, 1) // 4) * 4


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Layers with a window alone, with entries that each layer picks, and with all entries."""
    made = []
    pointers = "positions requests window_table entry_table"
    signature = dict.fromkeys(pointers.split(), "*i64") | {"seq_lens": "*i32", "factor": "fp32"}
    signature |= dict.fromkeys("freq sign cos sin first_cos first_sin".split(), "*fp32")
    signature |= dict.fromkeys("window_list window_seen entry_list entry_seen visible".split(), "*i32")
    numbers = "window most window_columns entry_columns window_row entry_row w_length e_length"
    signature |= dict.fromkeys(numbers.split(), "i32")
    for name, ratio, listed in (("window", 0, False), ("picked", 4, False), ("all", 128, True)):
        constants = {"W_PAGE": 64, "E_PAGE": 64, "RATIO": ratio, "LISTED": listed}
        constants |= {"R": 64, "BLOCK_R": 64, "BLOCK": 128}
        made.append(Specialization(f"csa plan {name}", plan_kernel, signature, constants, 4, 1))
    return made
