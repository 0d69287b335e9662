"""The memory plan: the pages of each group that fit into a number of bytes, and the tokens that these serve.

The engine allocates by this plan and `allotrope plan` prints it: there is no second formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from allotrope.attention.cache_layout import pool_bytes
from allotrope.cache.groups import CacheGroup
from allotrope.cache.units import UnitLayout, unit_layout
from allotrope.errors import ConfigError

SHORT_CONTEXT = 2048
"""Tokens of a short sequence, of which as many as possible shall fit into a shared pool at once."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The load that the caches must serve. `reuse`: keep windows and states of ended sequences for prefix reuse."""

    context: int
    sequences: int
    step_tokens: int
    reuse: bool


@dataclass(frozen=True)
class GroupPlan:
    """`pages`: pages (or slots) of the group, its null page included. `bytes`: of all its pools.

    In a shared pool `pages` are the most that the group can have, and `bytes` is 0: the pool has the bytes.
    """

    group: CacheGroup
    pages: int
    bytes: int


@dataclass(frozen=True)
class SharedPlan:
    """A pool that groups share. `units`: number of its units, with the null unit."""

    layout: UnitLayout
    units: int

    @property
    def bytes(self) -> int:
        return self.units * self.layout.bytes


@dataclass(frozen=True)
class MemoryPlan:
    """`tokens`: context tokens that fit at once, over all sequences. `sequences`: whose windows and states do.

    With a `shared` pool, `tokens` fit in sequences as long as the longest, and `sequences` fit with `SHORT_CONTEXT`
    tokens each: either, not both at once.
    """

    groups: tuple[GroupPlan, ...]
    tokens: int
    sequences: int
    shared: SharedPlan | None = None

    @property
    def bytes(self) -> int:
        """Of all pools."""
        return sum(plan.bytes for plan in self.groups) + (self.shared.bytes if self.shared else 0)


def group_bytes(group: CacheGroup, pages: int) -> int:
    """Bytes of all pools of a group with `pages` pages."""
    return sum(pool_bytes(member.layout, group.page_size, pages) for member in group.members)


def pages_needed(group: CacheGroup, tokens: int, sequences: int, demand: Demand) -> int:
    """Pages, with the null page, that `tokens` context tokens in `sequences` sequences need."""
    if group.kind == "paged":
        return 1 + group.pages_for(tokens)
    kept = sequences * (2 if demand.reuse else 1)
    if group.kind == "state":
        return 1 + kept
    assert group.window is not None
    in_flight = group.pages_for(min(demand.step_tokens, sequences * demand.context)) + sequences
    return 1 + min(kept * (group.pages_for(group.window) + 1) + in_flight, group.pages_for(tokens) + sequences)


def plan_memory(groups: Sequence[CacheGroup], demand: Demand, budget: int) -> MemoryPlan:
    """Fit windows and states of as many sequences, then as many tokens, as `budget` bytes hold.

    One sequence of `demand.context` tokens always has room: with little memory, fewer than `demand.sequences` windows
    and states are made. The plan never exceeds a full batch of the longest context. Raises ConfigError if not
    even one such sequence fits, saying what would.

    Groups that share a pool (see `unit_layout`) get all that states leave: any mix of sequences may fill it.
    """
    if (layout := unit_layout(groups)) is not None:
        return _plan_shared(groups, layout, demand, budget)

    def total(tokens: int, sequences: int) -> int:
        return make_plan(groups, demand, tokens, sequences).bytes

    sequences = _most_sequences(total, demand, budget)
    # Every sequence may leave its last page nearly empty.
    reach = [group.pages_for(demand.context) * group.page_size for group in groups if group.kind != "state"]
    longest = max(reach, default=demand.context)
    tokens = _largest(lambda n: total(n, sequences) <= budget, longest * demand.sequences)
    return make_plan(groups, demand, tokens, sequences)


