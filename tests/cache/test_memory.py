"""Memory plans: what fits, what is said when it does not, and that bytes are what the arena takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from allotrope.attention.cache_layout import CacheLayout, Field, PagedRows, StateSlots, WindowRows
from allotrope.cache.arena import Arena
from allotrope.cache.groups import group_caches
from allotrope.cache.memory import Demand, make_plan, plan_memory
from allotrope.errors import ConfigError

KV = (Field("k", (2, 8), torch.bfloat16), Field("v", (2, 8), torch.bfloat16))
WIDE = (Field("k", (4, 8), torch.bfloat16), Field("v", (4, 8), torch.bfloat16))
LAYERS = [
    {"kv": PagedRows(KV)},
    {"kv": WindowRows(WIDE, window=32)},
    {"state": StateSlots((Field("s", (3, 5), torch.float32),))},
    {"kv": PagedRows(KV), "index": PagedRows((Field("k", (4,), torch.uint8),), stride=4)},
]
DEMAND = Demand(context=256, sequences=4, step_tokens=64, reuse=True)


def test_groups_and_their_bytes() -> None:
    paged, window, state = group_caches(LAYERS, page_size=16)
    assert (paged.kind, paged.layers, paged.page_size) == ("paged", (0, 3), 16)
    assert (window.kind, window.window) == ("window", 32)
    assert state.kind == "state"
    row = 2 * 2 * 8 * 2
    assert paged.page_bytes == 2 * 16 * row + 4 * 4
    assert window.page_bytes == 16 * 2 * row
    assert state.page_bytes == 3 * 5 * 4


def test_rows_of_a_long_stride_get_a_longer_page() -> None:
    groups = group_caches([{"a": PagedRows(KV, stride=128)}, {"b": PagedRows(KV)}], page_size=16)
    assert [group.page_size for group in groups] == [128, 16]


def test_a_window_costs_no_more_with_more_context() -> None:
    groups = group_caches(LAYERS, page_size=16)
    few, many = (make_plan(groups, DEMAND, tokens) for tokens in (4096, 65536))
    assert few.groups[1].pages == many.groups[1].pages
    assert few.groups[0].pages < many.groups[0].pages
    assert few.groups[2].pages == 1 + 2 * DEMAND.sequences


def test_plan_fills_the_budget_and_the_arena_takes_what_it_says() -> None:
    groups = group_caches(LAYERS, page_size=16)
    full = make_plan(groups, DEMAND, DEMAND.context * DEMAND.sequences).bytes
    assert plan_memory(groups, DEMAND, 10 * full).bytes == full, "no more than a full batch needs"
    plan = plan_memory(groups, DEMAND, full * 3 // 4)
    assert plan.bytes <= full * 3 // 4
    assert make_plan(groups, DEMAND, plan.tokens + 16).bytes > full * 3 // 4
    arena = Arena(plan, len(LAYERS), {}, torch.device("cpu"))
    assert arena.bytes == plan.bytes
    assert arena.layers[1]["kv"]["k"].shape == (plan.groups[1].pages, 16, 4, 8)
    assert not any(field.any() for layer in arena.layers for views in layer.values() for field in views.values())


def test_a_full_batch_fits_at_once_whatever_its_last_pages_hold() -> None:
    groups = group_caches([{"a": PagedRows(KV, stride=128)}, {"b": WindowRows(KV, window=16)}], page_size=16)
    demand = Demand(context=176, sequences=4, step_tokens=2048, reuse=False)
    plan = plan_memory(groups, demand, 1 << 30)
    for entry in plan.groups:
        assert entry.pages - 1 >= demand.sequences * entry.group.pages_for(demand.context)


def test_too_little_says_what_would_fit() -> None:
    groups = group_caches(LAYERS[:1], page_size=16)
    row = 2 * 2 * 8 * 2
    with pytest.raises(ConfigError, match=r"--max-model-len 1\d\d\b") as caught:
        plan_memory(groups, DEMAND, 200 * row)
    assert f"{200 * row} bytes are given" in str(caught.value)


def test_little_memory_means_fewer_windows_not_a_shorter_context() -> None:
    groups = group_caches(LAYERS, page_size=16)
    least = make_plan(groups, DEMAND, DEMAND.context, 1).bytes
    plan = plan_memory(groups, DEMAND, least)
    assert (plan.sequences, plan.tokens) == (1, DEMAND.context)
    for entry in plan.groups:
        assert entry.pages - 1 >= entry.group.live_pages(DEMAND.context, DEMAND.step_tokens)
    with pytest.raises(ConfigError, match=rf"needs {least} bytes; {least - 1} bytes are given"):
        plan_memory(groups, DEMAND, least - 1)
    assert plan_memory(groups, DEMAND, least * 2).sequences > 1


def gemma() -> list[dict[str, CacheLayout]]:
    """The caches of Gemma 4 31B: 50 layers of 60 have windows."""
    fields = ((Field("k", shape, torch.bfloat16), Field("v", shape, torch.bfloat16)) for shape in ((16, 256), (4, 512)))
    window, paged = next(fields), next(fields)
    return [{"kv": PagedRows(paged) if i % 6 == 5 else WindowRows(window, 1024)} for i in range(60)]


def test_a_shared_pool_serves_short_and_long_sequences() -> None:
    groups = group_caches(gemma(), page_size=16)
    budget = 68 * 2**30
    demand = Demand(context=262144, sequences=24, step_tokens=8192, reuse=True)
    apart = plan_memory([group.of_layers(range(60)) for group in groups], demand, budget)
    assert apart.shared is None and apart.sequences == 24 and 300_000 < apart.tokens < 310_000
    plan = plan_memory(groups, replace(demand, sequences=256), budget)
    assert plan.shared is not None and plan.bytes == plan.shared.bytes
    assert budget - plan.shared.layout.bytes < plan.bytes <= budget
    # Either of both, of the same bytes.
    assert plan.sequences == 64 and 770_000 < plan.tokens < 780_000
    live = [64 * group.live_pages(2048, 1) for group in groups]
    assert sum(one.units(live[one.group]) for one in plan.shared.layout.groups) < plan.shared.units


def test_a_shared_pool_always_holds_the_longest_sequence_and_no_more_than_a_full_batch() -> None:
    groups = group_caches(gemma(), page_size=16)
    demand = Demand(context=4096, sequences=4, step_tokens=1024, reuse=True)
    least = make_plan(groups, replace(demand, reuse=False), 4096, 1)
    assert least.shared is not None
    live = [group.live_pages(4096, 1024) for group in groups]
    assert sum(one.units(live[one.group]) for one in least.shared.layout.groups) < least.shared.units
    plan = plan_memory(groups, demand, least.bytes)
    assert (plan.bytes, plan.sequences) == (least.bytes, 1) and plan.tokens >= 4096
    with pytest.raises(ConfigError, match=rf"--max-model-len \d+ or --kv-cache-memory-bytes {least.bytes}\."):
        plan_memory(groups, demand, least.bytes - 1)
    full = plan_memory(groups, demand, 2**40)
    assert full.bytes == make_plan(groups, demand, 4 * 4096).bytes
    assert (full.sequences, full.tokens) == (4, 4 * 4096)


def test_states_stay_out_of_a_shared_pool() -> None:
    state: dict[str, CacheLayout] = {"state": StateSlots((Field("s", (1000, 1000), torch.float32),))}
    groups = group_caches([*gemma(), state], page_size=16)
    demand = Demand(context=8192, sequences=64, step_tokens=1024, reuse=True)
    plan = plan_memory(groups, demand, 8 * 2**30)
    assert plan.shared is not None and plan.groups[2].pages == 1 + 2 * plan.sequences
    assert plan.bytes == plan.shared.bytes + plan.groups[2].bytes <= 8 * 2**30
    assert plan.bytes + plan.shared.layout.bytes > 8 * 2**30


def test_copy_page_copies_every_field_of_the_group() -> None:
    groups = group_caches(LAYERS, page_size=16)
    arena = Arena(make_plan(groups, DEMAND, 512), len(LAYERS), {}, torch.device("cpu"))
    for layer in (0, 3):
        for field in arena.layers[layer]["kv"].values():
            field[3] = 7
    arena.copy_pages([(0, 3, 5)])
    for layer in (0, 3):
        for field in arena.layers[layer]["kv"].values():
            assert (field[5] == 7).all() and not field[4].any()
