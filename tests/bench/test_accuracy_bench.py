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
    about = {"place": place, "modes": ["cold", "preempted"], "command": "c", "seconds": 3.0}
    return about | {"device": "CPU", "torch": "2", "date": "2026-01-01"}


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
    (died,) = cells_of(PLACE, {"failed": "ended after 900 s", "code": -1})
    assert died["state"] == "red" and "red: ended after 900 s" in page(results(died))
    assert "**0 of 1**" in page(results(died))


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


def test_a_mode_joins_those_that_ran_before() -> None:
    cold, skipped = cells_of(PLACE, report(0.9, inside=True))
    drafted = report(0.9, inside=True)
    drafted["modes"][0]["name"] = "speculated"
    drafted["modes"][0]["figures"].append({"name": "acceptance length", "unit": "tokens a step", "value": 2.456})
    drafted["unequal_answers"] = {}
    speculated = cells_of(PLACE, drafted)[0]
    new = results(speculated) | {"runs": [run() | {"modes": ["speculated"]}]}
    joined = merged(results(cold, skipped), new)
    assert [cell["mode"] for cell in joined["cells"]] == ["cold", "preempted", "speculated"]
    assert len(joined["runs"]) == 2 and len(merged(joined, new)["cells"]) == 3
    assert "1.5000, 0.900, 2.46 tokens a step" in page(joined)
    # A run that failed as a whole leaves no cell of its dtype, and the next run none of its failure.
    (died,) = cells_of(PLACE, {"failed": "ended after 900 s", "code": -1})
    assert merged(joined, results(died))["cells"] == [died]
    assert merged(merged(joined, results(died)), results(cold))["cells"] == [cold]


def test_what_ran_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "models" / "small"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    asked: list[Path] = []

    def execute(command: list[str], out: Path, options: Any) -> str:
        if not out.is_file():
            asked.append(out)
            out.write_text(json.dumps(report(0.9, inside=True) | {"seconds": 100.0}))
        return "done"

    monkeypatch.setattr(accuracy, "execute", execute)
    arguments = [str(tmp_path / "models"), "--device", "cpu", "--work", str(tmp_path / "work")]
    arguments += ["--out", str(tmp_path / "out.json"), "--no-transformers", "--jobs", "1"]
    assert accuracy.main(arguments) == 0
    # The reference, and each dtype that any model has.
    assert len(asked) == 4
    # The time of runs is that of their reports, whichever call ran them.
    (told,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert told["seconds"] == 300.0
    assert accuracy.main(arguments) == 0 and len(asked) == 4
    assert len(json.loads((tmp_path / "out.json").read_text())["cells"]) == 6


def test_only_the_report_of_the_same_command_is_kept(tmp_path: Path) -> None:
    report, written = tmp_path / "one.json", tmp_path / "written"

    def execute(status: int, items: int, *flags: str) -> dict[str, Any]:
        """What is there after a process that counts its calls, and writes a report if its status is 0."""
        write = 'echo "{\\"items\\": $2}" > $1' if status == 0 else f"echo error: it cannot; exit {status}"
        command = ["sh", "-c", f"printf . >> {written}; {write}", "sh", str(report), str(items)]
        accuracy.execute(command, report, accuracy.parse([str(tmp_path), "--device", "cpu", *flags]))
        found: dict[str, Any] = json.loads(report.read_text())
        return found | {"calls": len(written.read_text())}

    assert execute(0, 4) == {"items": 4, "calls": 1} == execute(0, 4)
    # Of other items.
    assert execute(0, 128) == {"items": 128, "calls": 2}
    # What is refused stays so; what died is tried again, and an old report is not taken for its own.
    assert execute(2, 128) == {"refused": "it cannot", "code": 2, "calls": 3} == execute(2, 128)
    assert execute(1, 128) == {"failed": "it cannot", "code": 1, "calls": 4}
    assert execute(1, 128)["calls"] == 5
    assert execute(0, 128, "--again") == {"items": 128, "calls": 6}
    assert execute(0, 128, "--again")["calls"] == 7


def test_plain_twins_are_written_before_a_run_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "models" / "small"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"quantization_config": {}}')
    (model / "model.safetensors").write_bytes(b"weights")
    done: list[str] = []

    def plain(folder: Path, out: Path) -> Path:
        done.append("twin")
        return out / folder.name

    def execute(command: list[str], out: Path, options: Any) -> str:
        done.append("run")
        out.write_text(json.dumps(report(0.9, inside=True)))
        return "done"

    monkeypatch.setattr(accuracy, "plain", plain)
    monkeypatch.setattr(accuracy, "execute", execute)
    arguments = [str(tmp_path / "models"), "--host", "vllm", "--device", "cpu", "--work", str(tmp_path / "work")]
    arguments += ["--out", str(tmp_path / "out.json"), "--no-transformers", "--jobs", "1"]
    assert accuracy.main(arguments) == 0
    # The reference first; then a twin for each dtype but that of the weights as they are stored.
    assert done == ["run", *["twin"] * 3, *["run"] * 4]
