"""Rows of steps with draft tokens, as they lie on the device. Must not know: who drafts, or how pages are owned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class DraftRowsSpec:
    """`max_drafts`: most drafts of a sequence in a step."""

    max_drafts: int


class PagedSlots(NamedTuple):
    """A page table and slots of one cache group, as in `PageIndex`. `table`: [B, W] int64. `slots`: [B] int64."""

    page_size: int
    table: torch.Tensor
    slots: torch.Tensor


class MovedRows(NamedTuple):
    """Decode rows that are moved on in place, all [B].

    `ids`, `prev_sampled_indices`, `positions`: int64. `prev_sequence`: int64, the sequence of the step before that the
    row continues, -1 for a row that stays where it is. `seq_lens`, `num_rows`, `replay`: int32, as in `BatchTensors`
    and `VerifyTensors`. `paged`: of each cache group with pages.
    """

    ids: torch.Tensor
    prev_sampled_indices: torch.Tensor
    prev_sequence: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    num_rows: torch.Tensor
    replay: torch.Tensor
    paged: Sequence[PagedSlots]


class AcceptedDrafts(NamedTuple):
    """Per sequence [S] int64: `last`, the token behind the last that counts; `accepted`, the drafts before it; `token`,
    the row of the last that counts, -1 for a padding row."""

    last: torch.Tensor
    accepted: torch.Tensor
    token: torch.Tensor


class ChainRows(NamedTuple):
    """Decode rows of one pass of a chain of drafts. `positions`: [S] int64. `seq_lens`: [S] int32. `slots`: [S] int64
    of each cache group with pages."""

    positions: torch.Tensor
    seq_lens: torch.Tensor
    slots: Sequence[torch.Tensor]
