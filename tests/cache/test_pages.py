"""Page pools under random use, against a plain model of what must hold."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from allotrope.cache.pages import PagePool

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "incref", "decref", "cache_block", "find", "evict"]), st.integers(0, 9))
)


@settings(max_examples=200, deadline=None)
@given(actions=ACTIONS, pages=st.integers(2, 7))
def test_random_use(actions: list[tuple[str, int]], pages: int) -> None:
    pool = PagePool(pages)
    held: Counter[int] = Counter()
    named: dict[bytes, int] = {}
    for action, number in actions:
        key = bytes([number])
        mine = sorted(held)
        page = mine[number % len(mine)] if mine else None
        if action == "allocate" and pool.available:
            taken = pool.allocate()
            assert taken != 0, "page 0 is nobody's"
            assert not held[taken], "a page that is held was given out again"
            held[taken] += 1
            named = {k: p for k, p in named.items() if p != taken}
        elif action == "incref" and page is not None:
            pool.incref(page)
            held[page] += 1
        elif action == "decref" and page is not None:
            pool.decref(page)
            held[page] -= 1
            held += Counter()
        elif action == "cache_block" and page is not None:
            pool.cache_block(page, key)
            if key not in named and page not in named.values():
                named[key] = page
        elif action == "find":
            assert pool.find(key) == named.get(key)
        elif action == "evict" and page is not None:
            pool.evict(page)
            named = {k: p for k, p in named.items() if p != page}
        assert pool.used == len(held)
        assert pool.used + pool.available == pool.total == pages - 1
    for page, count in held.items():
        for _ in range(count):
            pool.decref(page)
    assert pool.used == 0


def test_least_recently_released_goes_first() -> None:
    pool = PagePool(4)
    pages = [pool.allocate() for _ in range(3)]
    for page in pages:
        pool.cache_block(page, bytes([page]))
    for page in (pages[1], pages[0], pages[2]):
        pool.decref(page)
    found = pool.find(bytes([pages[1]]))
    assert found == pages[1]
    pool.incref(found)
    pool.decref(found)
    assert [pool.allocate() for _ in range(3)] == [pages[0], pages[2], pages[1]]
    assert pool.was_evicted(bytes([pages[0]]))


def test_forgetting_everything_frees_idle_pages() -> None:
    pool = PagePool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.cache_block(first, b"a")
    pool.cache_block(second, b"b")
    pool.decref(first)
    pool.evict_all()
    assert pool.find(b"a") is None and pool.find(b"b") is None
    assert (pool.used, pool.available) == (1, 1)
    assert not pool.was_evicted(b"a")
