"""Limits of a step that the options leave open: what a GPU's memory serves, and nothing that was asked for changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allotrope.attention.cache_layout import CacheLayout, Field, PagedRows, StateSlots, WindowRows
from allotrope.cache.groups import group_caches
from allotrope.cache.memory import Demand, plan_memory
from allotrope.config import EngineConfig
from allotrope.engine.step_limits import GPU_TOKENS, StepLimits, StepRoom, cpu_limits, gpu_limits
from allotrope.errors import ConfigError

GIB = 2**30
HEADS = (Field("k", (8, 64), torch.bfloat16), Field("v", (8, 64), torch.bfloat16))
STATE = StateSlots((Field("s", (32, 128, 128), torch.float32),))
WINDOWED: list[dict[str, CacheLayout]] = [{"kv": PagedRows(HEADS)}, {"kv": WindowRows(HEADS, window=128)}] * 18
RECURRENT: list[dict[str, CacheLayout]] = [{"kv": PagedRows(HEADS)}, *[{"state": STATE}] * 3] * 12


def room(gib: float, layers: list[dict[str, CacheLayout]] = WINDOWED, context: int = 131072) -> StepRoom:
    return StepRoom(
        bytes=int(gib * GIB), hidden=2 * 2880, vocabulary=200_000, context=context, groups=group_caches(layers, 16)
    )


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="model", **options)


def test_a_large_gpu_gets_wide_steps() -> None:
    limits = gpu_limits(config(), room(60))
    assert (limits.max_num_seqs, limits.step_tokens) == (512, GPU_TOKENS)
    assert str(limits) == "at most 512 sequences and 8192 tokens a step (sequences and tokens chosen by memory)"


@pytest.mark.parametrize("layers", [WINDOWED, RECURRENT])
def test_less_memory_never_gives_wider_steps_and_a_full_batch_fits(layers: list[dict[str, CacheLayout]]) -> None:
    found = []
    for gib in (3, 6, 12, 24, 48, 96, 192):
        given = room(gib, layers, context=16384)
        limits = gpu_limits(config(), given)
        found.append((limits.max_num_seqs, limits.step_tokens))
        demand = Demand(context=16384, sequences=limits.max_num_seqs, step_tokens=limits.step_tokens, reuse=True)
        left = given.bytes - given.workspace(*found[-1])
        plan = plan_memory(given.groups, demand, left)
        if limits.max_num_seqs > 1:
            assert plan.sequences == limits.max_num_seqs, "the windows and states of all sequences"
            assert plan.tokens >= 2048 * limits.max_num_seqs
    assert found == sorted(found)
    assert found[0] != found[-1]


def test_states_leave_room_for_fewer_sequences() -> None:
    assert gpu_limits(config(), room(40, RECURRENT)).max_num_seqs < gpu_limits(config(), room(40)).max_num_seqs


def test_short_contexts_need_less_for_as_many_sequences() -> None:
    short, long = (gpu_limits(config(), room(8, context=context)).max_num_seqs for context in (512, 131072))
    assert short > long


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_num_seqs": 20000}, (20000, 20000)),
        ({"max_num_seqs": 7}, (7, 16384)),
        ({"max_num_batched_tokens": 100}, (96, 100)),
        ({"max_num_batched_tokens": 512, "max_num_seqs": 3}, (3, 512)),
    ],
)
def test_what_was_asked_for_stays(options: dict[str, int], expected: tuple[int, int]) -> None:
    limits = gpu_limits(config(**options), room(60), preferred_tokens=16384)
    assert (limits.max_num_seqs, limits.step_tokens) == expected
    left_open = {"sequences": "max_num_seqs", "tokens": "max_num_batched_tokens"}
    assert set(limits.chosen) == {word for word, option in left_open.items() if option not in options}


def test_bytes_asked_for_caches_bound_the_sequences() -> None:
    few = gpu_limits(config(kv_cache_memory_bytes=GIB), room(60, context=2048))
    assert 1 < few.max_num_seqs < 512
    demand = Demand(context=2048, sequences=few.max_num_seqs, step_tokens=few.step_tokens, reuse=True)
    assert plan_memory(few_groups(), demand, GIB).sequences == few.max_num_seqs


def few_groups() -> Any:
    return group_caches(WINDOWED, 16)


def test_where_nothing_fits_the_memory_plan_says_so() -> None:
    limits = gpu_limits(config(), room(0.5))
    assert limits.max_num_seqs == 1
    demand = Demand(context=131072, sequences=1, step_tokens=limits.step_tokens, reuse=True)
    with pytest.raises(ConfigError, match="one sequence of max_model_len=131072"):
        plan_memory(few_groups(), demand, GIB // 2)


def test_on_a_cpu_memory_is_not_asked() -> None:
    assert cpu_limits(config()) == StepLimits(64, 2048)
    assert cpu_limits(config(max_num_batched_tokens=16)) == StepLimits(16, 16)
    assert cpu_limits(config(max_num_seqs=3000)) == StepLimits(3000, 3000)
