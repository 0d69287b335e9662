"""The accuracy of SGLang with the plugin: items, answers and figures are those of `allotrope eval` in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import load_script
from eval.eval_fixtures import add_byte_tokenizer
from tiny_checkpoints import write_tiny

from allotrope.architectures.llama import tiny_mistral
from allotrope.config import EngineConfig
from allotrope.eval.options import EvalOptions
from allotrope.eval.report import write_json
from allotrope.eval.run import evaluate

pytestmark = [pytest.mark.usefixtures("in_sglang"), pytest.mark.timeout(900)]

SMALL: dict[str, Any] = {"items": 6, "lengths": "160", "text_length": 192, "tasks": "text,recall,tool_call"}


def test_report_is_that_of_our_engine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The whole command: a host for each mode, held to the report of `allotrope eval`."""
    config = tiny_mistral() | {"sliding_window": 16, "max_position_embeddings": 2048}
    made = write_tiny(config, tmp_path / "windowed")
    add_byte_tokenizer(made.directory)
    report = evaluate(EngineConfig(model=str(made.directory), dtype="float32", device="cpu"), EvalOptions(**SMALL))
    reference, found = tmp_path / "ours.json", tmp_path / "sglang.json"
    write_json(reference, report)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    arguments = ["sglang", str(made.directory), "--dtype=float32", "--modes=warm,preempted,speculated", *flags]
    command = load_script("accuracy_host")
    assert command.main([*arguments, f"--baseline={reference}", f"--json={found}"]) == 0, capfd.readouterr().err[-3000:]
    document = json.loads(found.read_text())
    assert document["items_sha256"] == report.items_sha256
    assert document["engine"].startswith("SGLang 0.5.") and "with allotrope: float32" in document["engine"]
    equal = {"recall": [0, 6], "tool_call": [0, 6]}
    assert document["unequal_answers"] == {"warm": equal, "preempted": equal}
    assert all(abs(one["difference"]) < 1e-4 for one in document["differences"])
    warm, preempted = document["modes"]
    assert warm["remark"].count("prompt tokens reused") == 2 and "retractions" in preempted["remark"]
    assert [one["name"] for one in document["skipped"]] == ["speculated"]
