"""The gate of `examples/lm_eval` on files as lm_eval writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GATE = Path(__file__).parents[2] / "examples" / "lm_eval" / "gate.py"


def _write(path: Path, right: list[int], filters: tuple[str, ...] = ("strict-match",)) -> Path:
    rows = [{"doc_id": i, "filter": one, "exact_match": float(good)} for i, good in enumerate(right) for one in filters]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _gate(*args: object) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(GATE), *map(str, args)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


# 95 of 100 is 0.95 within 0.8882 and 0.9785; 0.9538 of 1319 is within 0.9410 and 0.9638.
@pytest.mark.parametrize(("right", "status"), [(95, 0), (92, 0), (91, 0), (80, 1)])
def test_a_share_far_below_fails(tmp_path: Path, right: int, status: int) -> None:
    file = _write(tmp_path / "samples_gsm8k_2026.jsonl", [1] * right + [0] * (100 - right))
    code, text = _gate("--expect", 0.9538, "--of", 1319, file)
    assert code == status
    assert f"found    {right / 100:.4f} [" in text and "expected 0.9538 [0.9410, 0.9638] of 1319 answers" in text


def test_samples_of_one_question_are_not_independent(tmp_path: Path) -> None:
    right = [1] * 15 + [0] * 15
    one = _write(tmp_path / "samples_aime25_a.jsonl", right)
    other = _write(tmp_path / "samples_aime25_b.jsonl", right)
    _, text = _gate("--expect", 0.5, "--of", 60, one, other)
    # As wide as 30 answers are, not 60: 0.5 +- 2.045 sqrt(0.25 / 29).
    assert "found    0.5000 [0.3101, 0.6899] of 60 answers" in text


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    both = _write(tmp_path / "samples_gsm8k_a.jsonl", [1, 0], ("strict-match", "flexible-extract"))
    assert "choose one by --filter" in _gate("--expect", 0.5, "--of", 2, both)[1]
    assert "no sample with filter='x'" in _gate("--expect", 0.5, "--of", 2, "--filter", "x", both)[1]
    more = _write(tmp_path / "samples_gsm8k_b.jsonl", [1, 0, 1])
    assert (
        "questions have 1 to 2 samples" in _gate("--expect", 0.5, "--of", 2, "--filter", "strict-match", both, more)[1]
    )
