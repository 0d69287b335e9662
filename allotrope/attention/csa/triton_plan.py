"""The plan of a step for all layers of one type, in one launch: rope angles, and the cache slots of each query.

A program builds a block of one token's lists; the first program of a token also writes its angles and lengths.
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

# Most slots of a list that a program writes.
_MAX_BLOCK = 1024


@dataclass(frozen=True)
class Lists:
    """`angles`, `first_angles`: cos and sin [T, R] fp32 at each token and at the first token of its entry.

    `window_list`: [T, n] int32 slots of the window of each query, `window_lens`: [T] int32 their number. `entry_list`
    and `entry_lens`: likewise for the entries. Lists end with -1, and n is padded to 16 bytes. `entry_list` is None
    where each layer selects its own top-k of the `visible` [T] int32 entries.
    """

    angles: Angles
    first_angles: Angles
    window_list: torch.Tensor
    window_lens: torch.Tensor
    entry_list: torch.Tensor | None
    entry_lens: torch.Tensor
    visible: torch.Tensor


@triton.jit
def _store_slots(pages, offs, first, count, columns, list_ptr, length, PER_PAGE: tl.constexpr):
    """Write the slots of `count` items from `first` on to a list of `length`."""
    item = first + offs
    page = tl.load(pages + tl.minimum(item // PER_PAGE, columns - 1), mask=offs < count, other=-1)
    slot = tl.where(page >= 0, page * PER_PAGE + item % PER_PAGE, -1)
    tl.store(list_ptr + offs, slot.to(tl.int32), mask=offs < length)


@triton.jit
def _store_angles(position, freq, sign, factor, cos, sin, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """Write cos and sin of one position."""
    offs_r = tl.arange(0, BLOCK_R)
    c, s = rotation(position, freq, sign, factor, offs_r, R)
    tl.store(cos + offs_r, c, mask=offs_r < R)
    tl.store(sin + offs_r, s, mask=offs_r < R)


@pdl_jit
def plan_kernel(
    positions, requests, seq_lens, freq, sign, factor, window_table, entry_table,
    cos, sin, first_cos, first_sin, window_list, window_lens, entry_list, entry_lens, visible,
    window, max_entries, window_columns, entry_columns, window_row, entry_row, w_length, e_length,
    W_PAGE: tl.constexpr, E_PAGE: tl.constexpr, RATIO: tl.constexpr, ALL_ENTRIES: tl.constexpr,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `Lists`. `max_entries`: most entries that a query attends to. W_PAGE, E_PAGE: slots of a page. With RATIO 0
    there are no entries. `window_row`, `entry_row`: strides of the page tables. `w_length`, `e_length`: of the lists.
    """
    gdc_wait()
    gdc_launch_dependents()
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, request = tl.load(positions + token), tl.load(requests + token)
    kv_len = tl.where(tl.load(seq_lens + request) > 0, position + 1, 0)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    in_window = tl.minimum(kv_len, window)
    _store_slots(window_table + request * window_row, offs, tl.maximum(position + 1 - window, 0), in_window,
          window_columns, window_list + token * w_length, w_length, W_PAGE)  # fmt: skip
    entries = kv_len // RATIO if RATIO else kv_len * 0
    if ALL_ENTRIES:
        _store_slots(entry_table + request * entry_row, offs, 0, entries, entry_columns,
              entry_list + token * e_length, e_length, E_PAGE)  # fmt: skip
    if block == 0:
        tl.store(window_lens + token, in_window.to(tl.int32))
        tl.store(visible + token, entries.to(tl.int32))
        tl.store(entry_lens + token, tl.minimum(entries, max_entries).to(tl.int32))
        _store_angles(position, freq, sign, factor, cos + token * R, sin + token * R, R, BLOCK_R)
        if RATIO:
            first = position // RATIO * RATIO
            _store_angles(first, freq, sign, factor, first_cos + token * R, first_sin + token * R, R, BLOCK_R)


def make_lists(
    spec: CsaSpec, tensors: BatchTensors, window: PageIndex, entries: PageIndex | None, longest: int, *, listed: bool
) -> Lists:
    """`longest`: an upper bound of the KV lengths. `listed`: whether queries attend to all entries that they see."""
    tokens, device = len(tensors.positions), tensors.positions.device
    rope, max_entries = table(spec.rope, device), spec.visible_entries(longest)
    w_length, e_length = _padded(min(longest, spec.window)), _padded(max_entries) if listed else 0
    dim = len(rope.freq)

    def angles() -> Angles:
        cos_sin = torch.empty(2, tokens, dim, dtype=torch.float32, device=device)
        return cos_sin[0], cos_sin[1]

    token_angles = angles()
    first_angles = angles() if spec.ratio else token_angles
    window_list = torch.empty(tokens, w_length, dtype=torch.int32, device=device)
    entry_list = torch.empty(tokens, e_length, dtype=torch.int32, device=device) if listed else None
    window_lens, entry_lens, visible = torch.empty(3, tokens, dtype=torch.int32, device=device)
    paged = window if entries is None else entries
    block = min(_MAX_BLOCK, next_power_of_2(max(w_length, e_length)))
    plan_kernel[(tokens, cdiv(max(w_length, e_length), block))](
        tensors.positions, tensors.request_of_token, tensors.seq_lens, rope.freq, rope.sign, rope.factor,
        window.table, paged.table, *token_angles, *first_angles, window_list, window_lens,
        window_list if entry_list is None else entry_list, entry_lens, visible,
        spec.window, max_entries if spec.indexer is None else spec.indexer.topk, window.table.shape[1],
        paged.table.shape[1], window.table.stride(0), paged.table.stride(0), w_length, e_length,
        W_PAGE=window.page_size, E_PAGE=paged.page_size // max(1, spec.ratio), RATIO=spec.ratio,
        ALL_ENTRIES=listed, R=dim, BLOCK_R=next_power_of_2(dim), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return Lists(token_angles, first_angles, window_list, window_lens, entry_list, entry_lens, visible)


def _padded(length: int) -> int:
    """A length of int32, padded to 16 bytes."""
    return -(-max(length, 1) // 4) * 4


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Layers with a window alone, with the top-k entries, and with all entries."""
    made = []
    pointers = "positions requests window_table entry_table"
    signature = dict.fromkeys(pointers.split(), "*i64") | {"seq_lens": "*i32", "factor": "fp32"}
    signature |= dict.fromkeys("freq sign cos sin first_cos first_sin".split(), "*fp32")
    signature |= dict.fromkeys("window_list window_lens entry_list entry_lens visible".split(), "*i32")
    numbers = "window max_entries window_columns entry_columns window_row entry_row w_length e_length"
    signature |= dict.fromkeys(numbers.split(), "i32")
    for name, ratio, listed in (("window", 0, False), ("top-k", 4, False), ("all", 128, True)):
        constants = {"W_PAGE": 64, "E_PAGE": 64, "RATIO": ratio, "ALL_ENTRIES": listed}
        constants |= {"R": 64, "BLOCK_R": 64, "BLOCK": 128}
        made.append(Specialization(f"csa plan {name}", plan_kernel, signature, constants, 4, 1))
    return made