def make_plan(groups: Sequence[CacheGroup], demand: Demand, tokens: int, sequences: int | None = None) -> MemoryPlan:
    """The plan that serves exactly `tokens` context tokens; `sequences`: default, all that are demanded."""
    sequences = demand.sequences if sequences is None else sequences
    if (layout := unit_layout(groups)) is not None:
        units = _units_needed(groups, layout, demand, tokens, sequences)
        return _with_units(groups, layout, demand, units, tokens, sequences)
    return MemoryPlan(tuple(_own_pools(group, demand, tokens, sequences) for group in groups), tokens, sequences)


def _plan_shared(groups: Sequence[CacheGroup], layout: UnitLayout, demand: Demand, budget: int) -> MemoryPlan:
    """As `plan_memory`, for groups of which some share a pool."""
    # The windows of ended sequences have what others leave.
    running = replace(demand, reuse=False)

    def units(tokens: int, sequences: int) -> int:
        return _units_needed(groups, layout, running, tokens, sequences)

    def served(context: int, sequences: int) -> MemoryPlan:
        """The plan for one sequence of `context` tokens, or so many short ones."""
        needed = max(units(context, 1), units(sequences * min(context, SHORT_CONTEXT), sequences))
        return _with_units(groups, layout, demand, needed, context, sequences)

    sequences = _most_sequences(lambda context, n: served(context, n).bytes, demand, budget)
    reach = max(groups[one.group].pages_for(demand.context) * groups[one.group].page_size for one in layout.groups)
    full = _units_needed(groups, layout, demand, reach * demand.sequences, demand.sequences)
    states = sum(plan.bytes for plan in served(demand.context, sequences).groups)
    count = min(full, (budget - states) // layout.bytes)
    tokens = _largest(lambda n: units(n, max(1, -(-n // reach))) <= count, reach * demand.sequences)
    return _with_units(groups, layout, demand, count, tokens, sequences)


def _units_needed(groups: Sequence[CacheGroup], layout: UnitLayout, demand: Demand, tokens: int, sequences: int) -> int:
    """Units, with the null unit, that `tokens` context tokens in `sequences` sequences need."""
    return 1 + sum(one.units(pages_needed(groups[one.group], tokens, sequences, demand) - 1) for one in layout.groups)


def _with_units(
    groups: Sequence[CacheGroup], layout: UnitLayout, demand: Demand, units: int, tokens: int, sequences: int
) -> MemoryPlan:
    """The plan with so many units, and states of so many sequences."""
    shared = {one.group: GroupPlan(groups[one.group], 1 + (units - 1) * one.count, 0) for one in layout.groups}
    plans = [shared.get(i) or _own_pools(group, demand, tokens, sequences) for i, group in enumerate(groups)]
    return MemoryPlan(tuple(plans), tokens, sequences, SharedPlan(layout, units))


def _own_pools(group: CacheGroup, demand: Demand, tokens: int, sequences: int) -> GroupPlan:
    pages = pages_needed(group, tokens, sequences, demand)
    return GroupPlan(group, pages, group_bytes(group, pages))


def _most_sequences(needed: Callable[[int, int], int], demand: Demand, budget: int) -> int:
    """Most sequences that `budget` bytes serve beside one of `demand.context` tokens. `needed`: bytes for a context and
    a number of sequences. Raises ConfigError if not even one sequence fits, saying what would."""
    sequences = _largest(lambda n: needed(demand.context, n) <= budget, demand.sequences)
    if sequences < 1:
        longest = _largest(lambda n: needed(n, 1) <= budget, demand.context)
        raise ConfigError(_advice(demand, budget, needed(demand.context, 1), longest))
    return sequences


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """Largest n in 0..limit with fits(n), which is true up to some point; -1 if not even 0 fits."""
    low, high = -1, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _advice(demand: Demand, budget: int, needed: int, longest: int) -> str:
    text = (
        f"the caches do not fit: one sequence of max_model_len={demand.context} tokens needs {needed} bytes; "
        f"{budget} bytes are given. Try "
    )
    shorter = f"--max-model-len {longest} or " if longest > 0 else ""
    return f"{text}{shorter}--kv-cache-memory-bytes {needed}."
