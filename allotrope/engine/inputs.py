"""A step plan as index tensors: packed into one host buffer, so that a device gets it in one asynchronous copy.

Owns the integers of a step that kernels read. Rank 0 packs them, every rank unpacks them. Must not know models or
kernels.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from allotrope.attention.batch import (
    BatchLayout,
    BatchTensors,
    CacheIndex,
    PageIndex,
    SlotIndex,
    VerifyRows,
    VerifyTensors,
)
from allotrope.cache.groups import CacheGroup
from allotrope.engine.packed_step import PackedStep, Words


class StepRow(NamedTuple):
    """New tokens of one sequence. `ids`: those tokens. `context`: tokens stored before. `pages`: per group, its pages.

    `slots`: per group, its state slot. `num_logits`: trailing tokens of `ids` whose logits are computed.
    `prev_sampled_index`: index in `prev_sampled`, the tokens of the step before, of the token whose placeholder is the
    last of `ids`; -1 where that is known. `draft`: i for the i-th draft of a sequence, whose rows follow each other; 0
    for the first of them. `replay`: in a first row, the accepted drafts of the sequence's step before. `next_id`: the
    token behind the last of `ids`, -1 where it is sampled in this step. `prev_sequence`: where the host has yet to read
    how many drafts of the sequence the step before accepted, its index among that step's `sequences`: the row lies as
    many tokens behind `context`; else -1. `padding`: it is of no sequence.
    """

    ids: Sequence[int]
    context: int
    pages: Sequence[array[int]]
    slots: Sequence[int]
    num_logits: int
    prev_sampled_index: int = -1
    draft: int = 0
    replay: int = 0
    next_id: int = -1
    prev_sequence: int = -1
    padding: bool = False


@dataclass(frozen=True)
class SampledSequence:
    """A sequence that a step samples from, as its draft model needs to know it.

    `token`: index in the batch of its last token that is no draft. `num_drafts`: drafts behind it. `reserved`: its
    tokens that have pages. `forced`: drafts to accept whatever they are; -1: those that are right.
    """

    token: int
    num_drafts: int
    reserved: int
    forced: int = -1


@dataclass(frozen=True)
class StepPlan:
    """`rows`: rows with one token first. `copies`: (group, source, target) pages to copy before the pass.

    `sampled`: tokens that every rank gets when the pass is over: the next plan may have placeholders for them.
    `greedy`: the pass ends with the greedy tokens, which the ranks choose together, in place of logits, which rank 0
    samples from. `sequences`: with a draft model, those that are sampled from, in order. `passes`: drafts that it makes
    for each of them. `parts`: where there are several data-parallel ranks, the rows, copies and sequences of each; the
    rows of the plan are theirs, one rank's after another's.
    """

    rows: tuple[StepRow, ...]
    copies: tuple[tuple[int, int, int], ...] = ()
    sampled: int = 0
    greedy: bool = False
    sequences: tuple[SampledSequence, ...] = ()
    passes: int = 0
    parts: tuple[StepPlan, ...] = ()

    @staticmethod
    def of_ranks(parts: Sequence[StepPlan]) -> StepPlan:
        """The plan of several data-parallel ranks, of which some may have no rows."""
        return StepPlan(tuple(row for part in parts for row in part.rows), parts=tuple(parts))

    @property
    def decodes_only(self) -> bool:
        """Whether every row has one token."""
        if self.parts:
            return all(part.decodes_only for part in self.parts)
        return not self.rows or len(self.rows[-1].ids) == 1

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.ids) for row in self.rows)

    @property
    def logits_indices(self) -> list[int]:
        """Indices in the batch of the tokens whose logits are computed."""
        if self.decodes_only:
            return [index for index, row in enumerate(self.rows) if row.num_logits]
        indices: list[int] = []
        end = 0
        for row in self.rows:
            end += len(row.ids)
            indices.extend(range(end - row.num_logits, end))
        return indices


@dataclass(frozen=True)
class Inputs:
    """One step on the device. `index`: per group.

    `prev_sampled_indices`: [T] as in `StepRow`, None where every token is known. `next_ids`: [T] the token behind each
    one, -1 where it is sampled; None where no draft model reads them. `sequences`: [4, S] columns of `SampledSequence`.
    """

    ids: torch.Tensor
    prev_sampled_indices: torch.Tensor | None
    batch: BatchLayout
    index: list[CacheIndex]
    next_ids: torch.Tensor | None = None
    sequences: torch.Tensor | None = None


@dataclass(frozen=True)
class HostRows:
    """Lengths, positions and requests of a step's tokens, on the host. `positions`, `requests`: [T]."""

    query_lens: Words
    seq_lens: Words
    positions: Words
    requests: Words

    @staticmethod
    def of(rows: Sequence[StepRow]) -> HostRows:
        contexts = np.array([row.context for row in rows])
        requests = np.arange(len(rows))
        if len(rows[-1].ids) == 1:
            return HostRows(np.ones_like(contexts), contexts + 1, contexts, requests)
        lens = np.array([len(row.ids) for row in rows])
        starts = lens.cumsum() - lens
        positions = np.arange(int(lens.sum())) + np.repeat(contexts - starts, lens)
        return HostRows(lens, contexts + lens, positions, np.repeat(requests, lens))


