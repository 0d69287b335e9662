"""Which caches of a model are one cache to vLLM: those with one lifetime lie side by side. Imports nothing of vLLM.

vLLM gives each kind of cache several block tables where a model has more caches of that kind than of another, and its
scheduler and runner do the work of a step once for each of them. Rows of several layers beside each other are one row
to it, and have one number in their pool as before; so are states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from allotrope.attention.cache_layout import CacheLayout, Field, PagedRows, StateSlots, row_bytes
from allotrope.cache.groups import Member
from allotrope.plugins.vllm.translate import common_page, one_table, page_tokens

# Most bytes that a kernel loads at once: rows of as many times that size begin at a multiple of it.
_ALIGNMENT = 16
# Kernels read so many rows of a page, or a multiple, at once.
_ROWS = 16
# vLLM fills the kinds of caches up to the one with the most pools, where that has less than so many times the fewest.
_FILLED = 1.5
# So many times the fewest pools any kind may have where caches lie side by side: what is filled up is waste.
_SPREAD = 1.25
# Prefixes are shared in runs of so many tokens, or longer ones where that is so in any case.
_MAX_SHARED_RUN = 512
# Bytes of the first pages of a request may be so many times as many.
_MAX_GROWTH = 2


@dataclass(frozen=True)
class Pool:
    """To vLLM one cache of one layer. `size`: bytes of a row or state of all `members`, more where some are missing."""

    members: tuple[Member, ...]
    size: int

    @property
    def layout(self) -> CacheLayout:
        """Fields of a member have its number before their name, where there are several."""
        first, end = self.members[0].layout, 0
        if len(self.members) == 1 and self.size == row_bytes(first):
            return first
        fields: list[Field] = []
        for number, (member, start) in enumerate(zip(self.members, _starts(self.members), strict=False)):
            if start > end:
                fields.append(Field(f"{number}/", (start - end,), torch.uint8))
            own = member.layout.fields
            fields += [dataclasses.replace(field, name=f"{number}/{field.name}") for field in own]
            end = start + row_bytes(member.layout)
        if self.size > end:
            fields.append(Field("/", (self.size - end,), torch.uint8))
        return dataclasses.replace(first, fields=tuple(fields))

    def views_of(self, number: int, views: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of the fields of `layout`, those of a member under their own names."""
        if self.layout is self.members[0].layout:
            return views
        return {field.name: views[f"{number}/{field.name}"] for field in self.members[number].layout.fields}


def pools_of(members: Sequence[Member], block_size: int, shares_prefixes: bool) -> list[Pool]:
    """All caches of a model, in as few groups of vLLM's as `_MAX_SHARED_RUN` and `_MAX_GROWTH` allow: what lies side
    by side has longer pages. States of prefixes are kept in steps of vLLM's own, which are those of one state."""
    alone = [_pool([member]) for member in members]
    layouts = [member.layout for member in members]
    with_prefixes = shares_prefixes and any(isinstance(layout, StateSlots) for layout in layouts)
    if with_prefixes or one_table(layouts) or len({_lifetime(layout) for layout in layouts}) == 1:
        return alone
    of_layers = _by_layer(members)
    base = best = _Cost.of(alone, block_size)
    chosen = alone
    for found in (of_layers, _by_lifetime(alone, block_size), _by_lifetime(of_layers, block_size)):
        cost = _Cost.of(found, block_size)
        short = not shares_prefixes or cost.run <= max(base.run, _MAX_SHARED_RUN)
        fits = cost.odd <= base.odd and cost.first_bytes <= _MAX_GROWTH * base.first_bytes
        if short and fits and cost.groups < best.groups:
            chosen, best = found, cost
    return chosen


