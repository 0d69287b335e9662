"""Cache groups: layers whose rows are allocated and freed together share one page table.

Members of a group may differ in row size: each has its own fields, and a page id means the same tokens in all of them,
so nothing is padded to a common size.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from allotrope.attention.cache_layout import CacheLayout, PagedRows, WindowRows, page_bytes, row_bytes

Kind = Literal["paged", "window", "state"]


@dataclass(frozen=True)
class Member:
    """One cache of one layer."""

    layer: int
    name: str
    layout: CacheLayout


@dataclass(frozen=True)
class CacheGroup:
    """Caches with one page table. `page_size`: tokens a page; 1 for states, whose "pages" are slots.

    `window`: tokens that must stay readable, None for all. `staged`: whether other pipeline stages hold other members.
    """

    kind: Kind
    page_size: int
    window: int | None
    members: tuple[Member, ...]
    staged: bool = False

    @cached_property
    def page_bytes(self) -> int:
        """Bytes that one page takes in all pools of the group together."""
        return sum(page_bytes(member.layout, self.page_size) for member in self.members)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({member.layer for member in self.members}))

    @property
    def row_bytes(self) -> int:
        """Bytes that one row (or state) takes in all pools of the group together."""
        return sum(row_bytes(member.layout) for member in self.members)

    @property
    def label(self) -> str:
        """Short name for people: `paged`, `window 128`, `state`; with the stride where rows cover several tokens."""
        strides = {m.layout.stride for m in self.members if isinstance(m.layout, PagedRows)} - {1}
        stride = f" /{'/'.join(map(str, sorted(strides)))}" if strides else ""
        return f"{self.kind}{'' if self.window is None else f' {self.window}'}{stride}"

    def pages_for(self, tokens: int) -> int:
        """Pages of a table that reaches over `tokens` tokens."""
        return 1 if self.kind == "state" else -(-tokens // self.page_size)

    def of_layers(self, layers: Container[int]) -> CacheGroup:
        """The group as a rank has it that holds these layers: with the same pages, and perhaps no cache."""
        held = tuple(member for member in self.members if member.layer in layers)
        return replace(self, members=held, staged=True)

    def out_of_window_pages(self, computed: int) -> int:
        """Leading pages out of the window: no later query reads them once `computed` tokens are stored."""
        if self.window is None:
            return 0
        return max(0, computed - self.window + 1) // self.page_size

    def live_pages(self, context: int, chunk: int) -> int:
        """Most pages that one sequence of up to `context` tokens holds while `chunk` tokens are added."""
        if self.window is None:
            return self.pages_for(context)
        return min(self.pages_for(context), self.pages_for(self.window - 1 + chunk) + 1)


def group_caches(layers: Sequence[Mapping[str, CacheLayout]], page_size: int) -> tuple[CacheGroup, ...]:
    """Group the caches of all layers. `layers`: per layer, its spec's `caches()` (empty if it shares).

    Rows of stride r get pages of lcm(page_size, r) tokens.
    """
    members: dict[tuple[Kind, int, int | None], list[Member]] = {}
    for layer, caches in enumerate(layers):
        for name, layout in caches.items():
            key: tuple[Kind, int, int | None] = ("state", 1, None)
            if isinstance(layout, PagedRows):
                key = ("paged", math.lcm(page_size, layout.stride), None)
            elif isinstance(layout, WindowRows):
                key = ("window", page_size, layout.window)
            members.setdefault(key, []).append(Member(layer, name, layout))
    return tuple(CacheGroup(*key, tuple(own)) for key, own in members.items())
