"""One step's batch as every host can describe it: lengths, positions, and where each token's cache entries lie.

Owns: integers about requests and tokens. Must not know: families, models, who allocated the pages.

Requests are packed without padding: the T tokens of request b are `query_start[b] .. query_start[b + 1]`. Decoding
requests (one new token) come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class PageIndex:
    """The page tables of one cache group.

    `page_size`: tokens per page. `table`: [B, W] int64, the page of every `page_size` tokens, -1 for a page that is not
    allocated or out of the window. `slots`: [T] int64, `page * page_size + offset` of each new token, -1 where nothing
    may be written. Page 0 is the null page: it is never written and holds zeros, so that row 0 can fill up a list of
    rows.

    In steps that can be captured (`BatchLayout.static_tensors`) a host may hand over its own `table`: int32, with any
    row stride, and any page of the pool where none is allocated. Kernels read only the pages of tokens before a
    request's length and in its window.
    """

    page_size: int
    table: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class SlotIndex:
    """`slots`: [B] int64, the state slot of each request; in steps that can be captured a host may have int32."""

    slots: torch.Tensor


CacheIndex = PageIndex | SlotIndex


@dataclass(frozen=True)
class BatchTensors:
    """A step's requests on the device, as kernels read them.

    `seq_lens`: [B] int32, tokens visible after the step; 0 for a padding row, which stores nothing and whose output is
    zero. `query_start`: [B + 1] int32, first token of each request, and T. `positions`: [T] int64, position of each
    token in its request. `request_of_token`: [T] int64.
    """

    seq_lens: torch.Tensor
    query_start: torch.Tensor
    positions: torch.Tensor
    request_of_token: torch.Tensor


@dataclass(frozen=True)
class VerifyTensors:
    """Speculative decoding: which requests of a step are one sequence with its draft tokens, on the device.

    A sequence with k drafts is k + 1 requests in a row: its last token, then each draft. Each has one new token, the
    same pages and slot, and one visible token more than the one before. Caches with rows of each token need no more:
    the rows of a rejected draft are overwritten later. A recurrent state cannot be taken back, so it holds the first of
    these tokens and none of the drafts, whose inputs are kept beside it; the drafts that turn out to be right are
    replayed by the sequence's next step, before its new tokens.

    `first_row`: [B] int32, the first request of the same sequence. `num_rows`: [B] int32, at first requests the number
    of the sequence's requests, else 0. `replay`: [B] int32, at first requests the accepted drafts of the sequence's
    step before, else 0. A request that is a sequence alone (one with several new tokens, a padding row) is its own
    first row, with `num_rows` 1.
    """

    first_row: torch.Tensor
    num_rows: torch.Tensor
    replay: torch.Tensor


@dataclass(frozen=True)
class VerifyRows:
    """The same on the host. In captured steps, where the host knows no more, every request is a sequence alone."""

    first_row: tuple[int, ...]
    num_rows: tuple[int, ...]
    replay: tuple[int, ...]


@dataclass(frozen=True)
class BatchLayout:
    """The requests of one step.

    `query_lens`, `seq_lens`: per request, new tokens and tokens visible after this step (host integers, so that a
    plan never asks the device). `device`: of the index tensors. `static_tensors`: of a captured step; the host's
    `seq_lens` are then upper bounds of the device's. `verify`, `static_verify`: with speculative decoding, which
    requests are one sequence with its drafts.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    device: torch.device
    static_tensors: BatchTensors | None = None
    verify: VerifyRows | None = None
    static_verify: VerifyTensors | None = None

    def __post_init__(self) -> None:
        if any(q < 1 or n < q for q, n in zip(self.query_lens, self.seq_lens, strict=True)):
            raise ValueError(f"query_lens={self.query_lens} must be at least 1 and at most seq_lens={self.seq_lens}")
        decodes = [q == 1 for q in self.query_lens]
        if decodes != sorted(decodes, reverse=True):
            raise ValueError(f"query_lens={self.query_lens}: requests with one new token must come first")

    @property
    def num_requests(self) -> int:
        return len(self.query_lens)

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @cached_property
    def num_decodes(self) -> int:
        """Requests with exactly one new token; they are the first of the batch."""
        return sum(q == 1 for q in self.query_lens)

    @cached_property
    def context_lens(self) -> tuple[int, ...]:
        """Tokens of each request that earlier steps have stored."""
        return tuple(n - q for q, n in zip(self.query_lens, self.seq_lens, strict=True))

    @cached_property
    def query_start(self) -> tuple[int, ...]:
        """[B + 1] first token of each request, and T."""
        starts = [0]
        for q in self.query_lens:
            starts.append(starts[-1] + q)
        return tuple(starts)

    @cached_property
    def _cleared(self) -> dict[tuple[int, ...], torch.Tensor]:
        return {}

    def cleared(self, *shape: int) -> torch.Tensor:
        """int32 zeros, one tensor for all plans of the step: kernels that count in it reset it to zero."""
        if shape not in self._cleared:
            self._cleared[shape] = torch.zeros(shape, dtype=torch.int32, device=self.device)
        return self._cleared[shape]

    @cached_property
    def tensors(self) -> BatchTensors:
        """The batch on the device: equal to the host's integers, unless these are upper bounds."""
        if self.static_tensors is not None:
            return self.static_tensors
        seq_lens = on_device(self.seq_lens, torch.int32, self.device)
        query_start = on_device(self.query_start, torch.int32, self.device)
        return BatchTensors(seq_lens, query_start, self.positions, self.request_of_token)

    @cached_property
    def verify_tensors(self) -> VerifyTensors | None:
        """`verify` on the device; None without speculative decoding."""
        if self.static_verify is not None or self.verify is None:
            return self.static_verify
        columns = (self.verify.first_row, self.verify.num_rows, self.verify.replay)
        return VerifyTensors(*(on_device(one, torch.int32, self.device) for one in columns))

    @cached_property
    def positions(self) -> torch.Tensor:
        """[T] int64 position of each token in its request."""
        if self.static_tensors is not None:
            return self.static_tensors.positions
        # Each request counts on from its context.
        shifts = np.subtract(self.context_lens, self.query_start[:-1], dtype=np.int64)
        return on_device(np.arange(self.num_tokens) + np.repeat(shifts, self.query_lens), torch.int64, self.device)

    @cached_property
    def request_of_token(self) -> torch.Tensor:
        """[T] int64 request of each token."""
        if self.static_tensors is not None:
            return self.static_tensors.request_of_token
        return on_device(np.repeat(np.arange(self.num_requests), self.query_lens), torch.int64, self.device)


