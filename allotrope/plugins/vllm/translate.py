"""From vLLM's words to ours: page sizes, batches and page tables. Imports nothing of vLLM."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from allotrope.attention.batch import BatchLayout, BatchTensors, PageIndex, SlotIndex
from allotrope.attention.cache_layout import CacheLayout, PagedRows, StateSlots, WindowRows, row_bytes


def common_page(layouts: Sequence[CacheLayout], block_size: int) -> int:
    """Bytes of the one page size that vLLM gives to all caches of a model with several block tables.

    Whole rows of every cache fit without a rest, and every state fits. Rows that are kept get at least `block_size`
    tokens a page, rows of a window no more than the window needs: the fewest tokens decide what a request costs.
    """
    rows = {layout for layout in layouts if not isinstance(layout, StateSlots)}
    least = max((row_bytes(layout) for layout in layouts if isinstance(layout, StateSlots)), default=0)
    # With one kind of rows, a page has exactly the tokens that vLLM was asked for.
    for layout in rows:
        tokens = block_size
        if isinstance(layout, WindowRows) and len(rows) > 1:
            tokens = min(block_size, layout.window)
        least = max(least, -(-tokens * row_bytes(layout) // stride(layout)))
    unit = math.lcm(*map(row_bytes, rows))
    return -(-least // unit) * unit


def one_table(layouts: Sequence[CacheLayout]) -> bool:
    """Whether vLLM can keep one block table for all caches of a model: where every row is kept, and is one token's."""
    return all(isinstance(layout, PagedRows) and layout.stride == 1 for layout in layouts)


def page_of(layout: CacheLayout, layouts: Sequence[CacheLayout], block_size: int) -> int:
    """Bytes of the pages of one of a model's caches, `layouts`.

    With one table, pages of equally many tokens: each further table costs vLLM time at every step.
    """
    return block_size * row_bytes(layout) if one_table(layouts) else common_page(layouts, block_size)


def describe(layouts: Sequence[CacheLayout], block_size: int) -> str:
    """One line about pages: what they hold of each kind of cache, what they waste, where prefixes can be cut."""
    kinds, cuts = [], []
    pages = {layout: page_of(layout, layouts, block_size) for layout in layouts}
    for layout, page in pages.items():
        fields = "+".join(field.name for field in layout.fields)
        if isinstance(layout, StateSlots):
            waste = 100 * (page - row_bytes(layout)) // page
            kinds.append(f"{fields} one state, {waste} % of the page unused")
        else:
            cuts.append(page_tokens(layout, page))
            kinds.append(f"{fields} {cuts[-1]} tokens")
    sizes = " and ".join(map(str, dict.fromkeys(pages.values())))
    return f"pages of {sizes} bytes: {'; '.join(kinds)}; prefixes are shared in runs of {math.lcm(*cuts)} tokens"


def page_tokens(layout: CacheLayout, page: int) -> int:
    """Tokens whose rows a page of `page` bytes holds."""
    return page // row_bytes(layout) * stride(layout)


def stride(layout: CacheLayout) -> int:
    """Tokens a row."""
    return layout.stride if isinstance(layout, PagedRows) else 1


class HostBatch(Protocol):
    """What is read of vLLM's common metadata. `query_start_loc`: [B + 1]. `seq_lens`: [B], tokens after the step.

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
    """vLLM's requests and tokens in the order of our batch: requests with one new token first, padding left out.

    With draft tokens a request of vLLM may be several of ours, one for each of its new tokens.
    """

    requests: slice | torch.Tensor
    tokens: slice | torch.Tensor


def arrange(
    common: HostBatch, device: torch.device, numbers: torch.Tensor | None = None, max_drafts: int = 0
) -> tuple[BatchLayout, Order]:
    """The step's batch.

    `numbers`: 0, 1, 2 and so on, which outlive the step; with them decodes are taken from vLLM's tensors, so that the
    step can be captured, where it has no other requests; the host's integers are then bounds. `max_drafts`: most draft
    tokens that vLLM verifies of a request. Requests with so few new tokens are taken apart: each token is a request
    with the same pages and one visible token more than the one before, and is computed as plain decoding would. That is
    right for the end of a prompt as well, but prompts are computed as without drafts where vLLM says which they are.
    """
    if numbers is not None and common.max_query_len == 1 and common.num_actual_tokens == common.num_reqs:
        return _static(common, device, numbers)
    starts = common.query_start_loc_cpu.tolist()
    # The host's lengths count drafts that are rejected, where vLLM does not wait for the step before.
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
    requests = [part.request for part in parts]
    tokens = [token for part in parts for token in range(part.start, part.end)]
    return batch, Order(_indices(requests, device), _indices(tokens, device))


@dataclass(frozen=True)
class _Part:
    """Tokens `start` to `end` of vLLM's step, which are one request of ours and belong to `request` of vLLM's."""

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


def _indices(numbers: list[int], device: torch.device) -> slice | torch.Tensor:
    """A slice, which copies nothing, where `numbers` count up from 0."""
    if numbers == list(range(len(numbers))):
        return slice(0, len(numbers))
    return torch.tensor(numbers, device=device)


def _static(common: HostBatch, device: torch.device, numbers: torch.Tensor) -> tuple[BatchLayout, Order]:
    count = common.num_reqs
    positions = torch.empty(count, dtype=torch.int64, device=device)
    torch.sub(common.seq_lens, 1, out=positions).clamp_(min=0)
    requests = numbers[:count] if count <= len(numbers) else torch.arange(count, device=device)
    given = BatchTensors(common.seq_lens, common.query_start_loc, positions, requests)
    batch = BatchLayout((1,) * count, (common.max_seq_len,) * count, device, given)
    return batch, Order(slice(0, count), slice(0, count))


def rows_index(batch: BatchLayout, order: Order, table: torch.Tensor, slots: torch.Tensor, page_size: int) -> PageIndex:
    """vLLM's block table and slot mapping as a page index.

    Block 0 belongs to nobody and is never written, in vLLM as in our pools; here it stands for "none". A step that can
    be captured gets vLLM's tensors themselves: backends for such steps read them, and no operation is spent.
    """
    width = -(-max(batch.seq_lens) // page_size)
    pages, rows = table[order.requests, :width], slots[order.tokens].long()
    if batch.static_tensors is not None:
        return PageIndex(page_size, pages, rows)
    pages = pages.long()
    return PageIndex(page_size, torch.where(pages > 0, pages, -1), torch.where(rows >= page_size, rows, -1))


def states_index(batch: BatchLayout, order: Order, table: torch.Tensor, each: int | None) -> SlotIndex:
    """The slot of each request's state. `each`: tokens that one state of a request is kept for, None if it has one.

    The current state is that of the block which the step's last token falls into.
    """
    blocks = table[order.requests]
    if batch.static_tensors is None:
        blocks = blocks.long()
    if each is None:
        return SlotIndex(blocks[:, 0].contiguous())
    last = (batch.tensors.seq_lens.long() - 1).clamp(min=0) if batch.static_tensors is None else batch.positions
    return SlotIndex(blocks.gather(1, (last // each)[:, None]).squeeze(1))
