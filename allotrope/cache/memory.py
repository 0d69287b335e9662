"""The memory plan: how many pages of each group fit into a number of bytes, and how many tokens that serves.

The engine allocates by this plan and `allotrope plan` prints it: there is no second formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allotrope.attention.cache_layout import pool_bytes
from allotrope.cache.groups import CacheGroup
from allotrope.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What the caches must serve. `reuse`: keep windows and states of ended sequences for prefix reuse."""

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
    """`tokens`: context tokens that fit at once, over all sequences; 0 if only states and windows are kept."""

    groups: tuple[GroupPlan, ...]
    tokens: int

    @property
    def bytes(self) -> int:
        return sum(plan.bytes for plan in self.groups)


def group_bytes(group: CacheGroup, pages: int) -> int:
    """Bytes of all pools of a group with `pages` pages."""
    return sum(pool_bytes(member.layout, group.page_size, pages) for member in group.members)


def pages_needed(group: CacheGroup, tokens: int, demand: Demand) -> int:
    """Pages, with the null page, that `tokens` context tokens in `demand.sequences` sequences need."""
    if group.kind == "paged":
        # Each sequence's last page is filled half on average; the rest is at most one page a sequence.
        return 1 + group.pages_for(tokens)
    if group.kind == "state":
        return 1 + demand.sequences * (2 if demand.reuse else 1)
    assert group.window is not None
    steady = demand.sequences * (group.pages_for(group.window) + 1) * (2 if demand.reuse else 1)
    in_flight = group.pages_for(demand.step_tokens) + demand.sequences
    return 1 + min(steady + in_flight, group.pages_for(tokens) + demand.sequences)


def plan_memory(groups: Sequence[CacheGroup], demand: Demand, budget: int) -> MemoryPlan:
    """Fit the most tokens into `budget` bytes, but no more than a full batch of the longest context needs.

    Raises ConfigError if one sequence of `demand.context` tokens does not fit, saying what would.
    """
    most = demand.context * demand.sequences
    tokens = _largest(lambda n: _total(groups, n, demand) <= budget, most)
    if tokens < demand.context:
        raise ConfigError(_advice(groups, demand, budget, tokens))
    return make_plan(groups, demand, tokens)


def make_plan(groups: Sequence[CacheGroup], demand: Demand, tokens: int) -> MemoryPlan:
    """The plan that serves exactly `tokens` context tokens."""
    plans = []
    for group in groups:
        pages = pages_needed(group, tokens, demand)
        plans.append(GroupPlan(group, pages, group_bytes(group, pages)))
    return MemoryPlan(tuple(plans), tokens)


def _total(groups: Sequence[CacheGroup], tokens: int, demand: Demand) -> int:
    return sum(group_bytes(group, pages_needed(group, tokens, demand)) for group in groups)


def _largest(fits: object, most: int) -> int:
    """Largest n in 0..most with fits(n), which is true up to some point; -1 if not even 0 fits."""
    assert callable(fits)
    low, high = -1, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _advice(groups: Sequence[CacheGroup], demand: Demand, budget: int, tokens: int) -> str:
    needed = _total(groups, demand.context, demand)
    text = (
        f"the caches do not fit: max_model_len={demand.context} with max_num_seqs={demand.sequences} needs "
        f"{needed} bytes for one sequence of full length; {budget} bytes are given."
    )
    if tokens > 0:
        return text + f" Try --max-model-len {tokens}, fewer --max-num-seqs, or --kv-cache-memory-bytes {needed}."
    return text + f" Try fewer --max-num-seqs, or --kv-cache-memory-bytes {needed}."
