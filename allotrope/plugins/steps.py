"""A host's step as ours: its requests and tokens as our batch, its block table and slot mapping as our page index."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from allotrope.attention.batch import BatchLayout, BatchTensors, PageIndex, on_device


class HostBatch(Protocol):
    """What we read of a host's step; vLLM's `CommonAttentionMetadata` has these fields. `query_start_loc`: [B + 1].
    `seq_lens`: [B] tokens after the step.

    `..._cpu`: the same in host memory; the upper bound is exact without speculation.
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
        """`hidden` [T, hidden] of our batch, in the host's order of `tokens` tokens; 0 for padding."""
        if isinstance(self.tokens, slice) and len(hidden) == tokens:
            return hidden
        out = hidden.new_zeros(tokens, hidden.shape[1])
        out[self.tokens] = hidden
        return out


def arrange(
    common: HostBatch, device: torch.device, arange: torch.Tensor | None = None, max_drafts: int = 0
) -> tuple[BatchLayout, Order]:
    """The step as our batch.

    `arange`: 0, 1, 2 and so on, in memory that outlives the step. With it, a step of decodes alone is made of the
    host's own tensors, so that a graph can capture it; the host's integers are then upper bounds. `max_drafts`: most
    draft tokens of a request that the host verifies.

    With drafts, a request with up to 1 + `max_drafts` new tokens becomes one request for each of them. These share its
    pages, and each sees one token more than the one before, as in plain decoding. This is right for the end of a prompt
    as well; where the host says which requests are prompts, these stay whole, as they are without drafts.
    """
    if arange is not None and common.max_query_len == 1 and common.num_actual_tokens == common.num_reqs:
        return _static(common, device, arange)
    starts = common.query_start_loc_cpu.tolist()
    # Without waiting for the step before, the host's own lengths count drafts that are rejected.
    on_host = common.seq_lens_cpu_upper_bound if max_drafts == 0 else None
    host_lens = (common.seq_lens if on_host is None else on_host).tolist()
    is_prefilling = getattr(common, "is_prefilling", None) if max_drafts else None
    max_split = [1 + max_drafts] * (len(starts) - 1)
    if is_prefilling is not None:
        max_split = [1 if prefills else 1 + max_drafts for prefills in is_prefilling.tolist()]
    requests = [
        request
        for host, (start, end) in enumerate(itertools.pairwise(starts))
        for request in _split(host, start, end, max_split[host])
    ]
    requests.sort(key=lambda request: request.end - request.start != 1)
    seq_lens = tuple(host_lens[request.host] - (starts[request.host + 1] - request.end) for request in requests)
    batch = BatchLayout(tuple(request.end - request.start for request in requests), seq_lens, device)
    return batch, _order(requests, device)


@dataclass(frozen=True)
class _Request:
    """A request of our batch: tokens `start` to `end` of the host's step, which are of its request `host`."""

    host: int
    start: int
    end: int


def _split(host: int, start: int, end: int, max_split: int) -> list[_Request]:
    """One request for each token where there are at most `max_split`, else one for all."""
    if start == end:
        return []
    if end - start > max_split:
        return [_Request(host, start, end)]
    return [_Request(host, token, token + 1) for token in range(start, end)]


def _order(requests: list[_Request], device: torch.device) -> Order:
    """Slices, which copy nothing, where requests and tokens are in the host's order."""
    of_host = [request.host for request in requests]
    starts = [0, *itertools.accumulate(request.end - request.start for request in requests)]
    in_order = of_host == list(range(len(requests)))
    request_index = slice(0, len(requests)) if in_order else on_device(of_host, torch.int64, device)
    if [request.start for request in requests] == starts[:-1]:
        return Order(request_index, slice(0, starts[-1]))
    tokens = [np.arange(request.start, request.end) for request in requests]
    return Order(request_index, on_device(np.concatenate(tokens), torch.int64, device))


def _static(common: HostBatch, device: torch.device, arange: torch.Tensor) -> tuple[BatchLayout, Order]:
    """A step of decodes alone, whose tensors are the host's."""
    count = common.num_reqs
    positions = torch.empty(count, dtype=torch.int64, device=device)
    torch.sub(common.seq_lens, 1, out=positions).clamp_(min=0)
    requests = arange[:count] if count <= len(arange) else torch.arange(count, device=device)
    tensors = BatchTensors(common.seq_lens, common.query_start_loc, positions, requests)
    batch = BatchLayout((1,) * count, (common.max_seq_len,) * count, device, tensors)
    return batch, Order(slice(0, count), slice(0, count))


def rows_index(batch: BatchLayout, order: Order, table: torch.Tensor, slots: torch.Tensor, page_size: int) -> PageIndex:
    """A host's block table and slot mapping as a page index.

    Block 0 is the null block, which hosts use for "no block"; ours is -1. A step that a graph can capture gets the
    host's tensors as they are, which `PageIndex` allows there: no kernel is launched to change them.
    """
    width = -(-max(batch.seq_lens) // page_size)
    pages, rows = table[order.requests, :width], slots[order.tokens].long()
    if batch.static_tensors is not None:
        return PageIndex(page_size, pages, rows)
    pages = pages.long()
    return PageIndex(page_size, torch.where(pages > 0, pages, -1), torch.where(rows >= page_size, rows, -1))
