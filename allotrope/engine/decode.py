"""Static buffers of a decode step: what a captured graph reads, refreshed before each replay.

A step of b requests runs at the next captured size n; the n - b rows between only fill it up (seq_lens 0, slots -1,
state slot 0). Eager steps go the same way, so that they compute exactly what a graph does. Host integers are upper
bounds here: every request may be as long as `context`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from allotrope.attention.batch import BatchLayout, BatchTensors, CacheIndex, PageIndex, SlotIndex
from allotrope.cache.groups import CacheGroup
from allotrope.engine.inputs import HostRows, Inputs, Parts, StepRow, page_slots, page_table, table_width


class DecodeBuffers:
    """Inputs and output of decode steps of up to `size` requests, each of up to `context` tokens."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        size: int,
        context: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.groups, self.size, self.context, self.device = groups, size, context, device
        # One region for all that has one number a request, at 16-byte steps: a refresh is one copy.
        self._stride = size + size % 2
        self._heads = torch.zeros((4 + len(groups)) * self._stride, dtype=torch.int64, device=device)
        named = [self._heads[i * self._stride :][:size] for i in range(4 + len(groups))]
        self._ids, self._follows, self._positions, lengths, *self._slots = named
        self._seq_lens = lengths.view(torch.int32)[:size]
        columns = [table_width(group.pages_for(context)) for group in groups]
        self._tables = [
            None if group.kind == "state" else torch.full((size, width), -1, device=device)
            for group, width in zip(groups, columns, strict=True)
        ]
        self._query_start = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._requests = torch.arange(size, device=device)
        self.chosen = torch.zeros(size, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(size, hidden, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        """What the buffers take on the device."""
        tensors = [self._heads, self.hidden, self.chosen, *(table for table in self._tables if table is not None)]
        return sum(tensor.nbytes for tensor in tensors)

    def refresh(self, rows: Sequence[StepRow], chosen: torch.Tensor | None, size: int | None = None) -> None:
        """Take in a step's rows; those behind them are padding. `chosen`: [n] tokens of the step before.

        `size`: rows that the step reads; default: all.
        """
        heads = np.zeros((4 + len(self.groups), self._stride), dtype=np.int64)
        ids, follows, positions, lengths, *slots = heads
        follows.fill(-1)
        parts = Parts()
        parts.add(heads.ravel())
        count = len(rows)
        if rows:
            host = HostRows.of(rows)
            ids[:count] = [row.ids[0] for row in rows]
            follows[:count] = [row.follows for row in rows]
            positions[:count] = host.positions
            lengths.view(np.int32)[:count] = host.seq_lens
        widths: list[int] = []
        for g, group in enumerate(self.groups):
            if group.kind == "state":
                slots[g][:count] = [row.slots[g] for row in rows]
                continue
            slots[g].fill(-1)
            if rows:
                table = page_table(rows, g, group.page_size)
                slots[g][:count] = page_slots(table, group.page_size, host)
                widths.append(table.shape[1])
                parts.add(table.ravel())
        arrived = parts.send(self.device)
        self._heads.copy_(next(arrived))
        for table_of_group in self._tables:
            if table_of_group is None:
                continue
            table_of_group[:size].fill_(-1)
            if rows:
                width = widths.pop(0)
                table_of_group[:count, :width] = next(arrived).view(count, width)
        if chosen is not None:
            self.chosen[: len(chosen)].copy_(chosen)

    def inputs(self, size: int) -> tuple[Inputs, torch.Tensor]:
        """The first `size` rows as the model gets them, and the tokens that `follows` counts in."""
        given = BatchTensors(
            self._seq_lens[:size], self._query_start[: size + 1], self._positions[:size], self._requests[:size]
        )
        batch = BatchLayout((1,) * size, (self.context,) * size, self.device, given)
        index: list[CacheIndex] = []
        for group, table, slots in zip(self.groups, self._tables, self._slots, strict=True):
            if table is None:
                index.append(SlotIndex(slots[:size]))
            else:
                index.append(PageIndex(group.page_size, table[:size], slots[:size]))
        return Inputs(self._ids[:size], self._follows[:size], batch, index), self.chosen
