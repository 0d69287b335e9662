"""The trained models recall what stands in their prompt, in every mode of execution, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allotrope.config import EngineConfig
from allotrope.eval.options import EvalOptions
from allotrope.eval.run import evaluate

MODELS = Path(__file__).parents[2] / "train" / "models"
NAMES = sorted(path.name for path in MODELS.iterdir() if (path / "config.json").is_file())
LENGTHS, ITEMS = (200, 620, 1500), 4
# The share of right items that training has reached over as many bytes as the prompts have.
LEARNT = 0.9


@pytest.mark.parametrize("name", NAMES)
def test_every_mode_recalls_at_every_length(name: str) -> None:
    folder = MODELS / name
    learnt = json.loads((folder / "report.json").read_text())["measured"]["recall"]
    assert all(learnt[str(distance)]["accuracy"] >= LEARNT for distance in (32, 128, 512, 2048)), "not trained enough"
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", threads=1, kv_cache_memory_bytes=1 << 28)
    lengths = ",".join(map(str, LENGTHS))
    options = EvalOptions(tasks="recall", items=ITEMS, lengths=lengths, modes="cold,warm,chunked,preempted")
    report = evaluate(config, options)
    assert [mode.name for mode in report.modes] == ["cold", "warm", "chunked", "preempted"], report.skipped
    right = {mode.name: next(one for one in mode.figures if one.name == "recall").estimate for mode in report.modes}
    assert right["cold"].value >= 11 / 12, report.notes()
    for mode in report.modes[1:]:
        assert mode.unequal(report.modes[0]) == {"recall": (0, ITEMS * len(LENGTHS))}, report.notes()