@dataclass(frozen=True)
class _Cost:
    """`groups`: block tables that vLLM keeps. `run`: tokens in which prefixes are shared. `first_bytes`: of the first
    page of a request in all groups. `odd`: kinds of rows of which a page has no multiple of `_ROWS`."""

    groups: int
    run: int
    first_bytes: int
    odd: int

    @staticmethod
    def of(pools: Sequence[Pool], block_size: int) -> _Cost:
        counts: dict[tuple[CacheLayout, int], int] = {}
        layouts = [pool.layout for pool in pools]
        for layout in layouts:
            # To vLLM caches of one lifetime and size are alike.
            kind = _lifetime(layout), row_bytes(layout)
            counts[kind] = counts.get(kind, 0) + 1
        page = common_page(layouts, block_size)
        rows = {layout for layout in layouts if not isinstance(layout, StateSlots)}
        run = math.lcm(*(page_tokens(layout, page) for layout in rows))
        odd = {row_bytes(layout) for layout in rows if page // row_bytes(layout) % _ROWS}
        # Of each kind, vLLM makes groups of as many as there are of the fewest; or of the most, if that is hardly more.
        few, most = min(counts.values()), max(counts.values())
        size = most if most < _FILLED * few else few
        groups = sum(-(-count // size) for count in counts.values())
        return _Cost(groups, run, groups * size * page, len(odd))


def _lifetime(layout: CacheLayout) -> CacheLayout:
    return dataclasses.replace(layout, fields=())


def _starts(members: Sequence[Member]) -> list[int]:
    """Where each member begins in a row of all, and where the next row begins."""
    sizes = [row_bytes(member.layout) for member in members]
    alignments = [math.gcd(_ALIGNMENT, size) for size in sizes]
    starts = [0]
    for size, alignment in zip(sizes, [*alignments[1:], max(alignments)], strict=True):
        starts.append(-(-(starts[-1] + size) // alignment) * alignment)
    return starts


def _pool(members: Sequence[Member], size: int = 0) -> Pool:
    return Pool(tuple(members), max(_starts(members)[-1], size))


def _by_layer(members: Sequence[Member]) -> list[Pool]:
    """Caches of one layer and lifetime side by side."""
    found: dict[tuple[int, CacheLayout], list[Member]] = {}
    for member in members:
        found.setdefault((member.layer, _lifetime(member.layout)), []).append(member)
    return [_pool(one) for one in found.values()]


def _by_lifetime(pools: Sequence[Pool], block_size: int) -> list[Pool]:
    """Caches of several layers side by side, so that there are about equally many pools of each kind.

    vLLM then makes one group of each kind, all of as many pools as the kind with the most of them. States are padded so
    that pages of their size hold whole blocks of what is kept.
    """
    kinds: dict[tuple[CacheLayout, int], list[Pool]] = {}
    for pool in pools:
        kinds.setdefault((_lifetime(pool.members[0].layout), pool.size), []).append(pool)
    counts = [len(kind) for kind in kinds.values()]
    # Of as many pools as possible: rows stay short.
    cuts = ([_cut(count, most) for count in counts] for most in range(max(counts), 0, -1))
    wide = max(next(cut for cut in cuts if max(cut) <= _SPREAD * min(cut)))
    layouts = [pool.layout for pool in pools]
    kept = [layout for layout in layouts if isinstance(layout, PagedRows)]
    rows = [row_bytes(layout) for layout in layouts if not isinstance(layout, StateSlots)]
    unit = math.lcm(*rows, *(-(-block_size // layout.stride) * row_bytes(layout) for layout in kept))
    found = []
    for kind in kinds.values():
        each = -(-len(kind) // _cut(len(kind), wide))
        groups = [kind[at : at + each] for at in range(0, len(kind), each)]
        joined = [[member for pool in group for member in pool.members] for group in groups]
        size = max(_pool(group).size for group in joined)
        if each > 1 and isinstance(kind[0].layout, StateSlots):
            size = -(-size // unit) * unit
        found += [_pool(group, size) for group in joined]
    return found


def _cut(count: int, most: int) -> int:
    """Pools that `count` layers become, at most `most`, with equally many side by side in each."""
    return -(-count // -(-count // most))
