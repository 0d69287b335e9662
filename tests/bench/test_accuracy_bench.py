"""The accuracy table: which cells are red, and how results of several machines join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import load_script

from bench.accuracy.report import cells_of, merged, page, reference_of

accuracy = load_script("accuracy")
PLACE = {"model": "small", "weights": "abc", "host": "allotrope", "device": "cpu", "dtype": "float32"}


def report(recall: float, *, inside: bool, baseline: bool = False) -> dict[str, Any]:
    """A report of one mode, and of one that was skipped."""
    figures = [
        {"name": "text", "unit": "bits per byte", "value": 1.5, "low": 1.4, "high": 1.6, "count": 9},
        {"name": "recall", "unit": "share", "value": recall, "low": 0.8, "high": 1.0, "count": 9},
    ]
    return {
        "architecture": "SmallForCausalLM",
        "items": "9 of recall",
        "passed": inside,
        "modes": [{"name": "cold", "figures": figures, "remark": ""}],
        "skipped": [{"name": "preempted", "reason": "nothing | grows", "broken": False}],
        "baseline": {"figures": figures, "seconds": 1.0} if baseline else None,
        "differences": [{"mode": "cold", "figure": "recall", "difference": recall - 0.9, "inside": inside}],
        "unequal_answers": {"cold": {"recall": [2, 9]}},
    }


def run(place: str = "allotrope, cpu") -> dict[str, Any]:
    return {"place": place, "command": "c", "seconds": 3.0, "device": "CPU", "torch": "2", "date": "2026-01-01"}


def results(*cells: dict[str, Any], transformers: bool = False, weights: str = "abc") -> dict[str, Any]:
    reference = reference_of(weights, report(0.9, inside=True, baseline=transformers))
    return {"references": {"small": reference}, "cells": list(cells), "runs": [run()]}


def test_a_figure_outside_makes_a_cell_red() -> None:
    green, skipped = cells_of(PLACE, report(0.9, inside=True))
    assert (green["state"], green["other_answers"], green["answers"]) == ("green", 2, 9)
    assert skipped["state"] == "not exercised"
    red, _ = cells_of(PLACE, report(0.5, inside=False))
    assert red["state"] == "red" and red["outside"] == [{"figure": "recall", "value": 0.5, "difference": 0.5 - 0.9}]
    text = page(results(red, skipped))
    assert "1.5000, 0.500; **red**: recall -0.400" in text and "**0 of 1**" in text
    assert "- allotrope, cpu, float32, preempted, not exercised: nothing \\| grows" in text
    assert "1 of 1" in page(results(green, skipped)) and "red" not in page(results(green, skipped))


def test_a_mode_in_which_the_engine_fails_is_red() -> None:
    broken = report(0.9, inside=True) | {"skipped": [{"name": "warm", "reason": "ValueError: x", "broken": True}]}
    _, failed = cells_of(PLACE, broken)
    assert failed["state"] == "red" and "**red**: failed" in page(results(failed))
    (refused,) = cells_of(PLACE, {"refused": "no such dtype", "code": 2})
    assert "refused: no such dtype" in page(results(refused))


def test_results_of_two_machines_join() -> None:
    first, _ = cells_of(PLACE, report(0.9, inside=True))
    again, _ = cells_of(PLACE, report(0.95, inside=True))
    gpu, _ = cells_of(PLACE | {"device": "cuda"}, report(0.9, inside=True))
    old = results(first, transformers=True)
    both = merged(old, results(gpu) | {"runs": [run("allotrope, cuda")]})
    assert [cell["device"] for cell in both["cells"]] == ["cpu", "cuda"]
    assert "transformers" in both["references"]["small"] and len(both["runs"]) == 2
    assert [cell["recall"] for cell in merged(both, results(again))["cells"]] == [0.95, 0.9]
    assert len(merged(both, results(again))["runs"]) == 2
    # A model that was trained anew has nothing left of the old one.
    other, _ = cells_of(PLACE | {"weights": "def"}, report(0.9, inside=True))
    assert len(merged(both, results(other, weights="def"))["cells"]) == 1


def test_what_ran_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "models" / "small"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    asked: list[Path] = []

    def execute(command: list[str], out: Path, options: Any) -> str:
        if not out.is_file():
            asked.append(out)
            out.write_text(json.dumps(report(0.9, inside=True)))
        return "done"

    monkeypatch.setattr(accuracy, "execute", execute)
    arguments = [str(tmp_path / "models"), "--device", "cpu", "--work", str(tmp_path / "work")]
    arguments += ["--out", str(tmp_path / "out.json"), "--no-transformers", "--jobs", "1"]
    assert accuracy.main(arguments) == 0
    # The reference, and each dtype that any model has.
    assert len(asked) == 4
    assert accuracy.main(arguments) == 0 and len(asked) == 4
    assert len(json.loads((tmp_path / "out.json").read_text())["cells"]) == 6
