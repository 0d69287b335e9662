"""Page pools under random use, against a plain model of what must hold."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from allotrope.cache.pages import PagePool

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "hold", "release", "publish", "find", "forget"]), st.integers(0, 9))
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
        if action == "take" and pool.available:
            taken = pool.take()
            assert taken != 0, "page 0 is nobody's"
            assert not held[taken], "a page that is held was given out again"
            held[taken] += 1
            named = {k: p for k, p in named.items() if p != taken}
        elif action == "hold" and page is not None:
            pool.hold(page)
            held[page] += 1
        elif action == "release" and page is not None:
            pool.release(page)
            held[page] -= 1
            held += Counter()
        elif action == "publish" and page is not None:
            pool.publish(page, key)
            if key not in named and page not in named.values():
                named[key] = page
        elif action == "find":
            assert pool.find(key) == named.get(key)
        elif action == "forget" and page is not None:
            pool.forget(page)
            named = {k: p for k, p in named.items() if p != page}
        assert pool.used == len(held)
        assert pool.used + pool.available == pool.total == pages - 1
    for page, count in held.items():
        for _ in range(count):
            pool.release(page)
    assert pool.used == 0


def test_least_recently_released_goes_first() -> None:
    pool = PagePool(4)
    pages = [pool.take() for _ in range(3)]
    for page in pages:
        pool.publish(page, bytes([page]))
    for page in (pages[1], pages[0], pages[2]):
        pool.release(page)
    found = pool.find(bytes([pages[1]]))
    assert found == pages[1]
    pool.hold(found)
    pool.release(found)
    assert [pool.take() for _ in range(3)] == [pages[0], pages[2], pages[1]]
    assert pool.was_dropped(bytes([pages[0]]))


def test_forgetting_everything_frees_idle_pages() -> None:
    pool = PagePool(3)
    first, second = pool.take(), pool.take()
    pool.publish(first, b"a")
    pool.publish(second, b"b")
    pool.release(first)
    pool.forget_all()
    assert pool.find(b"a") is None and pool.find(b"b") is None
    assert (pool.used, pool.available) == (1, 1)
    assert not pool.was_dropped(b"a")