def on_device(values: ArrayLike, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Integers of the host as a tensor. A GPU gets them without waiting for the steps before: from pinned memory."""
    tensor = torch.as_tensor(np.asarray(values), dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def index_pages(batch: BatchLayout, page_size: int, pages: Sequence[Sequence[int]], *, write: bool = True) -> PageIndex:
    """Make a `PageIndex` from per-request page lists (-1 for an absent page).

    Raises ValueError if a request has fewer pages than its `seq_lens` needs. With `write` False every slot is -1.
    """
    width = max((len(row) for row in pages), default=0)
    for row, n in zip(pages, batch.seq_lens, strict=True):
        if len(row) * page_size < n:
            raise ValueError(f"{len(row)} pages of {page_size} tokens cannot hold {n} tokens")
    table = torch.tensor([[*row, *[-1] * (width - len(row))] for row in pages], dtype=torch.int64, device=batch.device)
    if not write:
        return PageIndex(page_size, table, torch.full((batch.num_tokens,), -1, device=batch.device))
    return PageIndex(page_size, table, torch.tensor(_slots(batch, page_size, pages), device=batch.device))


def _slots(batch: BatchLayout, page_size: int, pages: Sequence[Sequence[int]]) -> list[int]:
    """`PageIndex.slots` as integers, page by page: for the few tokens of a decode, tensor operations cost far more."""
    slots: list[int] = []
    for row, context, n in zip(pages, batch.context_lens, batch.seq_lens, strict=True):
        for run in range(context // page_size, -(-n // page_size)):
            begin, end = max(context, run * page_size), min(n, (run + 1) * page_size)
            shift = (row[run] - run) * page_size
            slots.extend(range(begin + shift, end + shift) if row[run] >= 0 else [-1] * (end - begin))
    return slots
