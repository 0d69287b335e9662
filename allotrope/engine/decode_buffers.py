"""Static buffers of a decode step, which a captured graph reads: refreshed before each replay.

A step of b requests runs at the next captured size n; the n - b rows behind are padding rows (seq_lens 0, slots -1,
state slot 0, the null page; each a sequence alone). Eager steps go the same way, so that they compute exactly what a
graph does. Host integers are upper bounds here: every request may be as long as `context`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from allotrope.attention.batch import BatchLayout, BatchTensors, CacheIndex, PageIndex, SlotIndex, VerifyTensors
from allotrope.cache.groups import CacheGroup
from allotrope.engine.inputs import (
    HostRows,
    Inputs,
    SampledSequence,
    StepFacts,
    StepRow,
    page_slots,
    page_table,
    sequence_words,
    table_width,
    verify_words,
)
from allotrope.engine.packed_step import PackedStep
from allotrope.ops.draft_rows import MovedRows, PagedSlots

# Arrays with one number a request; those of steps with drafts, then the columns of `SampledSequence`, in their order.
_ROWS = ("ids", "prev_sampled_indices", "positions", "seq_lens")
_VERIFY = ("first_row", "num_rows", "replay")
_DRAFTS = (*_VERIFY, "next_ids", "prev_sequence")
_SEQUENCES = ("token", "num_drafts", "reserved", "forced")


class DecodeBuffers:
    """Inputs and output of decode steps of up to `size` requests, each of up to `context` tokens.

    `verify`: rows may be drafts. `max_sampled`: most tokens of the step before that rows may take, where these are more
    than `size`. `sequences`: most sequences of a step. `hidden`, `received`: widths of what the layers return, and of
    what a pipeline stage receives.

    `accepted`: [sequences] drafts that the step before accepted of each of its sequences.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        size: int,
        context: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        verify: bool = False,
        max_sampled: int = 0,
        sequences: int = 0,
        received: int = 0,
    ) -> None:
        self.groups, self.size, self.context, self.device = groups, size, context, device
        self.verify = verify
        self._names = (*_ROWS, *_DRAFTS, *_SEQUENCES) if verify else _ROWS
        # One region for every array with one number a request, at 16-byte steps: a refresh is one copy.
        self._stride = size + size % 2
        lines = len(self._names) + len(groups)
        self._heads = torch.zeros(lines * self._stride, dtype=torch.int64, device=device)
        arrays = [line[:size] for line in self._heads.view(lines, -1)]
        named, self._slots = dict(zip(self._names, arrays, strict=False)), arrays[len(self._names) :]
        self._ids, self._prev_sampled_indices, self._positions, lengths = (named[name] for name in _ROWS)
        self._seq_lens = lengths.view(torch.int32)[:size]
        self._verify = [named[name].view(torch.int32)[:size] for name in _VERIFY if verify]
        self.next_ids, self._prev_sequence = named.get("next_ids"), named.get("prev_sequence")
        first = len(_ROWS) + len(_DRAFTS)
        self.sequences = self._heads.view(lines, -1)[first : first + len(_SEQUENCES), :size] if verify else None
        self.accepted = torch.zeros(sequences, dtype=torch.int64, device=device)
        columns = [table_width(group.pages_for(context)) for group in groups]
        self._tables = [
            None if group.kind == "state" else torch.full((size, width), -1, device=device)
            for group, width in zip(groups, columns, strict=True)
        ]
        self._query_start = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._requests = torch.arange(size, device=device)
        self.prev_sampled = torch.zeros(max(size, max_sampled), dtype=torch.int64, device=device)
        self.hidden = torch.zeros(size, hidden, dtype=dtype, device=device)
        self.received = torch.zeros(size, received, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        """Bytes of the buffers on the device."""
        tables = [table for table in self._tables if table is not None]
        tensors = [self._heads, self.hidden, self.received, self.prev_sampled, self.accepted, *tables]
        return sum(tensor.nbytes for tensor in tensors)

    def pack(
        self, rows: Sequence[StepRow], facts: StepFacts | None, sequences: Sequence[SampledSequence] = ()
    ) -> PackedStep:
        """A step of rows with one token each, for `refresh`. `facts`: None for one of this process alone."""
        heads = np.zeros((len(self._names) + len(self.groups), self._stride), dtype=np.int64)
        named, slots = dict(zip(self._names, heads, strict=False)), heads[len(self._names) :]
        for name in ("prev_sampled_indices", "prev_sequence", "token", "forced"):
            if name in named:
                named[name].fill(-1)
        if self.verify:
            named["first_row"].view(np.int32)[: self.size] = np.arange(self.size)
            named["num_rows"].view(np.int32)[: self.size] = 1
            for name, column in zip(_SEQUENCES, sequence_words(sequences), strict=True):
                named[name][: len(sequences)] = column
        arrays = [heads.ravel()]
        count = len(rows)
        if rows:
            host = HostRows.of(rows)
            named["ids"][:count] = [row.ids[0] for row in rows]
            named["prev_sampled_indices"][:count] = [row.prev_sampled_index for row in rows]
            named["positions"][:count] = host.positions
            named["seq_lens"].view(np.int32)[:count] = host.seq_lens
            if self.verify:
                for name, numbers in zip(_VERIFY, verify_words(rows), strict=True):
                    named[name].view(np.int32)[:count] = numbers
                named["next_ids"][:count] = [row.next_id for row in rows]
                named["prev_sequence"][:count] = [row.prev_sequence for row in rows]
        for g, group in enumerate(self.groups):
            if group.kind == "state":
                slots[g][:count] = [row.slots[g] for row in rows]
                continue
            slots[g].fill(-1)
            if rows:
                table = page_table(rows, g, group.page_size, host)
                slots[g][:count] = page_slots(table, group.page_size, host)
                arrays.append(table.ravel())
        own = [] if facts is None else facts.arrays()
        return PackedStep.of(own, arrays, pinned=self.device.type == "cuda")

    def refresh(self, packed: PackedStep, requests: int, prev_sampled: torch.Tensor | None, size: int) -> None:
        """Copy a step of `requests` requests into the buffers, padding rows behind.

        `prev_sampled`: [n] tokens of the step before. `size`: rows that the step reads.
        """
        arrived = packed.send(self.device)
        self._heads.copy_(next(arrived))
        for table_of_group in self._tables:
            if table_of_group is None:
                continue
            table_of_group[:size].fill_(-1)
            if requests:
                table = next(arrived).view(requests, -1)
                table_of_group[:requests, : table.shape[1]] = table
        if prev_sampled is not None:
            self.prev_sampled[: len(prev_sampled)].copy_(prev_sampled)

    def clear(self) -> None:
        """Make the buffers those of a step without requests."""
        self.refresh(self.pack((), None), 0, None, self.size)

    def rows(self, size: int) -> MovedRows:
        """With drafts: the first `size` rows, which `ADVANCE_ROWS` moves on in place, once for each `refresh`."""
        assert self._prev_sequence is not None
        _, num_rows, replay = self._verify
        paged = [
            PagedSlots(group.page_size, table[:size], slots[:size])
            for group, table, slots in zip(self.groups, self._tables, self._slots, strict=True)
            if table is not None
        ]
        return MovedRows(
            self._ids[:size],
            self._prev_sampled_indices[:size],
            self._prev_sequence[:size],
            self._positions[:size],
            self._seq_lens[:size],
            num_rows[:size],
            replay[:size],
            paged,
        )

    def copy_rows(self, inputs: Inputs, tokens: torch.Tensor) -> None:
        """Copy into the first rows what passes of a draft model read of `tokens` [n], which index those of a step that
        did not run on these buffers."""
        of, count = inputs.batch.tensors, len(tokens)
        self._positions[:count].copy_(of.positions[tokens])
        requests = of.request_of_token[tokens]
        for table, one in zip(self._tables, inputs.index, strict=True):
            if table is not None and isinstance(one, PageIndex):
                table[:count].fill_(-1)
                table[:count, : one.table.shape[1]] = one.table[requests]

    def inputs(self, size: int) -> tuple[Inputs, torch.Tensor]:
        """The first `size` rows as the model gets them, and the `prev_sampled` that its indices point into."""
        tensors = BatchTensors(
            self._seq_lens[:size], self._query_start[: size + 1], self._positions[:size], self._requests[:size]
        )
        verify = VerifyTensors(*(one[:size] for one in self._verify)) if self._verify else None
        batch = BatchLayout((1,) * size, (self.context,) * size, self.device, tensors, static_verify=verify)
        index: list[CacheIndex] = []
        for group, table, slots in zip(self.groups, self._tables, self._slots, strict=True):
            if table is None:
                index.append(SlotIndex(slots[:size]))
            else:
                index.append(PageIndex(group.page_size, table[:size], slots[:size]))
        # With drafts `rows` were moved on, and have known tokens in the place of placeholders.
        indices = None if self.verify else self._prev_sampled_indices[:size]
        return Inputs(self._ids[:size], indices, batch, index), self.prev_sampled
