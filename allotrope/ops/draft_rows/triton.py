"""Rows of steps with draft tokens for a GPU: one launch where PyTorch has a dozen.

Bytes moved: a few numbers a row; what counts is the number of launches. A program owns a block of rows.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv
from allotrope.ops.draft_rows.spec import AcceptedDrafts, ChainRows, MovedRows, PagedSlots

BLOCK = 128
# Tokens whose places among the sampled ones are counted at once.
_PLACED = 1024


@triton.jit
def token_slot(table, table_row, width, row, position, mask, PAGE_SIZE: tl.constexpr):
    """The slot of a token at `position` of each row, -1 where it has no page but the null page."""
    page_index = position // PAGE_SIZE
    page = tl.load(table + row.to(tl.int64) * table_row + page_index, mask=mask & (page_index < width), other=-1)
    return tl.where(page > 0, page * PAGE_SIZE + position % PAGE_SIZE, -1)


@pdl_jit(do_not_specialize=["size"])
def advance_rows_kernel(
    ids, prev_sampled_indices, prev_sampled, prev_sequence, accepted, positions, seq_lens, num_rows, replay, table,
    slots, size, table_row, width,
    MOVES: tl.constexpr, PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """MOVES: move the rows themselves, not only the slots of one more cache group."""
    gdc_wait()
    gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < size
    sequence = tl.load(prev_sequence + row, mask=mask, other=-1)
    moves = sequence >= 0
    position = tl.load(positions + row, mask=mask, other=0)
    if MOVES:
        by = tl.load(accepted + sequence, mask=mask & moves, other=0)
        index = tl.load(prev_sampled_indices + row, mask=mask, other=-1)
        token = tl.load(ids + row, mask=mask, other=0)
        token = tl.where(index >= 0, tl.load(prev_sampled + index, mask=mask & (index >= 0), other=0), token)
        tl.store(ids + row, tl.where(token >= 0, token, 0), mask=mask)
        position += by
        tl.store(positions + row, position, mask=mask)
        moved = by.to(tl.int32)
        tl.store(seq_lens + row, tl.load(seq_lens + row, mask=mask, other=0) + moved, mask=mask)
        tl.store(replay + row, moved, mask=mask & moves & (tl.load(num_rows + row, mask=mask, other=0) > 0))
    if PAGED:
        slot = token_slot(table, table_row, width, row, position, mask, PAGE_SIZE)
        tl.store(slots + row, slot, mask=mask & moves)


def advance_rows(rows: MovedRows, prev_sampled: torch.Tensor, accepted: torch.Tensor) -> None:
    """As `reference.advance_rows`. One launch, and one for each cache group with pages behind the first."""
    size = len(rows.ids)
    for i, (page_size, table, slots) in enumerate(rows.paged or [PagedSlots(1, rows.ids[:, None], rows.ids)]):
        advance_rows_kernel[(cdiv(size, BLOCK),)](
            rows.ids, rows.prev_sampled_indices, prev_sampled, rows.prev_sequence, accepted, rows.positions,
            rows.seq_lens, rows.num_rows, rows.replay, table, slots, size, table.stride(0), table.shape[1],
            MOVES=i == 0, PAGED=bool(rows.paged), PAGE_SIZE=page_size, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


@pdl_jit(do_not_specialize=["count"])
def place_sampled_kernel(next_ids, sampled, out, count, BLOCK: tl.constexpr):
    """One program: the place of a token among the sampled ones is the number of those before it."""
    gdc_wait()
    gdc_launch_dependents()
    before = 0
    for start in range(0, count, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < count
        token = tl.load(next_ids + row, mask=mask, other=0)
        unknown = (token < 0).to(tl.int32)
        place = before + tl.cumsum(unknown, axis=0) - unknown
        token = tl.where(unknown > 0, tl.load(sampled + place, mask=unknown > 0, other=0), token)
        tl.store(out + row, token, mask=mask)
        before += tl.sum(unknown, axis=0)


def place_sampled(next_ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """As `reference.place_sampled`."""
    out = torch.empty_like(next_ids)
    place_sampled_kernel[(1,)](next_ids, sampled, out, len(next_ids), BLOCK=_PLACED, num_warps=4)
    return out


@pdl_jit(do_not_specialize=["tokens", "count", "column"])
def count_accepted_kernel(
    ids, next_ids, sequences, last, accepted, last_row, tokens, count, column, max_drafts, BLOCK: tl.constexpr
):
    """`sequences`: four columns, `column` numbers apart."""
    gdc_wait()
    gdc_launch_dependents()
    sequence = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = sequence < count
    first = tl.load(sequences + sequence, mask=mask, other=-1)
    num_drafts = tl.load(sequences + column + sequence, mask=mask, other=0)
    forced = tl.load(sequences + 3 * column + sequence, mask=mask, other=-1)
    start = tl.where(first >= 0, first, 0)
    right = tl.zeros([BLOCK], tl.int64)
    holds = mask
    for draft in range(max_drafts):
        row, following = tl.minimum(start + draft, tokens - 1), tl.minimum(start + draft + 1, tokens - 1)
        behind = tl.load(next_ids + row, mask=mask, other=-1)
        holds &= (behind == tl.load(ids + following, mask=mask, other=-2)) & (draft < num_drafts)
        right += holds.to(tl.int64)
    count_of = tl.where(forced >= 0, tl.minimum(forced, num_drafts), right)
    tl.store(accepted + sequence, count_of, mask=mask)
    token = tl.load(next_ids + tl.minimum(start + count_of, tokens - 1), mask=mask, other=-1)
    tl.store(last + sequence, token, mask=mask)
    tl.store(last_row + sequence, tl.where(first >= 0, first + count_of, -1), mask=mask)


def count_accepted(
    ids: torch.Tensor, next_ids: torch.Tensor, sequences: torch.Tensor, max_drafts: int
) -> AcceptedDrafts:
    """As `reference.count_accepted`."""
    count = sequences.shape[1]
    # Apart, so that each begins at a multiple of 16 bytes: a kernel is compiled for that.
    out = AcceptedDrafts(*(torch.empty(count, dtype=torch.int64, device=ids.device) for _ in range(3)))
    if count:
        count_accepted_kernel[(cdiv(count, BLOCK),)](
            ids, next_ids, sequences, *out, len(ids), count, sequences.stride(0), max_drafts, BLOCK=BLOCK, num_warps=4
        )
    return out


@pdl_jit(do_not_specialize=["size", "by"])
def advance_chain_kernel(
    positions, seq_lens, room, moved_positions, moved_lens, table, slots, size, by, table_row, width,
    MOVES: tl.constexpr, PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """MOVES: write positions and lengths, not only the slots of one more cache group."""
    gdc_wait()
    gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < size
    free = tl.load(room + row, mask=mask, other=0)
    moves = tl.minimum(free, by)
    position = tl.load(positions + row, mask=mask, other=0) + moves
    if MOVES:
        tl.store(moved_positions + row, position, mask=mask)
        length = tl.load(seq_lens + row, mask=mask, other=0) + moves.to(tl.int32)
        tl.store(moved_lens + row, length, mask=mask)
    if PAGED:
        slot = token_slot(table, table_row, width, row, position, mask, PAGE_SIZE)
        tl.store(slots + row, tl.where(free >= by, slot, -1), mask=mask)


def advance_chain(
    positions: torch.Tensor, seq_lens: torch.Tensor, room: torch.Tensor, by: int, paged: Sequence[PagedSlots]
) -> ChainRows:
    """As `reference.advance_chain`. One launch, and one for each cache group with pages behind the first."""
    size = len(positions)
    out = ChainRows(
        torch.empty_like(positions), torch.empty_like(seq_lens), [torch.empty_like(positions) for _ in paged]
    )
    slots_of = out.slots or [positions]
    for i, (one, slots) in enumerate(
        zip(paged or [PagedSlots(1, positions[:, None], positions)], slots_of, strict=True)
    ):
        advance_chain_kernel[(cdiv(size, BLOCK),)](
            positions, seq_lens, room, out.positions, out.seq_lens, one.table, slots, size, by, one.table.stride(0),
            one.table.shape[1], MOVES=i == 0, PAGED=bool(paged), PAGE_SIZE=one.page_size, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


@specializations
def released(chip: Chip) -> list[Specialization]:
    """With pages of 16 tokens, and without any."""
    words = dict.fromkeys(("table_row", "width", "size"), "i32")
    rows = dict.fromkeys(("ids", "prev_sampled_indices", "prev_sampled", "prev_sequence", "accepted"), "*i64")
    rows |= dict.fromkeys(("positions", "table", "slots"), "*i64")
    rows |= dict.fromkeys(("seq_lens", "num_rows", "replay"), "*i32")
    chain = dict.fromkeys(("positions", "room", "moved_positions", "table", "slots"), "*i64") | {"by": "i32"}
    chain |= dict.fromkeys(("seq_lens", "moved_lens"), "*i32")
    found = []
    for moves, paged in ((True, True), (False, True), (True, False)):
        constants = {"MOVES": moves, "PAGED": paged, "PAGE_SIZE": 16 if paged else 1, "BLOCK": BLOCK}
        name = f"{'rows' if moves else 'slots'}{'' if paged else ' without pages'}"
        found.append(Specialization(f"advance {name}", advance_rows_kernel, rows | words, constants, 4, 1))
        found.append(Specialization(f"advance chain, {name}", advance_chain_kernel, chain | words, constants, 4, 1))
    counted = dict.fromkeys(("ids", "next_ids", "sequences", "last", "accepted", "last_row"), "*i64")
    counted |= dict.fromkeys(("tokens", "count", "column", "max_drafts"), "i32")
    found.append(Specialization("count accepted", count_accepted_kernel, counted, {"BLOCK": BLOCK}, 4, 1))
    placed = dict.fromkeys(("next_ids", "sampled", "out"), "*i64") | {"count": "i32"}
    found.append(Specialization("place sampled", place_sampled_kernel, placed, {"BLOCK": _PLACED}, 4, 1))
    return found
