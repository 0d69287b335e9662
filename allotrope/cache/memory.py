"""The memory plan: how many pages of each group fit into a number of bytes, and how many tokens that serves.

The engine allocates by this plan and `allotrope plan` prints it: there is no second formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allotrope.attention.cache_layout import pool_bytes
from allotrope.cache.groups import CacheGroup
from allotrope.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The load that the caches must serve. `reuse`: keep windows and states of ended sequences for prefix reuse."""

    context: int
    sequences: int
    step_tokens: int
    reuse: bool


@dataclass(frozen=True)
class GroupPlan:
    """`pages`: pages (or slots) of the group, its null page included. `bytes`: of all its pools."""

    group: CacheGroup
    pages: int
    bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """`tokens`: context tokens that fit at once, over all sequences. `sequences`: whose windows and states do."""

    groups: tuple[GroupPlan, ...]
    tokens: int
    sequences: int

    @property
    def bytes(self) -> int:
        return sum(plan.bytes for plan in self.groups)


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
    and states are made. Never more is taken than a full batch of the longest context needs. Raises ConfigError if not
    even one such sequence fits, saying what would.
    """

    def total(tokens: int, sequences: int) -> int:
        return make_plan(groups, demand, tokens, sequences).bytes

    sequences = _largest(lambda n: total(demand.context, n) <= budget, demand.sequences)
    if sequences < 1:
        longest = _largest(lambda n: total(n, 1) <= budget, demand.context)
        raise ConfigError(_advice(demand, budget, total(demand.context, 1), longest))
    # Every sequence may leave its last page nearly empty.
    reach = [group.pages_for(demand.context) * group.page_size for group in groups if group.kind != "state"]
    longest = max(reach, default=demand.context)
    tokens = _largest(lambda n: total(n, sequences) <= budget, longest * demand.sequences)
    return make_plan(groups, demand, tokens, sequences)


def make_plan(groups: Sequence[CacheGroup], demand: Demand, tokens: int, sequences: int | None = None) -> MemoryPlan:
    """The plan that serves exactly `tokens` context tokens; `sequences`: default, all that are demanded."""
    sequences = demand.sequences if sequences is None else sequences
    plans = []
    for group in groups:
        pages = pages_needed(group, tokens, sequences, demand)
        plans.append(GroupPlan(group, pages, group_bytes(group, pages)))
    return MemoryPlan(tuple(plans), tokens, sequences)


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
