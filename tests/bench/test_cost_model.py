"""The cost model's fit finds what made the times, and says how far off it is on cases that it did not see."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from allotrope.attention.cost import StepCost
from allotrope.engine.planning.step_cost import DENSE, EXPERTS, StepWork
from allotrope.engine.planning.step_time import StepTime
from allotrope.kernels.chip_figures import FIGURES, Fitted
from allotrope.rank_layout import RankLayout
from bench.engine import cost_model, layouts, measured_layouts
from bench.engine.cost_model import DECODE, PROMPTS, Case, batches, fit, split, splits
from bench.engine.measured_layouts import Measured, choices

H200 = FIGURES["h200"]
MADE = Fitted(step=3e-4, launch=3e-6, bytes=1.2, flops=1.4, passed=3.0, prompts=6e-3, host_launch=2e-5)


def work(tokens: int, layers: int, width: int) -> StepWork:
    classes = {
        "mha": StepCost(layers * tokens * 4096, layers * tokens * 10**7),
        EXPERTS: StepCost(layers * width * 10**6, layers * tokens * width * 10**5),
        DENSE: StepCost(layers * 10**7, layers * tokens * 10**8),
    }
    return StepWork(classes, 20 * layers, tokens * layers * width * 1000, StepCost())


def made_cases() -> list[Case]:
    """Three models, four sizes of batches each, with the times that `MADE` gives."""
    found = []
    for name, layers, width in (("few", 4, 20), ("many", 24, 4), ("wide", 8, 100)):
        for requests in (1, 4, 16, 64):
            steps = (work(1024 * requests, layers, width),)
            case = Case(name, layers, f"1024/128/{requests}", requests, work(requests, layers, width), steps, {})
            found.append(dataclasses.replace(case, seconds=case.expected(StepTime(H200, MADE))))
    return found


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    found, cases = fit(made_cases(), H200), made_cases()
    errors = [abs(error) for case in cases for error in case.errors(StepTime(H200, found)).values()]
    assert max(errors) < 0.05
    for one in ("bytes", "flops", "launch"):
        assert getattr(found, one) == pytest.approx(getattr(MADE, one), rel=0.2)


def test_what_is_left_out_is_not_fitted() -> None:
    cases = made_cases()
    # One model takes three times as long: a fit that sees it would come closer.
    slow = [
        dataclasses.replace(case, seconds={kind: 3 * one for kind, one in case.seconds.items()})
        if case.model == "wide" else case
        for case in cases
    ]  # fmt: skip
    found = split("all of wide", slow, H200, lambda case: case.model == "wide")
    assert {case.model for case, _ in found.left_out} == {"wide"} and len(found.left_out) == 4
    assert found.constants == fit([case for case in cases if case.model != "wide"], H200)
    assert found.mean(DECODE) == pytest.approx(2 / 3, abs=0.1) and found.mean(PROMPTS) == pytest.approx(2 / 3, abs=0.1)
    names = [one.name for one in splits(cases, H200)]
    assert names == ["16 requests", "all of few", "all of many", "all of wide"]


def test_batches_of_prompts() -> None:
    assert batches(64, 1024) == [16] * 4 and batches(5, 8192) == [2, 2, 1] and batches(3, 1024) == [3]
    assert batches(2, 32768) == [1, 1]


def test_the_stored_page_has_every_case() -> None:
    report = json.loads((cost_model.RESULTS / "cost_model_h200.json").read_text())
    page = cost_model.page(report)
    assert page.count("\n| ") == len(report["all"]) + len(report["splits"]) + 1 + 2 + len(report["newer"]) + 1
    assert f"| each model in its turn | {len(report['all'])} |" in page


def test_runs_with_graphs_wait_less_for_the_host() -> None:
    slow = Case("a", 1, "1024/128/1", 1, work(1, 1, 1), (work(1, 1, 1), work(1, 1, 1)), {})
    time = StepTime(H200, dataclasses.replace(MADE, host_launch=1e-2))
    eager, both = slow.expected(time), dataclasses.replace(slow, graphs=(True, False)).expected(time)
    assert eager[PROMPTS] == pytest.approx(time.prompts(slow.prompts)) == pytest.approx(6e-3 + 2 * 20 * 1e-2)
    assert both[PROMPTS] == pytest.approx(6e-3 + 1.2 * 20 * 1e-2) and both[DECODE] == eager[DECODE]


def row(layout: RankLayout, measured: float, expected: float, case: str = "1024/128/4") -> Measured:
    return Measured("model", case, layout, {DECODE: measured, PROMPTS: 1.0}, {DECODE: expected, PROMPTS: 1.5})


def test_the_layout_that_a_plan_chooses_is_held_against_the_fastest() -> None:
    tensor, data = RankLayout(2), RankLayout(1, 2)
    rows = [row(tensor, 2.0, 1.8), row(data, 2.1, 1.7), row(RankLayout(4), 1.0, 1.0)]
    ((model, case, chosen, fastest, behind),) = choices(rows)
    assert (model, case, chosen, fastest) == ("model", "1024/128/4", data, tensor)
    assert behind == pytest.approx(0.05)
    page = measured_layouts.page(rows)
    assert "| model | 1024/128/4 | DP2 | TP2 | 1.05 |" in page and "50.0 % of a batch of prompts" in page


def test_a_measured_file_is_read_with_its_layout(tmp_path: Path) -> None:
    """The stored run of one model, as it was and as if two data-parallel ranks had made it."""
    stored = json.loads((cost_model.RESULTS / "engine_h200.json").read_text())
    model = stored["models"]["qwen3_235b"]
    measured = model["engines"]["allotrope"]
    measured["cases"] = {"1024/128/64": measured["cases"]["1024/128/64"]}
    files = []
    for column in ("allotrope", "allotrope DP2"):
        files.append(tmp_path / f"{column}.json")
        files[-1].write_text(json.dumps({"models": {"qwen3_235b": model | {"engines": {column: measured}}}}))
    one, two = measured_layouts.read(files, H200)
    assert (one.layout, two.layout) == (RankLayout(), RankLayout(1, 2))
    assert abs(one.error(DECODE)) < 0.15 and two.expected[DECODE] < 0.8 * one.expected[DECODE]
    (case,) = cost_model.read_cases(files, H200)
    assert case.expected(StepTime(H200))[DECODE] == pytest.approx(one.expected[DECODE])
    assert case.expected(StepTime(H200))[PROMPTS] == pytest.approx(one.expected[PROMPTS])


def test_the_stored_layouts_have_every_machine_and_a_page() -> None:
    report = json.loads((layouts.RESULTS / "layouts_on_paper.json").read_text())
    assert list(report["cases"]) == list(layouts.CASES)
    page = layouts.page(report)
    for case in report["cases"].values():
        assert f"## {case['title']}" in page
        assert (case["proposed"] is None) == all(one["tokens"] == 0 for one in case["layouts"].values())
        assert all(one["reason"] for one in case["layouts"].values())
