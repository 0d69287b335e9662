"""The pages of one group and their references. Pages of ended sequences stay cached until their memory is needed."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict

# Keys of pages that were evicted lately, which tell "evicted" from "never cached".
_REMEMBERED = 65536


class PageIndex(ABC):
    """Reference counts of pages, and a content index of those that are cached. Page 0 is the null page.

    A page without reference is *evictable* if it has a key, else *free*. Subclasses know where these are.
    """

    def __init__(self) -> None:
        # Of pages with a reference, and of pages with a key.
        self._refs: dict[int, int] = {}
        self._key: dict[int, bytes] = {}
        self._page: dict[bytes, int] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    @property
    @abstractmethod
    def total(self) -> int:
        """Pages that are used or available."""

    @property
    @abstractmethod
    def available(self) -> int:
        """Pages that `allocate` could return."""

    @property
    def used(self) -> int:
        """Pages that sequences reference."""
        return len(self._refs)

    def allocate(self, previous: int = 0) -> int:
        """A page with one reference and no key. The caller has checked `available`.

        `previous`: the page before it in its sequence, or 0.
        """
        page = self._choose(previous)
        self._refs[page] = 1
        return page

    def incref(self, page: int) -> None:
        """Add a reference to a page."""
        if page not in self._refs:
            self._hold(page)
        self._refs[page] = self._refs.get(page, 0) + 1

    def decref(self, page: int) -> None:
        """Drop a reference; the last one leaves the page evictable if it has a key, else free."""
        self._refs[page] -= 1
        if not self._refs[page]:
            del self._refs[page]
            self._release(page)

    def cache_block(self, page: int, key: bytes) -> None:
        """Give a referenced page the key of its content, unless it has a key or another page has this one."""
        if page not in self._key and key not in self._page:
            self._key[page] = key
            self._page[key] = page

    def find(self, key: bytes) -> int | None:
        """The page with this key, if one is cached."""
        return self._page.get(key)

    def was_evicted(self, key: bytes) -> bool:
        """Whether a page with this key was evicted lately."""
        return key in self._evicted

    def evict(self, page: int) -> None:
        """Take a page's key away; its references stay."""
        key = self._key.pop(page, None)
        if key is None:
            return
        del self._page[key]
        self._evicted[key] = None
        if len(self._evicted) > _REMEMBERED:
            self._evicted.popitem(last=False)
        if page not in self._refs:
            self._free_evicted(page)

    def evict_all(self) -> None:
        """Take the key of every page away, and forget which were evicted."""
        for page in list(self._page.values()):
            self.evict(page)
        self._evicted.clear()

    @abstractmethod
    def _choose(self, previous: int) -> int:
        """Take a free page, after an eviction where there is none."""

    @abstractmethod
    def _hold(self, page: int) -> None:
        """An evictable page gets its first reference."""

    @abstractmethod
    def _release(self, page: int) -> None:
        """A page has lost its last reference."""

    @abstractmethod
    def _free_evicted(self, page: int) -> None:
        """An evictable page has lost its key."""


class PagePool(PageIndex):
    """A pool that one group has for itself, with least-recently-used eviction. `pages`: with the null page."""

    def __init__(self, pages: int) -> None:
        super().__init__()
        self._total = pages - 1
        # The lowest is allocated first: pages used before are in memory already, and neighbours are read faster.
        self._free = list(range(1, pages))
        # Least recently used first.
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def total(self) -> int:
        """All pages but the null page."""
        return self._total

    @property
    def available(self) -> int:
        """Free and evictable pages."""
        return len(self._free) + len(self._evictable)

    def _choose(self, previous: int) -> int:
        if not self._free:
            self.evict(next(iter(self._evictable)))
        return heapq.heappop(self._free)

    def _hold(self, page: int) -> None:
        del self._evictable[page]

    def _release(self, page: int) -> None:
        if page in self._key:
            self._evictable[page] = None
        else:
            heapq.heappush(self._free, page)

    def _free_evicted(self, page: int) -> None:
        del self._evictable[page]
        heapq.heappush(self._free, page)
