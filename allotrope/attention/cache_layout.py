"""The layout of a layer's caches in bytes: the one source of their sizes.

Owns: three kinds of cache memory and the views into it. Must not know: who owns pages, which model asks.

- `PagedRows`   one row per `stride` tokens, kept for the whole context.
- `WindowRows`  one row per token, of which only the last `window` are ever read.
- `StateSlots`  one state per sequence, overwritten in place.

Rows live in pages of `page_size` tokens. A pool of P pages stores each field as one plane [P, rows, *shape], so a
field is contiguous whatever the other fields of the row are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

# Planes start at multiples of this many bytes, so that any field type can be viewed in place.
PLANE_ALIGNMENT = 64


@dataclass(frozen=True)
class Field:
    """One named part of a row or state: `shape` elements of `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PagedRows:
    """One row for every `stride` tokens of the context; nothing is dropped before the sequence ends."""

    fields: tuple[Field, ...]
    stride: int = 1

    def rows_per_page(self, page_size: int) -> int:
        """Rows in a page of `page_size` tokens; raises ValueError if `stride` does not divide it."""
        if page_size % self.stride:
            raise ValueError(f"page_size={page_size} is not a multiple of the row stride {self.stride}")
        return page_size // self.stride


@dataclass(frozen=True)
class WindowRows:
    """One row per token, read only while it is among the last `window` (the query's own token included)."""

    fields: tuple[Field, ...]
    window: int

    def rows_per_page(self, page_size: int) -> int:
        return page_size


@dataclass(frozen=True)
class StateSlots:
    """One fixed-size state per sequence. A new slot holds stale bytes: readers ignore it at position 0."""

    fields: tuple[Field, ...]

    def rows_per_page(self, page_size: int) -> int:
        return 1


CacheLayout = PagedRows | WindowRows | StateSlots


def row_bytes(layout: CacheLayout) -> int:
    """Bytes of one row (or of one state)."""
    return sum(field.bytes for field in layout.fields)


def page_bytes(layout: CacheLayout, page_size: int) -> int:
    """Bytes of one page of `page_size` tokens (or of one slot)."""
    return sum(field_page_bytes(layout, page_size))


def field_page_bytes(layout: CacheLayout, page_size: int) -> tuple[int, ...]:
    """Bytes of one page of each field."""
    return tuple(layout.rows_per_page(page_size) * field.bytes for field in layout.fields)


def pool_bytes(layout: CacheLayout, page_size: int, pages: int) -> int:
    """Bytes of a pool of `pages` pages, the padding between its planes included."""
    return max((end for _, end in _planes(layout, page_size, pages)), default=0)


def views(layout: CacheLayout, page_size: int, pages: int, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name the planes of a pool.

    `buffer`: [pool_bytes] uint8. Returns one tensor per field, [pages, rows, *shape] for rows and [pages, *shape] for
    states, all sharing `buffer`'s memory.
    """
    return plane_views(
        layout, page_size, pages, [buffer[start:end] for start, end in _planes(layout, page_size, pages)]
    )


def plane_views(
    layout: CacheLayout, page_size: int, pages: int, planes: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """As `views`, of planes that lie anywhere. `planes`: per field, [bytes] uint8."""
    rows = () if isinstance(layout, StateSlots) else (layout.rows_per_page(page_size),)
    return {
        field.name: plane.view(field.dtype).view(pages, *rows, *field.shape)
        for field, plane in zip(layout.fields, planes, strict=True)
    }


def page_views(layout: CacheLayout, pages: torch.Tensor) -> dict[str, torch.Tensor]:
    """As `views`, of whole pages: a page holds its rows one after another, and a row its fields one after another.

    `pages`: [P, bytes] uint8, one page (or slot, which may be longer than a state) each. Raises ValueError if the rows
    of all pages have no common stride, or a field is not aligned to its type's size.
    """
    size, step = row_bytes(layout), pages.stride(0)
    if isinstance(layout, StateSlots):
        cells = pages[:, :size]
    elif step != pages.shape[1] or step % size:
        raise ValueError(
            f"pages of {pages.shape[1]} bytes, {step} apart, do not hold rows of {size} bytes back to back"
        )
    else:
        cells = pages.view(pages.shape[0], -1, size)
    fields, start = {}, 0
    for field in layout.fields:
        if any(number % field.dtype.itemsize for number in (start, size, step, pages.storage_offset())):
            raise ValueError(f"field {field.name} of {field.dtype} is not aligned in rows of {size} bytes")
        cell = cells[..., start : start + field.bytes].view(field.dtype)
        # Rows keep their stride where a page has one alone, which `view` would not.
        strides = (*cell.stride()[:-1], *torch.empty(field.shape, device="meta").stride())
        fields[field.name] = cell.as_strided((*cell.shape[:-1], *field.shape), strides)
        start += field.bytes
    return fields


def _planes(layout: CacheLayout, page_size: int, pages: int) -> Iterator[tuple[int, int]]:
    """First and last byte (exclusive) of each field's plane."""
    start = 0
    for size in field_page_bytes(layout, page_size):
        end = start + pages * size
        yield start, end
        start = -(-end // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
