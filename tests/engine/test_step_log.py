"""A step's time in the log, beside the least that it must move and compute: on demand, and nothing else changes."""

from __future__ import annotations

import itertools
import logging
import re
from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
from engine.watching import GREEDY, engine, request, run
from tiny_checkpoints import TinyCheckpoint, prompts, write_tiny

from allotrope.architectures.qwen3_moe import tiny_qwen3_moe
from allotrope.attention.cost import StepCost
from allotrope.config import EngineConfig
from allotrope.engine import step_log
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.planning.step_cost import ModelCost, step_cost
from allotrope.errors import ConfigError

LENGTHS = (3, 11)
LINE = re.compile(
    r"(a decode step|a step with prompts) of (\d+) tokens of (\d+) requests that see (\d+) took ([\d.]+) ms; "
    r"at least (.*)"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    torch.set_num_threads(1)
    return write_tiny(tiny_qwen3_moe(), tmp_path_factory.mktemp("tiny"))


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, ...]]:
    return [found.groups() for found in map(LINE.fullmatch, caplog.messages) if found]


@pytest.mark.parametrize("scheduling", ["on", "off"])
def test_every_step_is_told(tiny: TinyCheckpoint, scheduling: str, caplog: pytest.LogCaptureFixture) -> None:
    asked = [request(str(i), ids) for i, ids in enumerate(prompts(LENGTHS))]
    plain = run(engine(tiny.directory, async_scheduling=scheduling), asked)
    # The option asks for the lines: they come although warnings and errors alone are logged.
    watched = run(engine(tiny.directory, async_scheduling=scheduling, step_log_seconds=0), asked)
    assert watched == plain
    told = lines(caplog)
    assert [one[:4] for one in told[:2]] == [
        ("a step with prompts", "14", "2", "14"),
        ("a decode step", "2", "2", "16"),
    ]
    assert len(told) >= 8 and all(float(one[4]) > 0 for one in told)
    # What is told of the first step is the work of a step of its lengths.
    load_plan = resolve_load_plan(EngineConfig(model=str(tiny.directory), dtype="float32"))
    work = step_cost(load_plan, LENGTHS, LENGTHS)
    assert told[0][5].startswith(", ".join(f"{kind} {_numbers(one)}" for kind, one in work.items()) + ": ")


def test_the_rank_with_the_most_tokens_is_told(tiny: TinyCheckpoint, caplog: pytest.LogCaptureFixture) -> None:
    """The first of two data-parallel ranks has no request any more when the other one still decodes."""
    short, long = prompts(LENGTHS)
    asked = [request("short", short, replace(GREEDY, max_tokens=2)), request("long", long, GREEDY)]
    want = run(engine(tiny.directory), asked)
    two = engine(tiny.directory, data_parallel_size=2, threads=1, step_log_seconds=0)
    try:
        with caplog.at_level(logging.INFO, "allotrope.engine"):
            assert run(two, asked) == want
    finally:
        two.close()
    told = lines(caplog)
    assert told[0][:4] == ("a step with prompts", "11", "1", "11")
    assert told[-1][:4] == ("a decode step", "1", "1", "18")


def test_drafts_are_tokens_of_their_request(tiny: TinyCheckpoint, caplog: pytest.LogCaptureFixture) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "adaptive": false}'
    asked = [request(str(i), (7, 8, 9) * 4) for i in range(2)]
    with caplog.at_level(logging.INFO, "allotrope.engine"):
        run(engine(tiny.directory, speculative_config=drafts, step_log_seconds=0), asked)
    told = lines(caplog)
    verified = next(one for one in told if one[0] == "a decode step" and one[1] == "6")
    # Two requests see 12 tokens of the prompt or more, the first sampled token, and two drafts.
    assert verified[2] == "2" and int(verified[3]) >= 2 * (12 + 1 + 2)
    assert int(verified[3]) < 3 * (12 + 1)
    load_plan = resolve_load_plan(EngineConfig(model=str(tiny.directory), dtype="float32"))
    seen = int(verified[3]) // 2
    work = ModelCost(load_plan)((3, 3), (seen, seen), 6)
    assert verified[5].startswith(", ".join(f"{kind} {_numbers(one)}" for kind, one in work.items()) + ": ")


def _numbers(work: StepCost) -> str:
    return f"{work.bytes / 1e9:.3g} GB {work.flops / 1e9:.3g} GFLOP"


def test_rates_are_of_all_classes() -> None:
    classes = {"experts": StepCost(3_000_000_000, 4_000_000_000), "head": StepCost(1_000_000_000, 2_000_000_000)}
    assert step_log.format_cost(classes, 0.002) == (
        "at least experts 3 GB 4 GFLOP, head 1 GB 2 GFLOP: 2 TB/s, 3 TFLOP/s"
    )


def test_one_step_of_a_kind_when_it_is_time(
    tiny: TinyCheckpoint, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never the first of a kind, in which kernels are compiled."""
    seconds = itertools.count(1)
    monkeypatch.setattr(step_log, "time", SimpleNamespace(monotonic=lambda: next(seconds), perf_counter=perf_counter))
    (ids,) = prompts((5,))
    with caplog.at_level(logging.INFO, "allotrope.engine"):
        run(engine(tiny.directory, step_log_seconds=3, async_scheduling="off"), [request("r", ids)])
    # A step is a second: of the prompt's none is told, of 7 decode steps the fourth and the last.
    assert [(one[0], one[3]) for one in lines(caplog)] == [("a decode step", "9"), ("a decode step", "12")]


def test_nothing_is_told_unasked(tiny: TinyCheckpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "allotrope.engine"):
        run(engine(tiny.directory), [request("r", prompts((5,))[0])])
    assert not lines(caplog)


def test_seconds_below_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="step_log_seconds=-1; at least 0 is needed"):
        EngineConfig(model="m", step_log_seconds=-1)
