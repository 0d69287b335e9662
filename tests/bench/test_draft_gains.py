"""`bench/engine/draft_gains.py`: measured gains beside those that the ceilings allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_scripts import BENCH

from allotrope.kernels.chip_figures import FIGURES
from bench.engine.draft_gains import Gain, main, page, read

FILE = BENCH / "results" / "engine_h200_speculation.json"


@pytest.fixture(scope="module")
def gains() -> list[Gain]:
    return read([FILE], FIGURES["h200"])


def test_every_case_with_forced_acceptance_has_its_gain(gains: list[Gain]) -> None:
    models = json.loads(FILE.read_text())["models"]
    for gain in gains:
        assert gain.found == pytest.approx(
            models[gain.model]["ratios"][f"allotrope / allotrope {gain.drafts}"][gain.case]["tpot_ms"]
        )
    engines = [found for model in models.values() for found in model["engines"].items()]
    assert len(gains) == sum(len(column["cases"]) for name, column in engines if name.startswith("allotrope ")) > 0
    assert len(page(gains).splitlines()) == 2 + len(gains)


def test_what_is_possible_follows_from_drafts_and_acceptance(gains: list[Gain]) -> None:
    found = {(gain.model, gain.case, str(gain.drafts)): gain.possible for gain in gains}
    for (model, case, drafts), possible in found.items():
        method, _, given = drafts.partition(" ")
        count, _, length = given.partition("/")
        # No step yields more than it is forced to.
        assert 1 <= possible < float(length)
        # More drafts to choose from, and more of them accepted, allow as much at least.
        for more in (f"{method} {int(count) + 1}/{length}", f"{method} {count}/2.8"):
            assert found.get((model, case, more), possible) >= possible


def test_a_case_that_drafts_made_slower_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(FILE.read_text())
    report["models"] = {"qwen3_5_27b": report["models"]["qwen3_5_27b"]}
    (tmp_path / "found.json").write_text(json.dumps(report))
    assert main([str(tmp_path / "found.json")]) == 0
    assert "| qwen3_5_27b | 1024/128/64 | mtp 3/2.8 |" in capsys.readouterr().out
    numbers = report["models"]["qwen3_5_27b"]["engines"]["allotrope mtp 2/1.8"]["cases"]["1024/128/4"]
    numbers["tpot_ms"] = [9 * time for time in numbers["tpot_ms"]]
    (tmp_path / "found.json").write_text(json.dumps(report))
    assert main([str(tmp_path / "found.json")]) == 1
