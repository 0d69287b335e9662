"""A step plan as index tensors: packed into one host buffer, so that a device gets it in one asynchronous copy.

Owns which integers kernels see of a step. Must not know models or what a kernel does with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from allotrope.attention.batch import BatchLayout, BatchTensors, CacheIndex, PageIndex, SlotIndex
from allotrope.cache.groups import CacheGroup

Words = NDArray[np.int64]


@dataclass(frozen=True)
class StepRow:
    """New tokens of one sequence. `ids`: those tokens. `context`: tokens stored before. `pages`: per group, its pages.

    `slots`: per group, its state slot. `num_logits`: trailing tokens of `ids` whose logits are computed.
    `prev_sampled_index`: index in `prev_sampled`, the tokens of the step before, of the token whose placeholder is the
    last of `ids`; -1 where that is known.
    """

    ids: Sequence[int]
    context: int
    pages: Sequence[Sequence[int]]
    slots: Sequence[int]
    num_logits: int
    prev_sampled_index: int = -1


@dataclass(frozen=True)
class StepPlan:
    """`rows`: rows with one token first. `copies`: (group, source, target) pages to copy before the pass."""

    rows: tuple[StepRow, ...]
    copies: tuple[tuple[int, int, int], ...] = ()

    @property
    def decodes_only(self) -> bool:
        """Whether every row has one token."""
        return len(self.rows[-1].ids) == 1

    @property
    def logits_indices(self) -> list[int]:
        """Indices in the batch of the tokens whose logits are computed."""
        indices: list[int] = []
        end = 0
        for row in self.rows:
            end += len(row.ids)
            indices.extend(range(end - row.num_logits, end))
        return indices


@dataclass(frozen=True)
class Inputs:
    """One step on the device. `index`: per group.

    `prev_sampled_indices`: [T] as in `StepRow`, None where every token is known.
    """

    ids: torch.Tensor
    prev_sampled_indices: torch.Tensor | None
    batch: BatchLayout
    index: list[CacheIndex]


@dataclass(frozen=True)
class HostRows:
    """Lengths, positions and requests of a step's tokens, on the host. `positions`, `requests`: [T]."""

    query_lens: Words
    seq_lens: Words
    positions: Words
    requests: Words

    @staticmethod
    def of(rows: Sequence[StepRow]) -> HostRows:
        lens = np.fromiter((len(row.ids) for row in rows), np.int64, len(rows))
        contexts = np.fromiter((row.context for row in rows), np.int64, len(rows))
        requests = np.arange(len(rows))
        if len(rows[-1].ids) == 1:
            return HostRows(lens, contexts + 1, contexts, requests)
        starts = lens.cumsum() - lens
        positions = np.arange(int(lens.sum())) + np.repeat(contexts - starts, lens)
        return HostRows(lens, contexts + lens, positions, np.repeat(requests, lens))


