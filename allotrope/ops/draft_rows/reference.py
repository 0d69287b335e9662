"""Rows of steps with draft tokens in PyTorch: what kernels are held against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from allotrope.ops.draft_rows.spec import AcceptedDrafts, ChainRows, MovedRows, PagedSlots


def advance_rows(rows: MovedRows, prev_sampled: torch.Tensor, accepted: torch.Tensor) -> None:
    """Put tokens of the step before in the place of placeholders, and move each row as many tokens on as that step
    accepted drafts of its sequence.

    `prev_sampled`: [n] int64 tokens, which `prev_sampled_indices` points into. `accepted`: [S] int64.
    """
    moves = rows.prev_sequence >= 0
    by = torch.where(moves, accepted[rows.prev_sequence.clamp(min=0)], 0)
    rows.ids.copy_(known_ids(rows.ids, rows.prev_sampled_indices, prev_sampled))
    rows.positions.add_(by)
    rows.seq_lens.add_(by.to(torch.int32))
    rows.replay.copy_(torch.where(moves & (rows.num_rows > 0), by.to(torch.int32), rows.replay))
    for page_size, table, slots in rows.paged:
        slots.copy_(torch.where(moves, token_slots(table, page_size, rows.positions), slots))


def place_sampled(next_ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """`next_ids` [T] int64 with the tokens `sampled` [n], in order, where it is negative."""
    return next_ids.masked_scatter(next_ids < 0, sampled)


def count_accepted(
    ids: torch.Tensor, next_ids: torch.Tensor, sequences: torch.Tensor, max_drafts: int
) -> AcceptedDrafts:
    """Count the drafts of each sequence that are what was sampled behind the token before, up to the first that is not.

    `ids`: [T] int64 tokens of the step. `next_ids`: [T] int64 the token behind each, -1 where there is no distribution.
    `sequences`: [4, S] int64: the row of each sequence's last token (-1: a padding row), its drafts in the rows behind,
    a column that is not read, and the drafts that count whatever they are (-1: those that are right).
    """
    first, num_drafts, _, forced = sequences
    offsets = torch.arange(max_drafts + 1, device=ids.device)
    rows = (first.clamp(min=0)[:, None] + offsets).clamp(max=len(ids) - 1)
    behind = next_ids[rows]
    holds = (behind[:, :-1] == ids[rows[:, 1:]]) & (offsets[1:] <= num_drafts[:, None])
    accepted = torch.where(forced >= 0, torch.minimum(forced, num_drafts), holds.cumprod(1).sum(1))
    last = behind.gather(1, accepted[:, None])[:, 0]
    return AcceptedDrafts(last, accepted, torch.where(first >= 0, first + accepted, -1))


def advance_chain(
    positions: torch.Tensor, seq_lens: torch.Tensor, room: torch.Tensor, by: int, paged: Sequence[PagedSlots]
) -> ChainRows:
    """Decode rows `by` tokens further, or as many as a row has room for; one without so much stores nothing.

    `positions`, `room`: [S] int64. `seq_lens`: [S] int32. `paged`: `slots` of it are not read.
    """
    moves, stored = room.clamp(max=by), room >= by
    moved = positions + moves
    slots = [torch.where(stored, token_slots(table, size, moved), -1) for size, table, _ in paged]
    return ChainRows(moved, seq_lens + moves.to(torch.int32), slots)


def token_slots(table: torch.Tensor, page_size: int, positions: torch.Tensor) -> torch.Tensor:
    """[B] `PageIndex.slots` of a token of each request, at `positions` [B]. The null page is never written."""
    pages = table.gather(1, (positions // page_size)[:, None])[:, 0]
    return torch.where(pages > 0, pages * page_size + positions % page_size, -1)


def known_ids(ids: torch.Tensor, prev_sampled_indices: torch.Tensor, prev_sampled: torch.Tensor) -> torch.Tensor:
    """`ids` [T], with the token that `prev_sampled` [n] holds at `prev_sampled_indices` [T] where that is not -1.

    A row without a distribution sampled -1: its sequence is about to end, and token 0 stands for it.
    """
    return torch.where(prev_sampled_indices >= 0, prev_sampled[prev_sampled_indices.clamp(min=0)], ids).clamp(min=0)
