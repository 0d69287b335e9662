"""The pages of one group and their references. Pages of ended sequences stay cached until their memory is needed."""

from __future__ import annotations

import heapq
from collections import OrderedDict

# Keys of pages that were evicted lately, which tell "evicted" from "never cached".
_REMEMBERED = 65536


class PagePool:
    """Reference counts, free pages, and a content index with least-recently-used eviction.

    Page 0 is the null page. `pages`: number of pages including it.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages - 1
        # The lowest is taken first: pages used before are in memory already, and neighbours are read faster.
        self._free = list(range(1, pages))
        self._refs = [0] * pages
        self._key: list[bytes | None] = [None] * pages
        self._page: dict[bytes, int] = {}
        # Pages with a key and no reference, least recently used first.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `allocate` could return."""
        return len(self._free) + len(self._evictable)

    @property
    def used(self) -> int:
        """Pages that sequences reference."""
        return self.total - self.available

    def allocate(self) -> int:
        """A page with one reference and no key. The caller has checked `available`."""
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, _ = self._evictable.popitem(last=False)
            self.evict(page)
        self._refs[page] = 1
        return page

    def incref(self, page: int) -> None:
        """Add a reference to a page."""
        if self._refs[page] == 0:
            del self._evictable[page]
        self._refs[page] += 1

    def decref(self, page: int) -> None:
        """Drop a reference; the last one leaves the page evictable if it has a key, else free."""
        self._refs[page] -= 1
        if self._refs[page]:
            return
        if self._key[page] is None:
            heapq.heappush(self._free, page)
        else:
            self._evictable[page] = None

    def cache_block(self, page: int, key: bytes) -> None:
        """Give a referenced page the key of its content, unless it has a key or another page has this one."""
        if self._key[page] is None and key not in self._page:
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
        key = self._key[page]
        if key is None:
            return
        self._key[page] = None
        del self._page[key]
        self._evicted[key] = None
        if len(self._evicted) > _REMEMBERED:
            self._evicted.popitem(last=False)
        if page in self._evictable:
            del self._evictable[page]
            heapq.heappush(self._free, page)

    def evict_all(self) -> None:
        """Take the key of every page away, and forget which were evicted."""
        for page in list(self._page.values()):
            self.evict(page)
        self._evicted.clear()
