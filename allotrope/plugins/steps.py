"""From a host's words to ours: its requests and tokens as our batch, its page table as our index."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from allotrope.attention.batch import BatchLayout, BatchTensors, PageIndex, on_device


class HostBatch(Protocol):
    """What is read of a host's step. `query_start_loc`: [B + 1]. `seq_lens`: [B], tokens after the step.

    `..._cpu`: the same on the host; the upper bound is exact without speculation.
    """

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None


@dataclass(frozen=True)
class Order:
    """A host's requests and tokens in the order of our batch: requests with one new token first, padding left out.

    With draft tokens a request of the host may be several of ours, one for each of its new tokens.
    """

    requests: slice | torch.Tensor
    tokens: slice | torch.Tensor

    def restored(self, hidden: torch.Tensor, tokens: int) -> torch.Tensor:
        """`hidden` [T, hidden] of our batch, as the host has its `tokens`: 0 for padding."""
        if isinstance(self.tokens, slice) and len(hidden) == tokens:
            return hidden
        out = hidden.new_zeros(tokens, hidden.shape[1])
        out[self.tokens] = hidden
        return out


def arrange(
    common: HostBatch, device: torch.device, numbers: torch.Tensor | None = None, max_drafts: int = 0
) -> tuple[BatchLayout, Order]:
    """The step's batch.

    `numbers`: 0, 1, 2 and so on, which outlive the step; with them decodes are taken from the host's tensors, so that
    the step can be captured, where it has no other requests; the host's integers are then bounds. `max_drafts`: most
    draft tokens that the host verifies of a request. Requests with so few new tokens are taken apart: each token is a
    request with the same pages and one visible token more than the one before, and is computed as plain decoding would.
    That is right for the end of a prompt as well, but prompts are computed as without drafts where the host says which
    they are.
    """
    if numbers is not None and common.max_query_len == 1 and common.num_actual_tokens == common.num_reqs:
        return _static(common, device, numbers)
    starts = common.query_start_loc_cpu.tolist()
    # The host's lengths count drafts that are rejected, where it does not wait for the step before.
    known = common.seq_lens_cpu_upper_bound if max_drafts == 0 else None
    seen = (common.seq_lens if known is None else known).tolist()
    told = getattr(common, "is_prefilling", None) if max_drafts else None
    apart = (
        [1 + max_drafts] * (len(starts) - 1)
        if told is None
        else [1 if prefills else 1 + max_drafts for prefills in told.tolist()]
    )
    parts = [
        part for b, (start, end) in enumerate(itertools.pairwise(starts)) for part in _parts(b, start, end, apart[b])
    ]
    parts.sort(key=lambda part: part.end - part.start != 1)
    seq_lens = tuple(seen[part.request] - (starts[part.request + 1] - part.end) for part in parts)
    batch = BatchLayout(tuple(part.end - part.start for part in parts), seq_lens, device)
    return batch, _order(parts, device)


@dataclass(frozen=True)
class _Part:
    """Tokens `start` to `end` of the host's step: one request of ours, which belongs to `request` of the host's."""

    request: int
    start: int
    end: int


def _parts(request: int, start: int, end: int, max_tokens: int) -> list[_Part]:
    """One part for each token of up to `max_tokens`, else one of all."""
    if start == end:
        return []
    if end - start > max_tokens:
        return [_Part(request, start, end)]
    return [_Part(request, token, token + 1) for token in range(start, end)]


def _order(parts: list[_Part], device: torch.device) -> Order:
    """Slices, which copy nothing, where requests and tokens are in the host's order."""
    requests = [part.request for part in parts]
    starts = [0, *itertools.accumulate(part.end - part.start for part in parts)]
    tokens = slice(0, starts[-1])
    in_order = requests == list(range(len(parts)))
    here = slice(0, len(parts)) if in_order else on_device(requests, torch.int64, device)
    if [part.start for part in parts] == starts[:-1]:
        return Order(here, tokens)
    runs = [np.arange(part.start, part.end) for part in parts]
    return Order(here, on_device(np.concatenate(runs), torch.int64, device))


def _static(common: HostBatch, device: torch.device, numbers: torch.Tensor) -> tuple[BatchLayout, Order]:
    count = common.num_reqs
    positions = torch.empty(count, dtype=torch.int64, device=device)
    torch.sub(common.seq_lens, 1, out=positions).clamp_(min=0)
    requests = numbers[:count] if count <= len(numbers) else torch.arange(count, device=device)
    given = BatchTensors(common.seq_lens, common.query_start_loc, positions, requests)
    batch = BatchLayout((1,) * count, (common.max_seq_len,) * count, device, given)
    return batch, Order(slice(0, count), slice(0, count))


def rows_index(batch: BatchLayout, order: Order, table: torch.Tensor, slots: torch.Tensor, page_size: int) -> PageIndex:
    """A host's block table and slot mapping as a page index.

    Block 0 belongs to nobody and is never written, in the hosts as in our pools; here it stands for "none". A step that
    can be captured gets the host's tensors themselves: backends for such steps read them, and no operation is spent.
    """
    width = -(-max(batch.seq_lens) // page_size)
    pages, rows = table[order.requests, :width], slots[order.tokens].long()
    if batch.static_tensors is not None:
        return PageIndex(page_size, pages, rows)
    pages = pages.long()
    return PageIndex(page_size, torch.where(pages > 0, pages, -1), torch.where(rows >= page_size, rows, -1))
