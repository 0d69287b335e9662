"""Models whose cache groups share a pool that is hardly large enough for one sequence: units move between the groups
while tokens are generated, and every request gets the tokens that it gets alone.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine.watching import GREEDY, assert_idle, assert_same, engine, request, run
from tiny_checkpoints import prompts

from allotrope.architectures.registry import find_architecture
from allotrope.cache.memory import Demand, make_plan
from allotrope.cache.shared_pool import SharedPool, UnitPool
from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.engine.kv_cache_manager import KVCacheManager
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.sequence import Sequence
from allotrope.request import Request, SamplingParams

NAMES = ["Gemma3ForCausalLM", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "GptOssForCausalLM"]
CONTEXT, STEP = 160, 48


class Moves:
    """Counts the units that go from one group to another, and evictions of whole units."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.evictions = 0, 0
        self._owners: dict[tuple[int, int], int] = {}
        fill, evict = UnitPool._unit_to_fill, UnitPool.evict_unit

        def filled(pool: UnitPool) -> int:
            unit = fill(pool)
            place = (id(pool._shared), unit)
            self.count += self._owners.get(place, pool.pages.group) != pool.pages.group
            self._owners[place] = pool.pages.group
            return unit

        def evicted(pool: UnitPool) -> None:
            self.evictions += 1
            evict(pool)

        monkeypatch.setattr(UnitPool, "_unit_to_fill", filled)
        monkeypatch.setattr(UnitPool, "evict_unit", evicted)


def tight(directory: Path, factor: float, **options: Any) -> Engine:
    """An engine with memory for `factor` sequences of full length, 1 being the least that is allowed."""
    settings = {"max_model_len": CONTEXT, "max_num_seqs": 6, "max_num_batched_tokens": STEP, "page_size": 4}
    settings |= {"load_format": "dummy", "dtype": "float32"} | options
    load_plan = resolve_load_plan(EngineConfig(model=str(directory), **settings))
    demand = Demand(context=CONTEXT, sequences=1, step_tokens=STEP, reuse=False)
    needed = make_plan(load_plan.groups, demand, CONTEXT).bytes
    return engine(directory, kv_cache_memory_bytes=int(factor * needed), scheduler_reserve_full_isl=False, **settings)


@pytest.fixture(scope="module", params=NAMES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = find_architecture({"architectures": [request.param]}, "").tiny()
    path = tmp_path_factory.mktemp(request.param)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    chance = random.Random(3)
    beginnings = prompts((48, 96), seed=4)
    asked = []
    for number, tokens in enumerate(prompts((3, 90, 17, 60, 33, 1, 75, 120, 40, 8, 55, 100), seed=2)):
        prompt = (chance.choice(beginnings) + tokens)[: CONTEXT - 40] if number % 3 else tokens
        params = SamplingParams(temperature=0.0, max_tokens=chance.randint(1, 40), ignore_eos=True)
        asked.append(request(f"r{number}", prompt, params))
    return asked


@pytest.fixture(scope="module")
def alone(directory: Path, asked: list[Request]) -> dict[str, list[int]]:
    """The tokens of each request where there is no other."""
    return run(tight(directory, 40.0, max_num_seqs=1, enable_prefix_caching=False), asked)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0])
def test_units_move_and_tokens_stay(
    directory: Path,
    asked: list[Request],
    alone: dict[str, list[int]],
    factor: float,
    caching: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves = Moves(monkeypatch)
    running = tight(directory, factor, enable_prefix_caching=caching)
    assert running.memory.shared is not None
    for _ in range(2):
        assert_same(run(running, asked), alone)
        assert_idle(running)
    assert moves.count > 10, "no unit went to another group"
    assert not caching or moves.evictions > 10
    if factor == 1.0:
        assert running.stats().preemptions > 0


@pytest.mark.parametrize("caching", [True, False])
def test_the_longest_sequence_fits_alone_whatever_was_cached(directory: Path, caching: bool) -> None:
    """Others leave cached pages in every unit; the prefix that they share lies in units with theirs."""
    running = tight(directory, 1.0, enable_prefix_caching=caching)
    (longest, *others) = prompts((CONTEXT - 8, 20, 30, 12, 40), seed=6)
    few = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for cut in (16, 64, 120):
        run(running, [request(f"{cut} {i}", (longest[:cut] + one)[:120], few) for i, one in enumerate(others)])
    manager = running._requests.kv_cache_manager
    assert manager.fits_alone(CONTEXT, STEP)
    (tokens,) = run(running, [request("longest", longest, GREEDY)]).values()
    assert len(tokens) == 8
    assert_idle(running)


def test_a_sequence_alone_starts_afresh_where_its_cached_prefix_lies_in_too_many_units(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = prompts((8, CONTEXT - 8 - 100), seed=8)
    many = SamplingParams(temperature=0.0, max_tokens=92, ignore_eos=True)
    running = tight(directory, 1.0)
    assert running.memory.shared is not None
    counts = [one.count for one in running.memory.shared.layout.groups]
    restarts = []
    free = KVCacheManager.free

    def freed(manager: KVCacheManager, seq: Sequence, *, evict: bool = False) -> None:
        restarts.append(evict)
        free(manager, seq, evict=evict)

    with monkeypatch.context() as patch:
        # As if sequences that have ended since had taken turns with this one.
        choose, promise = UnitPool._choose, SharedPool.promise
        patch.setattr(UnitPool, "_choose", lambda pool, previous: choose(pool, 0))
        patch.setattr(SharedPool, "promise", lambda pool, pages, alone: promise(pool, pages, alone=False))
        longest = first + run(running, [request("first", first, many)])["first"] + last
    alone = run(tight(directory, 40.0, enable_prefix_caching=False), [request("longest", longest)])
    monkeypatch.setattr(KVCacheManager, "free", freed)
    assert_same(run(running, [request("longest", longest)]), alone)
    if counts == [1, 3]:
        assert any(restarts)
    assert_idle(running)


def test_statistics_count_what_a_group_could_get(directory: Path) -> None:
    running = tight(directory, 2.0)
    shared = running.memory.shared
    assert shared is not None
    counts = {one.group: one.count for one in shared.layout.groups}
    totals = list(running.stats().pages_total.values())
    assert totals == [(shared.units - 1) * counts[i] for i in range(len(totals))]
    running.add(request("one", prompts((40,))[0]))
    running.step()
    stats = running.stats()
    used = Counter(stats.pages_used)
    assert all(used.values())
    assert all(stats.pages_total[label] < total for label, total in zip(used, totals, strict=True))
    running.abort(["one"])
    assert list(running.stats().pages_total.values()) == totals