def verify_words(rows: Sequence[StepRow]) -> Words:
    """[3, B] first rows, numbers of rows and replays, as in `VerifyTensors`."""
    drafts = np.array([row.draft for row in rows], dtype=np.int64)
    first = np.arange(len(rows)) - drafts
    num_rows = np.where(drafts == 0, np.bincount(first, minlength=len(rows)), 0)
    return np.stack([first, num_rows, np.array([row.replay for row in rows], dtype=np.int64)])


def sequence_words(sequences: Sequence[SampledSequence]) -> Words:
    """[4, S] the columns of `SampledSequence`."""
    found = [(one.token, one.num_drafts, one.reserved, one.forced) for one in sequences]
    return np.array(found, dtype=np.int64).reshape(-1, 4).T


def table_width(pages: int) -> int:
    """Columns of a table for rows of up to `pages` pages: a multiple of 16.

    Triton compiles a kernel again for a stride that is a multiple of 16 and for one that is not: with all of one kind
    the kernels that were warmed up are those that steps of any length need.
    """
    return -(-max(pages, 1) // 16) * 16


def page_table(rows: Sequence[StepRow], group: int, page_size: int, host: HostRows) -> Words:
    """[B, W] pages, -1 where there is none. Raises ValueError if a row has fewer pages than its tokens need."""
    pages = [row.pages[group] for row in rows]
    widths = np.fromiter(map(len, pages), np.int64, len(rows))
    if (short := widths * page_size < host.seq_lens).any():
        row = int(short.argmax())
        raise ValueError(f"{widths[row]} pages of {page_size} tokens cannot hold {host.seq_lens[row]} tokens")
    table = np.full((len(rows), table_width(int(widths.max()))), -1, dtype=np.int64)
    table[np.arange(table.shape[1]) < widths[:, None]] = np.frombuffer(b"".join(pages), dtype=np.int64)
    return table


def page_slots(table: Words, page_size: int, host: HostRows) -> Words:
    """[T] `PageIndex.slots` of the new tokens."""
    pages = table[host.requests, host.positions // page_size]
    # Nothing is written into the null page.
    return np.where(pages > 0, pages * page_size + host.positions % page_size, -1)


def padding_row(groups: Sequence[CacheGroup]) -> StepRow:
    """A row that stores nothing anyone reads: what a data-parallel rank without rows runs."""
    pages = [array("q", (0,))] * len(groups)
    return StepRow((0,), 0, pages, [0] * len(groups), num_logits=0, next_id=0, padding=True)


class RankFacts(NamedTuple):
    """What one data-parallel rank does in a step. `tokens`: that it runs. `logits`: of how many of them they are
    computed. `sampled`: tokens that come of them. `sequences`: that these belong to, with a draft model."""

    tokens: int
    logits: int
    sampled: int
    sequences: int

    @staticmethod
    def of(plan: StepPlan) -> RankFacts:
        sampled = sum(row.next_id < 0 for row in plan.rows)
        return RankFacts(plan.tokens, len(plan.logits_indices), sampled, len(plan.sequences))


@dataclass(frozen=True)
class StepFacts:
    """What the host must know of a packed step. `sampled`, `greedy`: as in `StepPlan`. `has_placeholders`: whether any
    row ends in one. `padding`: whether the only row is of no sequence. `copies`: [m, 3] (group, source, target).
    `logits_indices`: [n]. `sequences`: number of those. `passes`: as in `StepPlan`. `of_ranks`: what each data-parallel
    rank does; empty where there is one.

    `decodes_only`, `sampled`, `greedy` and `passes` are those of all data-parallel ranks together, the rest is of one.
    """

    decodes_only: bool
    requests: int
    sampled: int
    greedy: bool
    has_placeholders: bool
    padding: bool
    copies: Words
    logits_indices: Words
    sequences: int
    passes: int
    of_ranks: tuple[RankFacts, ...] = ()

    def of_rank(self, whole: StepPlan) -> StepFacts:
        """These facts of the rows of one data-parallel rank, as a part of the plan of all."""
        return replace(
            self,
            decodes_only=whole.decodes_only,
            sampled=whole.sampled,
            greedy=whole.greedy,
            passes=whole.passes,
            of_ranks=tuple(RankFacts.of(part) for part in whole.parts),
        )

    @staticmethod
    def of(plan: StepPlan) -> StepFacts:
        has_placeholders = any(row.prev_sampled_index >= 0 for row in plan.rows)
        copies, indices = (np.array(one, dtype=np.int64) for one in (plan.copies, plan.logits_indices))
        return StepFacts(
            plan.decodes_only,
            len(plan.rows),
            plan.sampled,
            plan.greedy,
            has_placeholders,
            any(row.padding for row in plan.rows),
            copies.reshape(-1, 3),
            indices,
            len(plan.sequences),
            plan.passes,
        )

    def arrays(self) -> list[Words]:
        """These facts as arrays for the host."""
        flags = [self.decodes_only, self.greedy, self.has_placeholders, self.padding]
        numbers = [*flags, self.requests, self.sampled, self.sequences, self.passes]
        of_ranks = np.array(self.of_ranks, dtype=np.int64)
        return [np.array(numbers, dtype=np.int64), self.copies.ravel(), self.logits_indices, of_ranks.ravel()]

    @staticmethod
    def read(packed: PackedStep) -> StepFacts:
        """The facts that `arrays` packed as the first arrays of the host."""
        numbers, copies, indices, of_ranks, *_ = packed.host
        decodes_only, greedy, has_placeholders, padding, requests, sampled, sequences, passes = numbers.tolist()
        return StepFacts(
            bool(decodes_only),
            requests,
            sampled,
            bool(greedy),
            bool(has_placeholders),
            bool(padding),
            copies.reshape(-1, 3),
            indices,
            sequences,
            passes,
            tuple(RankFacts(*one) for one in of_ranks.reshape(-1, len(RankFacts._fields)).tolist()),
        )


def pack(
    plan: StepPlan,
    facts: StepFacts,
    groups: Sequence[CacheGroup],
    *,
    pinned: bool,
    verify: bool = False,
    next_ids: bool = False,
) -> PackedStep:
    """A step whose tensors are its own.

    `pinned`: it is sent to a GPU. `verify`: rows may be drafts. `next_ids`: a draft model reads them.
    """
    rows = plan.rows
    host = HostRows.of(rows)
    arrays: list[NDArray[Any]] = [
        np.array([token for row in rows for token in row.ids], dtype=np.int64),
        host.positions,
        host.requests,
        host.seq_lens.astype(np.int32),
        np.concatenate(([0], host.query_lens.cumsum())).astype(np.int32),
    ]
    if facts.has_placeholders:
        arrays.append(_prev_sampled_indices(rows, host))
    for g, group in enumerate(groups):
        if group.kind == "state":
            arrays.append(np.fromiter((row.slots[g] for row in rows), np.int64, len(rows)))
            continue
        table = page_table(rows, g, group.page_size, host)
        arrays += [table.ravel(), page_slots(table, group.page_size, host)]
    words = verify_words(rows) if verify else np.zeros((3, 0), dtype=np.int64)
    arrays += [column.astype(np.int32) for column in words] if verify else []
    if next_ids:
        arrays.append(np.array([token for row in rows for token in (*row.ids[1:], row.next_id)], dtype=np.int64))
        arrays.append(sequence_words(plan.sequences).ravel())
    return PackedStep.of([*facts.arrays(), host.query_lens, host.seq_lens, words.ravel()], arrays, pinned=pinned)


def unpack(packed: PackedStep, facts: StepFacts, groups: Sequence[CacheGroup], device: torch.device) -> Inputs:
    """What `pack` packed, on the device."""
    *_, query_lens, kv_lens, words = packed.host
    requests, arrived = facts.requests, packed.send(device)
    ids, positions, request_of_token = next(arrived), next(arrived), next(arrived)
    seq_lens, query_start = (next(arrived).view(torch.int32)[:count] for count in (requests, requests + 1))
    tensors = BatchTensors(seq_lens, query_start, positions, request_of_token)
    prev_sampled_indices = next(arrived) if facts.has_placeholders else None
    index: list[CacheIndex] = []
    for group in groups:
        if group.kind == "state":
            index.append(SlotIndex(next(arrived)))
        else:
            index.append(PageIndex(group.page_size, next(arrived).view(requests, -1), next(arrived)))
    lens = tuple(query_lens.tolist()), tuple(kv_lens.tolist())
    batch = BatchLayout(*lens, device, tensors, *_verify(words, arrived, requests))
    next_ids, sequences = next(arrived, None), next(arrived, None)
    return Inputs(
        ids=ids,
        prev_sampled_indices=prev_sampled_indices,
        batch=batch,
        index=index,
        next_ids=next_ids,
        sequences=None if sequences is None else sequences.view(4, -1),
    )


def _verify(
    words: Words, arrived: Iterator[torch.Tensor], requests: int
) -> tuple[VerifyRows | None, VerifyTensors | None]:
    """`words`: those of `verify_words`, none where no row may be a draft."""
    if not len(words):
        return None, None
    on_host = VerifyRows(*(tuple(column) for column in words.reshape(3, -1).tolist()))
    return on_host, VerifyTensors(*(next(arrived).view(torch.int32)[:requests] for _ in range(3)))


def _prev_sampled_indices(rows: Sequence[StepRow], host: HostRows) -> Words:
    """[T] -1, but for the last token of rows that end in a placeholder."""
    prev_sampled_indices = np.full(len(host.positions), -1, dtype=np.int64)
    prev_sampled_indices[host.query_lens.cumsum() - 1] = [row.prev_sampled_index for row in rows]
    return prev_sampled_indices
