"""Our caches in SGLang's two pools, without SGLang: every architecture's fit, none overlaps another."""

from __future__ import annotations

import pytest
import torch

from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_spec
from allotrope.attention.cache_layout import CacheLayout, Field, PagedRows, StateSlots, page_bytes, row_bytes
from allotrope.plugins.sglang.memory import HEAD_DIM, CacheMemory, planned_layouts

PAGES, SLOTS = 5, 3


def memory_of(architecture: str) -> CacheMemory:
    names = {"architectures": [architecture]}
    _, spec = read_spec(find_architecture(names, architecture).tiny() | names, architecture)
    return CacheMemory(planned_layouts(spec, architecture))


def pools(memory: CacheMemory, page_size: int) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """As SGLang makes them of what the model declares."""
    heads = memory.heads(torch.float32.itemsize)
    halves = [torch.zeros(PAGES * page_size, heads, HEAD_DIM) for _ in range(2)]
    return halves, torch.zeros(SLOTS, 1, 1, memory.state_bytes // 4) if memory.state_bytes else None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_byte_belongs_to_one_field(architecture: str) -> None:
    memory = memory_of(architecture)
    page_size = memory.row_stride * 2
    halves, states = pools(memory, page_size)
    found = memory.cut(page_size, halves, states)
    # A field that overlapped another would be written again.
    for number, fields in enumerate(found):
        for field in fields.values():
            field.view(torch.uint8).fill_(number % 250 + 1)
    for number, (layout, fields) in enumerate(zip(memory.layouts, found, strict=True)):
        count = SLOTS if isinstance(layout, StateSlots) else PAGES
        assert sum(field.numel() * field.itemsize for field in fields.values()) == count * page_bytes(layout, page_size)
        assert all(bool((field.view(torch.uint8) == number % 250 + 1).all()) for field in fields.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_little_is_wasted(architecture: str) -> None:
    """A head for padding, and a cache that has no like to lie beside."""
    memory = memory_of(architecture)
    rows = [layout for layout in memory.layouts if not isinstance(layout, StateSlots)]
    each = [page_bytes(layout, memory.row_stride) / memory.row_stride for layout in rows]
    held = 2 * memory.heads(4) * HEAD_DIM * 4
    assert sum(each) <= held <= sum(each) + 2 * max(each) + 4 * HEAD_DIM * 4


def test_a_pool_that_is_too_small_is_refused() -> None:
    layouts: tuple[CacheLayout, ...] = (PagedRows((Field("k", (4, 16), torch.float32),)),) * 2
    memory = CacheMemory(layouts)
    assert row_bytes(layouts[0]) == 256
    with pytest.raises(ValueError, match="a pool of 3968 bytes does not hold 4096"):
        memory.cut(16, [torch.zeros(16, 62), torch.zeros(16, 62)], None)
