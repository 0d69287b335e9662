"""The pages of groups that share a pool: each group has units of it, and units go from one group to another.

A unit is *free* if no group has it, *busy* if sequences reference a page of it, else *idle*: then all that it has are
cached pages. Every group can get free and idle units, whoever had them. Pages of a busy unit are its group's alone.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from allotrope.cache.pages import PageIndex
from allotrope.cache.units import UnitLayout, UnitPages


class SharedPool:
    """`pools`: of the groups of `layout`, in their order. `units`: with the null unit, which is unit 0.

    `promise` comes before `allocate` of the pools: it says what all groups get together.
    """

    def __init__(self, layout: UnitLayout, units: int) -> None:
        self.units = units
        # The lowest is taken first, as in `PagePool`.
        self.free = list(range(1, units))
        self.pools = tuple(UnitPool(self, pages) for pages in layout.groups)
        # Whether pages of busy units go first, lest a unit is taken that was promised to another group.
        self.packs = True
        self._time = 0

    @property
    def spare(self) -> int:
        """Units that any group can get."""
        return len(self.free) + sum(len(pool.idle) for pool in self.pools)

    @property
    def total(self) -> int:
        """Units without the null unit."""
        return self.units - 1

    def holds(self, pages: Sequence[int]) -> bool:
        """Whether the pool has room for so many pages of each group, and nothing beside them."""
        return sum(pool.pages.units(count) for pool, count in zip(self.pools, pages, strict=True)) <= self.total

    def promise(self, pages: Sequence[int], *, alone: bool) -> bool:
        """Whether each group can allocate so many pages now. If so, the allocations that follow keep to it.

        `alone`: for the only sequence with pages. It never takes a unit while one of its own has room, so that it needs
        no more units than its pages fill.
        """
        needed = (pool.pages.units(max(0, n - pool.spare)) for pool, n in zip(self.pools, pages, strict=True))
        left = self.spare - sum(needed)
        # A page takes at most one unit more than was counted for it.
        self.packs = alone or left < sum(pages)
        return left >= 0

    def time(self) -> int:
        """A number that grows with every call."""
        self._time += 1
        return self._time

    def free_unit(self) -> None:
        """Evict the cached pages of the unit that is idle for longest."""
        min((pool for pool in self.pools if pool.idle), key=lambda pool: pool.oldest_idle).evict_unit()


@dataclass
class _Unit:
    """A unit of a group. `free`: its free pages, a heap. `referenced`: number of pages with a reference."""

    free: list[int]
    referenced: int = 0


class UnitPool(PageIndex):
    """The pages of one group of a shared pool. `idle`: idle units with the time since when, longest first."""

    def __init__(self, shared: SharedPool, pages: UnitPages) -> None:
        super().__init__()
        self.pages, self._shared = pages, shared
        self.idle: OrderedDict[int, int] = OrderedDict()
        self._units: dict[int, _Unit] = {}
        # Busy units with free pages, and evictable pages of busy units with the time of their last use, longest first.
        self._open: OrderedDict[int, None] = OrderedDict()
        self._evictable: OrderedDict[int, int] = OrderedDict()

    @property
    def spare(self) -> int:
        """Free and evictable pages of busy units."""
        return (len(self._units) - len(self.idle)) * self.pages.count - self.used

    @property
    def available(self) -> int:
        """Pages that `allocate` could return if other groups took none."""
        return self.spare + self._shared.spare * self.pages.count

    @property
    def total(self) -> int:
        """Pages that are used or available: fewer, the more units other groups use."""
        return self.used + self.available

    @property
    def oldest_idle(self) -> int:
        """The time since which the longest idle unit is idle."""
        return next(iter(self.idle.values()))

    def evict_unit(self) -> None:
        """Evict the cached pages of the longest idle unit, which is free then."""
        for page in self._pages(next(iter(self.idle))):
            self.evict(page)

    def _pages(self, unit: int) -> list[int]:
        return self.pages.pages_of(unit, self._shared.units)

    def _unit(self, page: int) -> int:
        return self.pages.unit_of(page, self._shared.units)

    def _choose(self, previous: int) -> int:
        # Pages of a sequence lie in few units, which become idle with it.
        unit = self._unit(previous)
        if unit not in self._open:
            unit = self._unit_to_fill()
        found = self._units[unit]
        page = heapq.heappop(found.free)
        found.referenced += 1
        if found.free:
            self._open[unit] = None
        else:
            self._open.pop(unit, None)
        return page

    def _unit_to_fill(self) -> int:
        """A unit with a free page: a new one while some are free, then a busy one, then by eviction."""
        shared = self._shared
        if not shared.free or (shared.packs and self.spare):
            if not self._open and self.spare and (shared.packs or not shared.spare or self._evicts_page()):
                self.evict(next(iter(self._evictable)))
            if self._open:
                return next(iter(self._open))
            if not shared.free:
                shared.free_unit()
        unit = heapq.heappop(shared.free)
        self._units[unit] = _Unit(self._pages(unit))
        return unit

    def _evicts_page(self) -> bool:
        """Whether a page of a busy unit is evicted before an idle unit: if it was not used for longer."""
        last_use = next(iter(self._evictable.values()))
        return all(last_use < pool.oldest_idle for pool in self._shared.pools if pool.idle)

    def _hold(self, page: int) -> None:
        unit = self._unit(page)
        if self.idle.pop(unit, None) is None:
            del self._evictable[page]
        else:
            # Its other pages are as recently used as this one.
            now = self._shared.time()
            self._evictable |= {one: now for one in reversed(self._pages(unit)) if one in self._key and one != page}
            if self._units[unit].free:
                self._open[unit] = None
        self._units[unit].referenced += 1

    def _release(self, page: int) -> None:
        unit = self._unit(page)
        found = self._units[unit]
        found.referenced -= 1
        if page in self._key:
            self._evictable[page] = self._shared.time()
        else:
            heapq.heappush(found.free, page)
            self._open[unit] = None
        if not found.referenced:
            for one in self._pages(unit):
                self._evictable.pop(one, None)
            self._open.pop(unit, None)
            self.idle[unit] = self._shared.time()
            self._leave_if_empty(unit)

    def _free_evicted(self, page: int) -> None:
        unit = self._unit(page)
        heapq.heappush(self._units[unit].free, page)
        if unit in self.idle:
            self._leave_if_empty(unit)
        else:
            del self._evictable[page]
            self._open[unit] = None

    def _leave_if_empty(self, unit: int) -> None:
        """Give an idle unit back once it has no cached page."""
        if len(self._units[unit].free) == self.pages.count:
            del self.idle[unit], self._units[unit]
            heapq.heappush(self._shared.free, unit)
