"""From vLLM's words to ours: page sizes and states. Imports nothing of vLLM."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from allotrope.attention.batch import BatchLayout, SlotIndex
from allotrope.attention.cache_layout import CacheLayout, Field, PagedRows, StateSlots, WindowRows, row_bytes
from allotrope.plugins.steps import Order


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
        fields = "+".join(dict.fromkeys(named(field) for field in layout.fields if named(field)))
        if isinstance(layout, StateSlots):
            waste = 100 * (page - sum(field.bytes for field in layout.fields if named(field))) // page
            kinds.append(f"{fields} one state{_layers(layout)}, {waste} % of the page unused")
        else:
            cuts.append(page_tokens(layout, page))
            kinds.append(f"{fields} {cuts[-1]} tokens{_layers(layout)}")
    sizes = " and ".join(map(str, dict.fromkeys(pages.values())))
    return f"pages of {sizes} bytes: {'; '.join(kinds)}; prefixes are shared in runs of {math.lcm(*cuts)} tokens"


def named(field: Field) -> str:
    """The name of a field in the cache that it is of, empty for padding between caches that lie side by side."""
    return field.name.rpartition("/")[2]


def _layers(layout: CacheLayout) -> str:
    """How many caches lie side by side in a page, where there are several."""
    count = len({field.name.partition("/")[0] for field in layout.fields if "/" in field.name and named(field)})
    return f" of {count} caches" if count > 1 else ""


def page_tokens(layout: CacheLayout, page: int) -> int:
    """Tokens whose rows a page of `page` bytes holds."""
    return page // row_bytes(layout) * stride(layout)


def stride(layout: CacheLayout) -> int:
    """Tokens a row."""
    return layout.stride if isinstance(layout, PagedRows) else 1


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
