"""A verification with drafts: it passes where these change nothing, and fails where they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allotrope.config import EngineConfig
from allotrope.engine import step_loop
from allotrope.engine.drafting import Drafting
from allotrope.engine.inputs import StepRow
from allotrope.verify.options import VerifyOptions
from allotrope.verify.report import Report
from allotrope.verify.run import verify

MODELS = Path(__file__).parents[2] / "train" / "models"
MTP = '{"method": "mtp", "num_speculative_tokens": 3, "adaptive": false}'
OPTIONS = VerifyOptions(lengths="1,17,65", modes="whole,chunked-3,batched,preempted")


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The accepted drafts of each verified sequence of each step."""
    found: list[int] = []
    inner = Drafting.record

    def record(self: Drafting, seqs: Any, drafted: Any, taken: Any) -> None:
        found.extend(taken)
        inner(self, seqs, drafted, taken)

    monkeypatch.setattr(Drafting, "record", record)
    return found


def verified(name: str) -> Report:
    return verify(EngineConfig(model=str(MODELS / name), speculative_config=MTP), OPTIONS)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_a_model_with_its_trained_head_passes(name: str, accepted: list[int]) -> None:
    report = verified(name)
    assert report.passed, report.verdict()
    assert {result.verdict for result in report.modes} == {"pass"}
    assert set(accepted) == {0, 1, 2, 3}


def test_a_state_without_its_accepted_drafts_fails(monkeypatch: pytest.MonkeyPatch, accepted: list[int]) -> None:
    inner = step_loop.step_rows

    def forgetting(*args: Any) -> list[StepRow]:
        return [row._replace(replay=0) for row in inner(*args)]

    monkeypatch.setattr(step_loop, "step_rows", forgetting)
    report = verified("qwen3_next")
    assert not report.passed and sum(accepted)
    assert {result.verdict for result in report.modes} == {"wrong"}
