"""Sizes and views of cache memory, over random layouts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allotrope.attention.cache_layout import (
    PLANE_ALIGNMENT,
    CacheLayout,
    Field,
    PagedRows,
    StateSlots,
    WindowRows,
    page_bytes,
    pool_bytes,
    row_bytes,
    views,
)

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn)


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    count = draw(st.integers(1, 4))
    fields = tuple(
        Field(f"f{i}", tuple(draw(st.lists(st.integers(1, 5), max_size=3))), draw(st.sampled_from(DTYPES)))
        for i in range(count)
    )
    kind = draw(st.sampled_from(("paged", "window", "state")))
    if kind == "paged":
        return PagedRows(fields, stride=draw(st.sampled_from((1, 2, 4, 8))))
    return WindowRows(fields, window=draw(st.integers(1, 100))) if kind == "window" else StateSlots(fields)


@settings(max_examples=150, deadline=None)
@given(layout=layouts(), page_size=st.sampled_from((8, 16, 24)), pages=st.integers(1, 6))
def test_views_fill_the_pool_without_overlap(layout: CacheLayout, page_size: int, pages: int) -> None:
    size = pool_bytes(layout, page_size, pages)
    buffer = torch.zeros(size, dtype=torch.uint8)
    found = views(layout, page_size, pages, buffer)
    assert list(found) == [field.name for field in layout.fields]
    written = 0
    for i, (field, view) in enumerate(zip(layout.fields, found.values(), strict=True), start=1):
        rows = () if isinstance(layout, StateSlots) else (layout.rows_per_page(page_size),)
        assert (view.shape, view.dtype) == ((pages, *rows, *field.shape), field.dtype)
        assert view.is_contiguous()
        start = view.data_ptr() - buffer.data_ptr()
        assert start % PLANE_ALIGNMENT == 0
        assert not buffer[start : start + view.nbytes].any(), "planes overlap"
        buffer[start : start + view.nbytes] = i
        written += view.nbytes
    # Bytes are those of the pages; only the padding between planes comes on top.
    assert written == pages * page_bytes(layout, page_size)
    assert page_bytes(layout, page_size) == layout.rows_per_page(page_size) * row_bytes(layout)
    assert row_bytes(layout) == sum(math.prod(field.shape) * field.dtype.itemsize for field in layout.fields)
    assert written <= size < written + PLANE_ALIGNMENT * len(layout.fields)


def test_a_page_holds_a_row_for_every_stride() -> None:
    field = Field("x", (3,), torch.float32)
    assert PagedRows((field,)).rows_per_page(32) == 32
    assert PagedRows((field,), stride=4).rows_per_page(32) == 8
    assert WindowRows((field,), window=5).rows_per_page(32) == 32
    assert StateSlots((field,)).rows_per_page(32) == 1
    with pytest.raises(ValueError, match=r"page_size=30 .* stride 4"):
        PagedRows((field,), stride=4).rows_per_page(30)


def test_a_state_slot_does_not_grow_with_the_page() -> None:
    layout = StateSlots((Field("x", (5, 7), torch.float32),))
    assert {page_bytes(layout, size) for size in (1, 16, 256)} == {5 * 7 * 4}
