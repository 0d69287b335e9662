"""Who holds the pages of one group. Pages of ended sequences stay findable by content until their place is needed."""

from __future__ import annotations

import heapq
from collections import OrderedDict

# Keys of pages that were dropped lately, remembered to tell "evicted" from "never seen".
_REMEMBERED = 65536


class PagePool:
    """Reference counts, free pages, and a content index with least-recently-used eviction.

    Page 0 is nobody's. `pages`: number of pages including it.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages - 1
        # The lowest is taken first: pages used before are in memory already, and neighbours are read faster.
        self._free = list(range(1, pages))
        self._refs = [0] * pages
        self._key: list[bytes | None] = [None] * pages
        self._page: dict[bytes, int] = {}
        # Unheld pages with a key, the one to give up next first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._dropped: OrderedDict[bytes, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `take` could return."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages held by sequences."""
        return self.total - self.available

    def take(self) -> int:
        """A page held once, with no key. The caller has checked `available`."""
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, _ = self._idle.popitem(last=False)
            self.forget(page)
        self._refs[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Hold a page once more."""
        if self._refs[page] == 0:
            del self._idle[page]
        self._refs[page] += 1

    def release(self, page: int) -> None:
        """Give up one hold; the last one leaves the page findable if it has a key, else free."""
        self._refs[page] -= 1
        if self._refs[page]:
            return
        if self._key[page] is None:
            heapq.heappush(self._free, page)
        else:
            self._idle[page] = None

    def publish(self, page: int, key: bytes) -> None:
        """Make a held page findable by its content, unless another page already is or it has a key."""
        if self._key[page] is None and key not in self._page:
            self._key[page] = key
            self._page[key] = page

    def find(self, key: bytes) -> int | None:
        """The page with this content, if one is kept."""
        return self._page.get(key)

    def was_dropped(self, key: bytes) -> bool:
        """Whether a page with this content was given up lately."""
        return key in self._dropped

    def forget(self, page: int) -> None:
        """Make a page unfindable; it stays held if it is."""
        key = self._key[page]
        if key is None:
            return
        self._key[page] = None
        del self._page[key]
        self._dropped[key] = None
        if len(self._dropped) > _REMEMBERED:
            self._dropped.popitem(last=False)
        if page in self._idle:
            del self._idle[page]
            heapq.heappush(self._free, page)

    def forget_all(self) -> None:
        """Make every page unfindable."""
        for page in list(self._page.values()):
            self.forget(page)
        self._dropped.clear()