def table_width(pages: int) -> int:
    """Columns of a table for rows of up to `pages` pages: a multiple of 16.

    Triton compiles a kernel again for a stride that is a multiple of 16 and for one that is not: with all of one kind
    the kernels that were warmed up are those that steps of any length need.
    """
    return -(-max(pages, 1) // 16) * 16


def page_table(rows: Sequence[StepRow], group: int, page_size: int) -> Words:
    """[B, W] pages, -1 where there is none. Raises ValueError if a row has fewer pages than its tokens need."""
    widths = [len(row.pages[group]) for row in rows]
    table = np.full((len(rows), table_width(max(widths))), -1, dtype=np.int64)
    for line, row, width in zip(table, rows, widths, strict=True):
        tokens = row.context + len(row.ids)
        if width * page_size < tokens:
            raise ValueError(f"{width} pages of {page_size} tokens cannot hold {tokens} tokens")
        line[:width] = row.pages[group]
    return table


def page_slots(table: Words, page_size: int, host: HostRows) -> Words:
    """[T] `PageIndex.slots` of the new tokens."""
    pages = table[host.requests, host.positions // page_size]
    return np.where(pages >= 0, pages * page_size + host.positions % page_size, -1)


class HostArrays:
    """Arrays that travel in one buffer, each at a multiple of 16 bytes: kernels are compiled for aligned pointers."""

    def __init__(self) -> None:
        self._arrays: list[Words] = []
        self._starts = [0]

    def add(self, array: NDArray[Any]) -> None:
        """Append a flat array of int64, or of int32."""
        words = array if array.dtype == np.int64 else _as_words(array)
        self._arrays.append(words)
        self._starts.append(self._starts[-1] + len(words) + len(words) % 2)

    def send(self, device: torch.device) -> Iterator[torch.Tensor]:
        """The arrays on `device` in the order in which they came, as int64."""
        words = torch.empty(self._starts[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
        host = words.numpy()
        for start, array in zip(self._starts, self._arrays, strict=False):
            host[start : start + len(array)] = array
        arrived = words.to(device, non_blocking=True)
        for start, array in zip(self._starts, self._arrays, strict=False):
            yield arrived[start : start + len(array)]


def _as_words(array: NDArray[np.int32]) -> Words:
    padded = np.zeros(len(array) + len(array) % 2, dtype=np.int32)
    padded[: len(array)] = array
    return padded.view(np.int64)


def pack(rows: Sequence[StepRow], groups: Sequence[CacheGroup], device: torch.device) -> Inputs:
    """The rows on the device: every integer of theirs arrives in one copy."""
    host = HostRows.of(rows)
    requests = len(rows)
    has_placeholders = any(row.prev_sampled_index >= 0 for row in rows)
    arrays = HostArrays()
    arrays.add(np.array([token for row in rows for token in row.ids], dtype=np.int64))
    arrays.add(host.positions)
    arrays.add(host.requests)
    arrays.add(host.seq_lens.astype(np.int32))
    arrays.add(np.concatenate(([0], host.query_lens.cumsum())).astype(np.int32))
    if has_placeholders:
        arrays.add(_prev_sampled_indices(rows, host))
    for g, group in enumerate(groups):
        if group.kind == "state":
            arrays.add(np.fromiter((row.slots[g] for row in rows), np.int64, requests))
            continue
        table = page_table(rows, g, group.page_size)
        arrays.add(table.ravel())
        arrays.add(page_slots(table, group.page_size, host))
    arrived = arrays.send(device)
    ids, positions, request_of_token = next(arrived), next(arrived), next(arrived)
    seq_lens, query_start = (next(arrived).view(torch.int32)[:count] for count in (requests, requests + 1))
    tensors = BatchTensors(seq_lens, query_start, positions, request_of_token)
    prev_sampled_indices = next(arrived) if has_placeholders else None
    index: list[CacheIndex] = []
    for group in groups:
        if group.kind == "state":
            index.append(SlotIndex(next(arrived)))
        else:
            index.append(PageIndex(group.page_size, next(arrived).view(requests, -1), next(arrived)))
    batch = BatchLayout(tuple(host.query_lens.tolist()), tuple(host.seq_lens.tolist()), device, tensors)
    return Inputs(ids, prev_sampled_indices, batch, index)


def _prev_sampled_indices(rows: Sequence[StepRow], host: HostRows) -> Words:
    """[T] -1, but for the last token of rows that end in a placeholder."""
    prev_sampled_indices = np.full(len(host.positions), -1, dtype=np.int64)
    prev_sampled_indices[host.query_lens.cumsum() - 1] = [row.prev_sampled_index for row in rows]
    return prev_sampled_indices


def known_ids(ids: torch.Tensor, prev_sampled_indices: torch.Tensor, prev_sampled: torch.Tensor) -> torch.Tensor:
    """`ids` [T], with the token that `prev_sampled` [n] holds at `prev_sampled_indices` [T] where that is not -1.

    A row without a distribution sampled -1: its sequence is about to end, and token 0 stands for it.
    """
    return torch.where(prev_sampled_indices >= 0, prev_sampled[prev_sampled_indices.clamp(min=0)], ids).clamp(min=0)
