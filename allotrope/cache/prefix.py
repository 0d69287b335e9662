"""The prefix cache: the part of a prompt that is cached, and the reasons that the rest is not.

A page's key is the hash of all tokens up to its end, so that equal keys mean equal prefixes. A prefix of L tokens can
be reused if, in every group, what a query at position L reads is there: all pages (paged), the pages that reach back
over the window (window), the state after exactly L tokens (state).
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from allotrope.cache.groups import CacheGroup
from allotrope.cache.pages import PageIndex

LostReason = Literal["window", "state checkpoint", "partial page", "evicted"]


class KeyChain:
    """Keys of the growing prefix of one sequence: `key(n)` stands for its first n tokens.

    `step`: tokens between keys. Keys are made as they are asked for, each from the one before.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._keys: list[bytes] = []

    @property
    def keys(self) -> Sequence[bytes]:
        """The keys made so far: those that were asked for, and those on the way to them."""
        return self._keys

    def key(self, ids: Sequence[int], n: int) -> bytes:
        """The key of `ids[:n]`; n is a multiple of `step`, above 0."""
        while len(self._keys) * self.step < n:
            start = len(self._keys) * self.step
            block = array("q", ids[start : start + self.step]).tobytes()
            parent = self._keys[-1] if self._keys else b""
            self._keys.append(hashlib.blake2b(parent + block, digest_size=16).digest())
        return self._keys[n // self.step - 1]


@dataclass(frozen=True)
class Match:
    """`tokens`: length of the reusable prefix. `pages`: per group, its page list (-1 where not needed).

    `states`: per group, the slot with the state to start from, or 0. `lost`: tokens that could have been reused but for
    a reason. `checkpoint_position`: length at which a state checkpoint would have helped, or 0.
    """

    tokens: int
    pages: tuple[tuple[int, ...], ...]
    states: tuple[int, ...]
    lost: dict[LostReason, int] = field(default_factory=dict)
    checkpoint_position: int = 0


class PrefixCache:
    """Finds reusable prefixes over the groups' pools. Holds nothing itself."""

    def __init__(self, groups: Sequence[CacheGroup], pools: Sequence[PageIndex]) -> None:
        self.groups, self.pools = groups, pools
        sizes = [group.page_size for group in groups if group.kind != "state"] or [16]
        # Keys exist at every page end of every group; a prefix is reused only where all groups have one.
        self.step, self.run_length = math.gcd(*sizes), math.lcm(*sizes)

    def chain(self) -> KeyChain:
        """An empty key chain for one sequence."""
        return KeyChain(self.step)

    def is_useful(self, index: int, page: int) -> bool:
        """Whether some reusable length needs page number `page` of group `index`; a window reads few pages."""
        group = self.groups[index]
        end = -(-(page + 1) * group.page_size // self.run_length) * self.run_length
        return page >= group.out_of_window_pages(end)

    def match(self, ids: Sequence[int], chain: KeyChain) -> Match:
        """The longest reusable prefix of `ids` that leaves at least one token to compute."""
        limit = (len(ids) - 1) // self.run_length * self.run_length
        reach = self._paged_reach(ids, chain, limit)
        lost: dict[LostReason, int] = {}
        tokens, checkpoint_position = reach, 0
        while tokens > 0:
            missing = self._missing(ids, chain, tokens)
            if missing is None:
                break
            if missing == "state checkpoint":
                checkpoint_position = max(checkpoint_position, tokens)
            lost[missing] = lost.get(missing, 0) + self.run_length
            tokens -= self.run_length
        if reach < limit and self._evicted_at(ids, chain, reach + self.run_length):
            end = reach
            while end < limit and self._evicted_at(ids, chain, end + self.run_length):
                end += self.run_length
            lost["evicted"] = lost.get("evicted", 0) + end - reach
        elif reach == limit and 0 < tokens == limit and len(ids) - 1 > limit:
            lost["partial page"] = len(ids) - 1 - limit
        return Match(
            tokens, self._pages(ids, chain, tokens), self._states(ids, chain, tokens), lost, checkpoint_position
        )

    def _paged_reach(self, ids: Sequence[int], chain: KeyChain, limit: int) -> int:
        """Longest multiple of `run_length` whose pages every paged group has (or limited by windows alone)."""
        paged = [i for i, group in enumerate(self.groups) if group.kind == "paged"]
        reach = 0
        if not paged:
            ends = range(limit, 0, -self.run_length)
            return next((n for n in ends if self._missing(ids, chain, n) is None), 0)
        while reach < limit and all(self._has_pages(i, ids, chain, reach, reach + self.run_length) for i in paged):
            reach += self.run_length
        return reach

    def _has_pages(self, index: int, ids: Sequence[int], chain: KeyChain, start: int, end: int) -> bool:
        size, pool = self.groups[index].page_size, self.pools[index]
        first = start // size
        return all(pool.find(chain.key(ids, (j + 1) * size)) is not None for j in range(first, end // size))

    def _missing(self, ids: Sequence[int], chain: KeyChain, tokens: int) -> LostReason | None:
        """Why a prefix of `tokens` cannot be resumed, looking at windows and states only."""
        for index, group in enumerate(self.groups):
            if group.kind == "window":
                if not self._has_pages(index, ids, chain, group.out_of_window_pages(tokens) * group.page_size, tokens):
                    return "window"
            elif group.kind == "state" and self.pools[index].find(chain.key(ids, tokens)) is None:
                return "state checkpoint"
        return None

    def _evicted_at(self, ids: Sequence[int], chain: KeyChain, end: int) -> bool:
        key = chain.key(ids, end)
        return any(pool.was_evicted(key) for pool in self.pools)

    def _pages(self, ids: Sequence[int], chain: KeyChain, tokens: int) -> tuple[tuple[int, ...], ...]:
        tables: list[tuple[int, ...]] = []
        for group, pool in zip(self.groups, self.pools, strict=True):
            if group.kind == "state" or not tokens:
                tables.append(())
                continue
            out_of_window = group.out_of_window_pages(tokens)
            cached = [
                pool.find(chain.key(ids, (j + 1) * group.page_size))
                for j in range(out_of_window, tokens // group.page_size)
            ]
            tables.append((*[-1] * out_of_window, *[page for page in cached if page is not None]))
        return tuple(tables)

    def _states(self, ids: Sequence[int], chain: KeyChain, tokens: int) -> tuple[int, ...]:
        return tuple(
            (pool.find(chain.key(ids, tokens)) or 0) if group.kind == "state" and tokens else 0
            for group, pool in zip(self.groups, self.pools, strict=True)
        )
