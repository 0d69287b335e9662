"""Which caches are one cache to vLLM, without vLLM: fewer groups, and no row or state that another one reaches into."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_spec
from allotrope.attention.cache_layout import (
    CacheLayout,
    Field,
    PagedRows,
    StateSlots,
    WindowRows,
    page_bytes,
    page_views,
    row_bytes,
)
from allotrope.cache.groups import Member
from allotrope.layers.parallel import Parallel
from allotrope.plugins.vllm.pools import Pool, pools_of
from allotrope.plugins.vllm.translate import common_page, one_table, page_tokens

ROW, WIDE = Field("k", (2, 64), torch.bfloat16), Field("k", (2, 128), torch.bfloat16)


def members_of(architecture: str) -> list[Member]:
    names = {"architectures": [architecture]}
    _, spec = read_spec(find_architecture(names, architecture).tiny() | names, architecture)
    own = [(number, layer.mixer) for number, layer in enumerate(spec.layers) if layer.mixer.shares_cache_of is None]
    found = [(number, mixer.attention(Parallel(), torch.bfloat16, torch.bfloat16)) for number, mixer in own]
    return [Member(number, name, layout) for number, one in found for name, layout in one.caches().items()]


def layers(*layouts: CacheLayout) -> list[Member]:
    return [Member(number, "kv", layout) for number, layout in enumerate(layouts)]


def groups(pools: list[Pool]) -> int:
    """As vLLM makes them: of each kind so many as there are of the fewest, or of the most if that is hardly more."""
    counts = list(Counter((type(one.layout), row_bytes(one.layout), one.members[0].layout) for one in pools).values())
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    return sum(-(-count // size) for count in counts)


@pytest.mark.parametrize("shares_prefixes", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_cache_is_in_one_pool(architecture: str, shares_prefixes: bool) -> None:
    """Written whole, no cache of a page changes another, and no page another page."""
    members = members_of(architecture)
    pools = pools_of(members, 16, shares_prefixes)
    assert sorted((one.layer, one.name) for pool in pools for one in pool.members) == sorted(
        (one.layer, one.name) for one in members
    )
    layouts = [pool.layout for pool in pools]
    page = 16 * sum(map(row_bytes, layouts)) if one_table(layouts) else common_page(layouts, 16)
    for pool in pools:
        size = page_bytes(pool.layout, 16) if one_table(layouts) else page
        memory = torch.zeros(3, size, dtype=torch.uint8)
        fields = page_views(pool.layout, memory)
        views = [pool.views_of(number, fields) for number in range(len(pool.members))]
        for number, of_member in enumerate(views):
            for field in of_member.values():
                field[1].view(torch.uint8).fill_(number + 1)
        assert not memory[0].any() and not memory[2].any()
        for number, (member, of_member) in enumerate(zip(pool.members, views, strict=True)):
            assert list(of_member) == [field.name for field in member.layout.fields]
            for field in of_member.values():
                assert (field[1].view(torch.uint8) == number + 1).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_have_one_number_in_their_pool(architecture: str) -> None:
    for pool in pools_of(members_of(architecture), 16, False):
        if isinstance(pool.layout, StateSlots):
            continue
        memory = torch.zeros(2, 8 * row_bytes(pool.layout), dtype=torch.uint8)
        for field in page_views(pool.layout, memory).values():
            assert field.flatten(0, 1).data_ptr() == field.data_ptr()


def test_windows_lie_side_by_side() -> None:
    """One layer in six keeps all: two block tables in place of six."""
    windows, kept = WindowRows((ROW,), 128), PagedRows((ROW,))
    members = layers(*[windows] * 5, kept, *[windows] * 5, kept)
    alone = [Pool((member,), row_bytes(member.layout)) for member in members]
    assert groups(alone) == 6
    pools = pools_of(members, 64, False)
    assert [[one.layer for one in pool.members] for pool in pools] == [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10], [5], [11]]
    page = common_page([pool.layout for pool in pools], 64)
    assert groups(pools) == 2 and [page_tokens(pool.layout, page) for pool in pools] == [64, 64, 320, 320]


def test_prefixes_stay_short() -> None:
    """With prefix caching, so many lie side by side that runs have at most 512 tokens."""
    windows, kept = WindowRows((ROW,), 128), PagedRows((ROW,))
    assert groups(pools_of(layers(*[windows] * 3, kept), 64, True)) == 2
    assert groups(pools_of(layers(*[windows] * 9, kept), 64, True)) == 10


def test_states_lie_side_by_side_where_no_prefix_keeps_one() -> None:
    """In pages of whole blocks."""
    state, kept = StateSlots((Field("ssm", (1000,), torch.float32),)), PagedRows((ROW,))
    members = layers(state, state, state, kept)
    assert groups(pools_of(members, 16, True)) == 4
    pools = pools_of(members, 16, False)
    assert [[one.layer for one in pool.members] for pool in pools] == [[0, 1, 2], [3]]
    page = common_page([pool.layout for pool in pools], 16)
    assert page == row_bytes(pools[0].layout) == 48 * row_bytes(kept) > 3 * row_bytes(state)


def test_caches_of_a_layer_lie_side_by_side() -> None:
    """Where pages stay as long: rows of 256 and of 768 bytes are one of 1024."""
    window, kept = WindowRows((ROW,), 8), PagedRows((ROW,), 4)
    both = PagedRows((Field("k", (384,), torch.bfloat16),), 4)
    members = [Member(0, "window", window), Member(0, "rows", kept), Member(0, "index", both)]
    (first, second) = pools_of(members, 16, False)
    assert [one.name for one in first.members] == ["window"] and row_bytes(second.layout) == 1024
    assert [one.name for one in second.members] == ["rows", "index"]


def test_the_last_pool_may_miss_a_cache() -> None:
    """Of three windows in pools of two, the last has room for another: all have one size."""
    windows, kept = WindowRows((ROW,), 16), PagedRows((WIDE,))
    pools = pools_of(layers(windows, windows, windows, kept, kept), 16, False)
    assert [len(pool.members) for pool in pools] == [2, 1, 1, 1]
    assert len({row_bytes(pool.layout) for pool in pools}) == 1 and groups(pools) == 2


def test_rows_begin_as_kernels_load_them() -> None:
    odd, even = Field("a", (20,), torch.uint8), Field("b", (64,), torch.uint8)
    pool = Pool((Member(0, "a", PagedRows((odd,))), Member(0, "b", PagedRows((even,)))), 96)
    views = page_views(pool.layout, torch.zeros(1, 96 * 4, dtype=torch.uint8))
    assert views["1/b"].storage_offset() % 16 == 0 and math.prod(views["1/b"].shape) == 4 * 64
