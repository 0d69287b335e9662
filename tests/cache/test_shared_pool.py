"""A pool that groups share: its bytes, the promises that it makes under random use, and what is evicted for whom."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest
import torch

from allotrope.attention.cache_layout import CacheLayout, Field, PagedRows, StateSlots, WindowRows
from allotrope.cache.arena import Arena
from allotrope.cache.groups import CacheGroup, group_caches
from allotrope.cache.memory import Demand, make_plan
from allotrope.cache.shared_pool import SharedPool, UnitPool
from allotrope.cache.units import UnitLayout, UnitPages, unit_layout

PAGE = 16


def heads(number: int, size: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Field, ...]:
    return (Field("k", (number, size), dtype), Field("v", (number, size), dtype))


def layout_of(*layers: tuple[int, CacheLayout], page_size: int = PAGE) -> UnitLayout | None:
    return unit_layout(group_caches([{"kv": one} for number, one in layers for _ in range(number)], page_size))


def pool_of(units: int, *counts: int) -> SharedPool:
    """Groups of which a unit holds so many pages. The first is as those of windows."""
    of_groups = tuple(UnitPages(i, 1, n) if i % 2 else UnitPages(i, n, 1) for i, n in enumerate(counts))
    return SharedPool(UnitLayout(64, 1, of_groups), 1 + units)


def take(shared: SharedPool, index: int, pages: int = 1, previous: int = 0) -> list[int]:
    assert shared.promise([pages * (i == index) for i in range(len(shared.pools))], alone=False)
    found = []
    for _ in range(pages):
        previous = shared.pools[index].allocate(previous)
        found.append(previous)
    return found


def cache(pool: UnitPool, pages: list[int], name: str) -> list[bytes]:
    """Cache pages and drop their references, the last page first."""
    keys = [f"{name}{i}".encode() for i in range(len(pages))]
    for page, key in zip(pages, keys, strict=True):
        pool.cache_block(page, key)
    for page in reversed(pages):
        pool.decref(page)
    return keys


def test_units_of_released_sizes() -> None:
    gemma = layout_of((50, WindowRows(heads(16, 256), 1024)), (10, PagedRows(heads(4, 512))))
    assert gemma is not None and gemma.bytes == 12800 * 1024
    assert [(one.chunks, one.chunk_pages) for one in gemma.groups] == [(1, 1), (5, 2)]
    gpt_oss = layout_of((18, WindowRows(heads(8, 64), 128)), (18, PagedRows(heads(8, 64))))
    assert gpt_oss is not None and gpt_oss.bytes == 576 * 1024
    assert [(one.chunks, one.chunk_pages) for one in gpt_oss.groups] == [(1, 1), (1, 1)]


def test_a_unit_wastes_little() -> None:
    found = layout_of((52, WindowRows(heads(16, 128), 1024)), (10, PagedRows(heads(16, 128))))
    assert found is not None
    for one, layers in zip(found.groups, (52, 10), strict=True):
        assert one.chunk_pages == 1 and found.chunks - one.chunks * 2 * layers <= found.chunks * 0.03


@pytest.mark.parametrize(
    "layers",
    [
        [(1, PagedRows(heads(2, 64)))],
        [(1, PagedRows(heads(2, 64))), (1, PagedRows(heads(2, 64), stride=128))],
        [(1, WindowRows(heads(2, 64), 128)), (1, StateSlots(heads(2, 64)))],
        [(1, WindowRows(heads(2, 64), 128)), (1, PagedRows((*heads(2, 64), Field("scale", (128,), torch.int8))))],
        [(1, WindowRows(heads(2, 64), 128)), (1, PagedRows(heads(2, 64))), (1, PagedRows(heads(4, 64)))],
        [(1, WindowRows(heads(1, 1), 128)), (1, PagedRows(heads(1, 1)))],
    ],
    ids=["one group", "no window", "a state", "fields that differ", "members that differ", "unaligned pages"],
)  # fmt: skip
def test_groups_that_keep_pools_of_their_own(layers: list[tuple[int, CacheLayout]]) -> None:
    assert layout_of(*layers, page_size=4 if layers[0][1] == WindowRows(heads(1, 1), 128) else PAGE) is None


def test_stages_of_a_pipeline_keep_pools_of_their_own() -> None:
    groups = group_caches([{"kv": WindowRows(heads(2, 64), 128)}, {"kv": PagedRows(heads(2, 64))}] * 2, PAGE)
    assert unit_layout(groups) is not None
    assert unit_layout([group.of_layers(range(2)) for group in groups]) is None


def groups_of_three() -> tuple[CacheGroup, ...]:
    """Groups of 3, 1 and 2 layers with rows of three sizes, and states."""
    layers: list[dict[str, CacheLayout]] = [{"kv": WindowRows(heads(3, 64), 40)}] * 3
    layers += [{"kv": PagedRows(heads(2, 64))}, *[{"kv": WindowRows(heads(1, 64), 20)}] * 2]
    return group_caches([*layers, {"s": StateSlots((Field("s", (3,), torch.float32),))}], PAGE)


def test_pages_of_no_two_fields_overlap_in_owned_units() -> None:
    groups, demand = groups_of_three(), Demand(context=64, sequences=3, step_tokens=32, reuse=False)
    plan = make_plan(groups, demand, 192)
    assert plan.shared is not None
    arena = Arena(plan, 7, {}, torch.device("cpu"))
    assert arena.bytes == plan.bytes == plan.shared.bytes + plan.groups[3].bytes
    shared = SharedPool(plan.shared.layout, plan.shared.units)
    chance, written, numbers = random.Random(1), [], count(1)
    while True:
        index = chance.randrange(3)
        if not shared.promise([int(i == index) for i in range(3)], alone=False):
            break
        page = shared.pools[index].allocate()
        for member in groups[index].members:
            for view in arena.layers[member.layer][member.name].values():
                # Both bytes of a number, though bfloat16 has no 16 bits for integers.
                written.append((view.view(torch.int16), page, next(numbers)))
                written[-1][0][page] = written[-1][2]
    assert len(written) > 100
    for view, page, number in written:
        assert (view[page] == number).all()
    for layer in range(6):
        for view in arena.layers[layer]["kv"].values():
            assert not view[0].any(), "the null page was written"
            assert view.is_contiguous() and view.storage_offset() * view.itemsize % 64 == 0


class Model:
    """Who holds pages, and what each unit holds, without any order."""

    def __init__(self, shared: SharedPool) -> None:
        self.shared, self.held = shared, [Counter[int]() for _ in shared.pools]

    def cached(self, index: int) -> set[int]:
        return set(self.shared.pools[index]._key)

    def busy(self, index: int) -> set[int]:
        return {self.shared.pools[index]._unit(page) for page in self.held[index]}

    def can(self, wanted: list[int]) -> bool:
        spare = [pool.pages.count * len(self.busy(i)) - len(self.held[i]) for i, pool in enumerate(self.shared.pools)]
        others = self.shared.total - sum(len(self.busy(i)) for i in range(len(wanted)))
        pools = self.shared.pools
        return sum(-(-max(0, n - spare[i]) // pools[i].pages.count) for i, n in enumerate(wanted)) <= others

    def check(self) -> None:
        owners: dict[int, int] = {}
        for index, pool in enumerate(self.shared.pools):
            assert pool.used == len(self.held[index])
            for page in {*self.held[index], *self.cached(index)}:
                unit = pool._unit(page)
                assert 0 < unit <= self.shared.total and page in pool._pages(unit)
                assert owners.setdefault(unit, index) == index, "two groups have pages of a unit"
            most = pool.pages.count * self.shared.total
            assert pool.available == max(
                n for n in range(most + 1) if self.can([n * (i == index) for i in range(len(self.held))])
            )
        free = self.shared.free
        assert len(free) == len(set(free)) and set(free).isdisjoint(owners)
        assert len(free) + len(owners) == self.shared.total


@pytest.mark.parametrize("counts", [(1, 3), (1, 10), (2, 1), (1, 1), (4, 3, 1)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_promises_are_kept_under_random_use(counts: tuple[int, ...], seed: int) -> None:
    chance, names = random.Random(seed), count()
    shared = pool_of(chance.randint(2, 9), *counts)
    model, kept = Model(shared), 0
    for _ in range(400):
        action = chance.choice(["reserve", "reserve", "cache", "release", "release", "hit", "evict", "end"])
        index = chance.randrange(len(counts))
        pool, held = shared.pools[index], model.held[index]
        if action == "reserve":
            wanted = [chance.randint(0, chance.choice([1, n, 3 * n])) for n in counts]
            promised = shared.promise(wanted, alone=chance.random() < 0.2)
            assert promised == model.can(wanted)
            if promised:
                kept += 1
                order = [i for i, n in enumerate(wanted) for _ in range(n)]
                chance.shuffle(order)
                for i in order:
                    previous = chance.choice([0, *sorted(model.held[i])])
                    page = shared.pools[i].allocate(previous)
                    assert page not in model.held[i] and page not in model.cached(i)
                    model.held[i][page] = 1
        elif action == "cache" and held:
            pool.cache_block(chance.choice(sorted(held)), str(next(names)).encode())
        elif action == "release" and held:
            page = chance.choice(sorted(held))
            pool.decref(page)
            held[page] -= 1
            held += Counter()
        elif action == "hit" and model.cached(index):
            page = chance.choice(sorted(model.cached(index)))
            pool.incref(page)
            held[page] += 1
        elif action == "evict" and model.cached(index):
            pool.evict(chance.choice(sorted(model.cached(index))))
        elif action == "end" and chance.random() < 0.2:
            for i, pages in enumerate(model.held):
                for page in pages.elements():
                    shared.pools[i].decref(page)
                pages.clear()
        model.check()
    assert kept > 20
    for i, pages in enumerate(model.held):
        for page in pages.elements():
            shared.pools[i].decref(page)
    assert shared.spare == shared.total
    shared.pools[0].evict_all()
    for pool in shared.pools:
        pool.evict_all()
    assert sorted(shared.free) == list(range(1, shared.total + 1))


def test_idle_units_move_to_the_group_that_needs_them() -> None:
    shared = pool_of(4, 1, 3)
    window, paged = shared.pools
    old = cache(window, take(shared, 0, 4), "window")
    assert (window.used, paged.used, shared.free) == (0, 0, [])
    pages = take(shared, 1, 4)
    # The last page of a sequence is released first, and was used least recently.
    assert [window.find(key) is not None for key in old] == [True, True, False, False]
    keys = cache(paged, pages, "paged")
    assert [paged.available, window.available] == [12, 4]
    take(shared, 0, 3)
    assert [window.find(key) is not None for key in old] == [False, False, False, False]
    # The unit of the last page was idle first.
    assert [paged.find(key) is not None for key in keys] == [True, True, True, False]
    assert (window.total, paged.total) == (4, 3)
    assert window.was_evicted(old[0]) and paged.was_evicted(keys[3])


def test_a_page_goes_before_an_idle_unit_only_if_it_was_used_before() -> None:
    shared = pool_of(2, 1, 2)
    window, paged = shared.pools
    first, second = take(shared, 1, 2)
    (page_key,) = cache(paged, [second], "paged")
    (unit_key,) = cache(window, take(shared, 0), "window")
    assert not shared.free and shared.promise([0, 1], alone=True)
    shared.packs = False
    assert paged.allocate(first) == second, "the page was used before the unit"
    assert window.find(unit_key) is not None and paged.find(page_key) is None
    (later_key,) = cache(paged, [second], "later")
    shared.packs = False
    paged.allocate(first)
    assert paged.find(later_key) is not None and window.find(unit_key) is None, "now the unit was"


def test_what_others_were_promised_is_not_taken() -> None:
    shared = pool_of(2, 1, 2)
    window, paged = shared.pools
    first, second = take(shared, 1, 2)
    cache(window, take(shared, 0), "window")
    cache(paged, [second], "paged")
    assert shared.promise([1, 1], alone=False), "the window's idle unit, and the page beside the first"
    assert paged.allocate(first) == second
    window.allocate()
    assert not shared.promise([1, 0], alone=False) and not shared.promise([0, 1], alone=False)


def test_sequences_have_units_of_their_own_while_some_are_free() -> None:
    shared = pool_of(20, 1, 3)
    tables: list[list[int]] = [[], []]
    for _ in range(6):
        for pages in tables:
            pages += take(shared, 1, 1, pages[-1] if pages else 0)
    units = [{shared.pools[1]._unit(page) for page in pages} for pages in tables]
    assert [len(one) for one in units] == [2, 2] and units[0].isdisjoint(units[1])


@pytest.mark.parametrize("counts", [(1, 3), (4, 1), (3, 5)], ids=str)
def test_one_sequence_alone_needs_no_more_units_than_its_pages_fill(counts: tuple[int, int]) -> None:
    """Its window moves on through pages that it caches; units are as many as both lists fill at their longest."""
    window, length, names = 7, 40, count()
    shared = pool_of(-(-window // counts[0]) + -(-length // counts[1]), *counts)
    assert shared.holds([window, length]) and not shared.holds([window + counts[0], length])
    for _ in range(3):
        recent: list[int] = []
        everything: list[int] = []
        for step in range(length):
            assert shared.promise([1, 1], alone=True), step
            recent.append(shared.pools[0].allocate(recent[-1] if recent else 0))
            everything.append(shared.pools[1].allocate(everything[-1] if everything else 0))
            shared.pools[0].cache_block(recent[-1], str(next(names)).encode())
            if len(recent) == window:
                shared.pools[0].decref(recent.pop(0))
        for pool, pages in zip(shared.pools, (recent, everything), strict=True):
            for page in pages:
                pool.decref(page)
