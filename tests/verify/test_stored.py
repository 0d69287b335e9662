"""The engine against outputs stored beside a model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from verify_fixtures import Spoil

from allotrope.config import EngineConfig
from allotrope.errors import ModelError
from allotrope.verify.options import MODES, VerifyOptions
from allotrope.verify.report import Report
from allotrope.verify.run import verify
from allotrope.verify.stored import read_stored

# A CPU has no graphs.
HERE = [name for name in MODES if name != "graphs"]


def run(directory: Path, modes: str | None = None, **engine: object) -> Report:
    return verify(EngineConfig(model=str(directory), **engine), VerifyOptions(modes=modes))


def test_a_right_engine_passes_in_every_mode(stored: Path) -> None:
    report = run(stored)
    assert report.passed
    assert {result.name: result.verdict for result in report.modes} == dict.fromkeys(HERE, "pass")
    for result in report.modes:
        assert result.score is not None
        assert result.score.max_abs < 2e-4
        assert result.score.greedy_same == result.score.greedy_total > 0
        assert result.score.argmax_ties == result.score.router_ties == 0
    whole = report.modes[0].score
    # Every prompt position, and every forced token but the last of each prompt.
    assert whole is not None and whole.positions == (1 + 9 + 31 + 33 + 70) + 5 * 5
    assert report.layers is None


def test_it_needs_no_transformers(stored: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from allotrope.config import EngineConfig\n"
        "from allotrope.verify.options import VerifyOptions\n"
        "from allotrope.verify.run import verify\n"
        f"report = verify(EngineConfig(model={str(stored)!r}), VerifyOptions(modes='whole'))\n"
        "sys.exit(0 if report.passed else 1)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_spoiled_weights_are_wrong_in_every_mode_and_named(stored: Path, spoil: Spoil) -> None:
    spoiled = spoil(stored, "model.layers.1.mlp.up_proj.weight", lambda weight: weight * 1.02)
    report = run(spoiled)
    assert not report.passed
    assert {result.verdict for result in report.modes} == {"wrong"}
    text = "\n".join(report.verdict())
    assert "model.safetensors changed since the outputs were stored" in text
    assert "--against transformers" in text


@pytest.mark.parametrize(
    ("key", "spot"),
    [("p03.logits_last8", (0, 5)), ("p03.greedy_logits", (4, 7)), ("p03.logsumexp_all", (11,)), ("p03.greedy", (2,))],
)
def test_every_stored_number_counts(stored: Path, tmp_path: Path, key: str, spot: tuple[int, ...]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(stored, copy)
    tensors = load_file(copy / "expected.safetensors")
    tensors[key][spot] += 1
    save_file(tensors, copy / "expected.safetensors")
    report = run(copy, "whole")
    assert not report.passed
    score = report.modes[0].score
    assert score is not None
    assert {fault.prompt_tokens for fault in score.faults} == {33}


def test_rounding_types_are_compared_by_medians(stored: Path, tmp_path: Path) -> None:
    report = run(stored, "whole,batched", dtype="bfloat16")
    assert report.passed
    assert "median" in str(report.limits)
    score = report.modes[0].score
    assert score is not None and 1e-3 < score.median_abs < 0.6
    copy = tmp_path / "strict"
    shutil.copytree(stored, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["tolerance"]["bf16_median_abs"] = score.median_abs / 2
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert not run(copy, "whole", dtype="bfloat16").passed


def test_a_cache_that_rounds_is_not_held_to_exactness(stored: Path) -> None:
    report = run(stored, "whole", kv_cache_dtype="bfloat16")
    assert report.passed
    score = report.modes[0].score
    assert score is not None and score.max_abs > 5e-4


def test_what_cannot_be_compared_is_an_error(stored: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(stored, copy)
    (copy / "manifest.json").write_text("{}")
    with pytest.raises(ModelError, match="fp32_max_abs"):
        run(copy, "whole")
    (copy / "expected.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="cannot read expected"):
        run(copy, "whole")
    (copy / "expected.safetensors").unlink()
    with pytest.raises(ModelError, match="nothing is stored"):
        verify(EngineConfig(model=str(copy)), VerifyOptions(against="stored"))


def test_positions_line_up(stored: Path) -> None:
    """Row i of the decode logits belongs to the last prompt position and what follows it."""
    sample = next(sample for sample in read_stored(stored).samples if len(sample.prompt) == 31)
    assert len(sample.fed) == len(sample.wanted.top1) == 31 + 5
    assert sample.wanted.positions.tolist() == list(range(23, 36))
    at = {int(position): row for position, row in zip(sample.wanted.positions, sample.wanted.rows, strict=True)}
    for position, row in at.items():
        assert int(row.argmax()) == int(sample.wanted.top1[position])
        torch.testing.assert_close(row.logsumexp(-1), sample.wanted.total[position])
