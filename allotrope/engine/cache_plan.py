"""The number of pages of the caches: the memory plan under the options, on a CPU and on a GPU.

Owns the refusal of a model that does not fit. Must not run a step: `profile` measures what one takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from allotrope.cache.memory import Demand, MemoryPlan, make_plan, plan_memory
from allotrope.config import EngineConfig
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.memory import free_memory, utilization
from allotrope.errors import ConfigError

CPU_TOKENS = 32768
"""Tokens of further requests that a CPU's caches have room for, beside one of full length, where no option says."""


def plan_caches(load_plan: LoadPlan, config: EngineConfig, available: int | None = None) -> MemoryPlan:
    """The memory plan under the options. `available`: bytes for weights and caches; default: bytes that are free now.

    Raises ConfigError if weights, or caches for one sequence of full length, do not fit.
    """
    if config.kv_cache_memory_bytes is not None:
        return plan_memory(load_plan.groups, _demand(load_plan, config), config.kv_cache_memory_bytes)
    available = free_of_rank(load_plan, config) if available is None else available
    share = utilization(config, load_plan.build.device)
    if load_plan.build.device.type == "cuda":
        return plan_within(load_plan, config, int(available * share) - load_plan.weight_bytes, available)
    room = min(int(available * share), available - load_plan.weight_bytes)
    if wants_few_tokens(load_plan, config):
        room = min(room, _few_tokens(load_plan, config))
    return plan_within(load_plan, config, room, available)


def free_of_rank(load_plan: LoadPlan, config: EngineConfig) -> int:
    """Bytes that are free now for each rank of `load_plan`. Ranks on a CPU share the main memory of their host."""
    free = free_memory(load_plan.build.device)
    shared = load_plan.build.device.type == "cpu" and config.distributed_executor_backend == "mp"
    return free // load_plan.build.parallel.layout.size if shared else free


def refuse_small_caches(stages: Iterable[LoadPlan], config: EngineConfig) -> None:
    """Raise ConfigError where the kv_cache_memory_bytes of each of these ranks hold no sequence of full length on one
    of them, saying what all would need."""
    if config.kv_cache_memory_bytes is not None:
        plan_caches(max(stages, key=lambda one: _least_bytes(one, config)), config)


def _least_bytes(load_plan: LoadPlan, config: EngineConfig) -> int:
    """Of the caches of one sequence of full length."""
    return make_plan(load_plan.groups, _demand(load_plan, config), load_plan.max_model_len, 1).bytes


def wants_few_tokens(load_plan: LoadPlan, config: EngineConfig) -> bool:
    """Whether the caches are as large as a few requests need: on a CPU, unless an option gives them memory."""
    given = config.kv_cache_memory_bytes is not None or config.memory_utilization is not None
    return load_plan.build.device.type == "cpu" and not given


def _few_tokens(load_plan: LoadPlan, config: EngineConfig) -> int:
    """Bytes of caches for one sequence of full length and `CPU_TOKENS` more tokens, at most for a full batch."""
    demand = _demand(load_plan, config)
    pages = [group.pages_for(demand.context) * group.page_size for group in load_plan.groups if group.kind != "state"]
    longest = max(pages, default=demand.context)
    tokens = min(longest + CPU_TOKENS, longest * demand.sequences)
    return make_plan(load_plan.groups, demand, tokens).bytes


def plan_within(load_plan: LoadPlan, config: EngineConfig, room: int, available: int) -> MemoryPlan:
    """The memory plan in `room` bytes of `available` ones. Raises ConfigError if one long sequence does not fit."""
    if room <= 0:
        weights, advice = load_plan.weight_bytes, ""
        if load_plan.build.dtype == torch.float32:
            advice = " Try --dtype bfloat16."
        if weights >= available:
            raise ConfigError(f"the weights do not fit: they take {weights} bytes, and {available} are free.{advice}")
        share = utilization(config, load_plan.build.device)
        raise ConfigError(
            f"nothing is left for caches: memory_utilization={share:g} of {available} free bytes is "
            f"{int(available * share)}, which the weights ({weights} bytes), libraries and the largest step fill. Try "
            f"a larger --memory-utilization, or a --max-num-batched-tokens below {load_plan.step_tokens}."
        )
    return plan_memory(load_plan.groups, _demand(load_plan, config), room)


def equal_pages(
    load_plan: LoadPlan, config: EngineConfig, planned: MemoryPlan, min_of_ranks: Callable[[int], int]
) -> MemoryPlan:
    """`planned` with the pages of the pipeline stage that has the fewest: all have one page table. `min_of_ranks`: the
    smallest of the numbers that the ranks call it with."""
    tokens, sequences = min_of_ranks(planned.tokens), min_of_ranks(planned.sequences)
    return make_plan(load_plan.groups, _demand(load_plan, config), tokens, sequences)


def _demand(load_plan: LoadPlan, config: EngineConfig) -> Demand:
    return Demand(
        context=load_plan.max_model_len,
        sequences=load_plan.max_num_seqs,
        step_tokens=load_plan.step_tokens,
        reuse=config.enable_prefix_caching,
    )
