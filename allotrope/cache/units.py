"""The layout of a pool that groups share: units of equal bytes, each of which belongs to one group at a time.

A unit has M chunks of c bytes, a common multiple of the bytes that a page takes in one field of any group. The pool has
U units, and keeps chunk m of all of them together: that of unit u lies at byte (m U + u) c. A group with F fields gives
each field M // F chunks of a unit. So a field is a contiguous view, in which pages of neighbouring units lie side by
side, and a page id means the same tokens in all fields of a group. Views of different groups overlap: only the group
that has a unit may touch its bytes. Unit 0 is the null unit, in which page 0 of every field lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from allotrope.attention.cache_layout import PLANE_ALIGNMENT, field_page_bytes
from allotrope.cache.groups import CacheGroup

# A unit has the fewest chunks of which every group fills nearly all, or else those of which least is wasted, if that
# is not more than the second share of a unit. It has no more chunks than so many times the fields of a group.
_LITTLE_WASTE, _MOST_WASTE, _MOST_TIMES = 0.03, 0.1, 8


@dataclass(frozen=True)
class UnitPages:
    """The pages of one group in a unit. `group`: its index among all groups. `chunks`: that each field has in a unit.
    `chunk_pages`: pages of a field in a chunk."""

    group: int
    chunks: int
    chunk_pages: int

    @property
    def count(self) -> int:
        """Pages of the group in a unit."""
        return self.chunks * self.chunk_pages

    def units(self, pages: int) -> int:
        """Units that hold so many pages."""
        return -(-pages // self.count)

    def planes(self, chunks: torch.Tensor, first: int, count: int) -> list[torch.Tensor]:
        """Per field, [bytes] of it in the pool. `chunks`: [M, U c]. `first`, `count`: of the group's fields."""
        return [chunks[i * self.chunks : (i + 1) * self.chunks].flatten() for i in range(first, first + count)]

    def pages_of(self, unit: int, units: int) -> list[int]:
        """The page ids in a unit of `units` ones, lowest first."""
        firsts = ((chunk * units + unit) * self.chunk_pages for chunk in range(self.chunks))
        return [first + i for first in firsts for i in range(self.chunk_pages)]

    def unit_of(self, page: int, units: int) -> int:
        """The unit of `units` ones that holds a page."""
        return page // self.chunk_pages % units


@dataclass(frozen=True)
class UnitLayout:
    """Units of `chunks` chunks of `chunk_bytes` bytes. `groups`: those that share them."""

    chunk_bytes: int
    chunks: int
    groups: tuple[UnitPages, ...]

    @property
    def bytes(self) -> int:
        """Bytes of a unit."""
        return self.chunks * self.chunk_bytes


def unit_layout(groups: Sequence[CacheGroup]) -> UnitLayout | None:
    """The layout of the pool that all groups with rows share; None where these do better with pools of their own.

    Pages of all fields of a group have equal bytes, no other pipeline stage has members of it, and at least one of
    several groups has a window: without one, all groups grow alike.
    """
    sharing = [i for i, group in enumerate(groups) if group.kind != "state"]
    if len(sharing) < 2 or all(groups[i].window is None for i in sharing):
        return None
    sizes, fields = [], []
    for i in sharing:
        found = [size for one in groups[i].members for size in field_page_bytes(one.layout, groups[i].page_size)]
        if groups[i].staged or len(set(found)) != 1 or found[0] % PLANE_ALIGNMENT:
            return None
        sizes.append(found[0])
        fields.append(len(found))
    chunk_bytes, chunks = math.lcm(*sizes), _chunks(fields)
    if chunks is None:
        return None
    of_groups = zip(sharing, sizes, fields, strict=True)
    pages = tuple(UnitPages(i, chunks // count, chunk_bytes // size) for i, size, count in of_groups)
    return UnitLayout(chunk_bytes, chunks, pages)


def _chunks(fields: Sequence[int]) -> int | None:
    """Chunks of a unit, of which groups with so many fields fill nearly all."""

    def waste(chunks: int) -> float:
        return max(chunks % count for count in fields) / chunks

    choices = range(max(fields), _MOST_TIMES * max(fields) + 1)
    little = next((chunks for chunks in choices if waste(chunks) <= _LITTLE_WASTE), None)
    least = min(choices, key=waste) if little is None else little
    return least if waste(least) <= _MOST_WASTE else None
