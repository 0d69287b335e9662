"""Which prefixes may be reused, over groups of every kind, against the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allotrope.attention.cache_layout import CacheLayout, Field, PagedRows, StateSlots, WindowRows
from allotrope.cache.groups import group_caches
from allotrope.cache.pages import PagePool
from allotrope.cache.prefix import PrefixCache

FIELD = (Field("x", (2,), torch.float32),)
PAGED, STRIDED = PagedRows(FIELD), PagedRows(FIELD, stride=8)
WINDOW, STATE = WindowRows(FIELD, window=6), StateSlots(FIELD)
MIXES: dict[str, list[CacheLayout]] = {
    "paged": [PAGED],
    "window": [WINDOW],
    "paged window": [PAGED, WINDOW],
    "paged state": [PAGED, STATE],
    "all": [PAGED, STRIDED, WINDOW, STATE],
}
IDS = list(range(100, 148))


def make(mix: str) -> PrefixCache:
    groups = group_caches([{f"c{i}": layout} for i, layout in enumerate(MIXES[mix])], page_size=4)
    return PrefixCache(groups, [PagePool(64) for _ in groups])


def fill(cache: PrefixCache, kept: dict[int, set[int]]) -> None:
    """Publish, per group, the pages (states: lengths) in `kept`."""
    chain = cache.chain()
    for index, (group, pool) in enumerate(zip(cache.groups, cache.pools, strict=True)):
        for number in sorted(kept.get(index, ())):
            page = pool.allocate()
            end = number if group.kind == "state" else (number + 1) * group.page_size
            pool.cache_block(page, chain.key(IDS, end))
            pool.decref(page)


def usable(cache: PrefixCache, kept: dict[int, set[int]], tokens: int) -> bool:
    """Whether every key that a query at position `tokens` reads is there."""
    for index, group in enumerate(cache.groups):
        if group.kind == "state":
            if tokens not in kept.get(index, ()):
                return False
            continue
        first = 0 if group.window is None else max(0, tokens - group.window + 1)
        needed = {position // group.page_size for position in range(first, tokens)}
        if not needed <= kept.get(index, set()):
            return False
    return True


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), length=st.integers(1, 48))
def test_longest_usable_prefix(mix: str, data: st.DataObject, length: int) -> None:
    cache = make(mix)
    kept = {}
    for index, group in enumerate(cache.groups):
        numbers = range(8, 49, 8) if group.kind == "state" else range(48 // group.page_size)
        dropped = data.draw(st.sets(st.sampled_from(list(numbers)), max_size=3))
        kept[index] = set(numbers) - dropped
    fill(cache, kept)
    match = cache.match(IDS[:length], cache.chain())
    lengths = range(cache.run_length, length, cache.run_length)
    want = max((n for n in lengths if usable(cache, kept, n)), default=0)
    assert match.tokens == want
    for group, pages, state in zip(cache.groups, match.pages, match.states, strict=True):
        if group.kind == "state":
            assert (state > 0) == (want > 0)
            continue
        assert len(pages) == want // group.page_size
        out_of_window = group.out_of_window_pages(want)
        assert all((page < 0) == (j < out_of_window) for j, page in enumerate(pages))


def test_other_tokens_are_not_a_match() -> None:
    cache = make("paged")
    fill(cache, {0: set(range(12))})
    other = [*IDS[:10], 7, *IDS[11:]]
    assert cache.match(other, cache.chain()).tokens == 8
    assert cache.match([7, *IDS[1:]], cache.chain()).tokens == 0


def test_reasons() -> None:
    cache = make("paged window")
    fill(cache, {0: set(range(12)), 1: {0, 1, 2}})
    match = cache.match(IDS, cache.chain())
    assert match.tokens == 12
    assert match.lost == {"window": 32}

    cache = make("paged state")
    fill(cache, {0: set(range(12)), 1: {16}})
    match = cache.match(IDS, cache.chain())
    assert (match.tokens, match.lost, match.checkpoint_position) == (16, {"state checkpoint": 28}, 44)

    cache = make("paged")
    fill(cache, {0: set(range(12))})
    assert cache.match([*IDS[:46]], cache.chain()).lost == {"partial page": 1}
    pool = cache.pools[0]
    for page in [pool.allocate() for _ in range(pool.available)]:
        pool.decref(page)
    assert cache.match(IDS, cache.chain()).lost == {"evicted": 44}
