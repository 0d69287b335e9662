"""The engine bench with drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peer_packages import VLLM
from random_models import tiny

from allotrope.rank_layout import RankLayout
from bench.engine.options import engine_options, parse, speculations
from bench.engine.report import Column


def test_columns_are_named_and_read_back() -> None:
    from bench.engine.report import Column, Speculation

    for column, name in [
        (Column("allotrope"), "allotrope"),
        (Column("vllm+allotrope", RankLayout(2)), "vllm+allotrope TP2"),
        (Column("allotrope", RankLayout(1, 2, 1, True)), "allotrope DP2 EP"),
        (Column("vllm", speculation=Speculation("mtp", 3)), "vllm mtp 3"),
        (Column("vllm", RankLayout(4), Speculation("eagle3", 3, 2.75)), "vllm TP4 eagle3 3/2.75"),
        (Column("vllm", RankLayout(2, 4, 2, True), Speculation("mtp", 3)), "vllm TP2 DP4 PP2 EP mtp 3"),
    ]:
        assert str(column) == name and Column.of(name) == column
        assert column.has_own_tokens == ("/" not in name)
    none, *measured = speculations("mtp", [1, 3], [1.8, 2.8])
    assert none is None and speculations("mtp", [1, 3], [1.8, 2.8], only=True) == measured
    assert [(one.drafts, one.length) for one in measured] == [(1, 1.8), (3, 1.8), (3, 2.8)]


def test_drafts_are_compared_with_none(engine: Any, weights: Any, tmp_path: Path) -> None:
    """Ours and vLLM, which is a package with the names and arguments that the bench uses."""
    model, out = tmp_path / "tiny", tmp_path / "found"
    weights.write_checkpoint(tiny("Qwen3NextForCausalLM"), model, mtp=True)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "vllm.py").write_text(VLLM)
    small = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 128, "max_num_seqs": 4}
    command = [str(model), "--peers", "vllm", "--cases", "8/24/2", "--runs", "1", "--our-options", json.dumps(small)]
    command += ["--peer-path", str(tmp_path / "site"), "--forced", "9", "--out", str(out)]
    assert engine.main([*command, "--speculate", "1", "3", "--accept", "1.5", "3"]) == 0
    report = json.loads(out.with_suffix(".json").read_text())
    found = report["models"]["tiny"]["engines"]
    kinds = ["mtp 1/1.5", "mtp 3/1.5", "mtp 3/3"]
    names = [f"{engine} {kind}".strip() for kind in ("", *kinds) for engine in ("allotrope", "vllm")]
    assert list(found) == names and not any(one["error"] for one in found.values())
    # What differs in the length alone is measured in one process.
    assert [name for name in names if not found[name]["start_s"]] == ["allotrope mtp 3/3", "vllm mtp 3/3"]

    # Equal drafts and equal acceptance in both.
    asked = {"method": "mtp", "num_speculative_tokens": 3}
    asked |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    assert found["vllm mtp 3/3"]["options"]["speculative_config"] == asked
    assert found["allotrope mtp 3/3"]["options"]["speculative_config"] == asked | {"adaptive": False}
    assert found["vllm mtp 3/3"]["options"]["disable_log_stats"] is False
    assert "disable_log_stats" not in found["vllm"]["options"]
    for kind, length in zip(kinds, (1.5, 1.5, 3.0), strict=True):
        ours, theirs = (found[f"{name} {kind}"]["cases"]["8/24/2"]["accepted"] for name in ("allotrope", "vllm"))
        assert ours == [pytest.approx(length, abs=0.3)] and theirs == [length]
        # Their tokens mean nothing.
        assert found[f"allotrope {kind}"]["parity_ids"] == []
    assert "accepted" not in found["allotrope"]["cases"]["8/24/2"]

    ratios = report["models"]["tiny"]["ratios"]
    assert {"allotrope / allotrope mtp 3/3", "vllm / vllm mtp 3/3", "vllm mtp 3/3 / allotrope mtp 3/3"} <= ratios.keys()
    without, with_drafts = (found[name]["cases"]["8/24/2"]["tpot_ms"][0] for name in ("allotrope", "allotrope mtp 3/3"))
    gain = ratios["allotrope / allotrope mtp 3/3"]["8/24/2"]["tpot_ms"]
    assert gain == pytest.approx(without / with_drafts)
    assert report["models"]["tiny"]["parity"].keys() == {"vllm"}
    page = out.with_suffix(".md").read_text()
    assert "| case |  | allotrope | vllm | vllm / allotrope |" in page
    assert "| case | drafts | allotrope TPOT ms | tokens a step | without / with | vllm TPOT ms |" in page
    (row,) = (line for line in page.splitlines() if line.startswith("| 8/24/2 | mtp 3/3 |"))
    assert f"| {gain:.2f}× |" in row and row.count("×") == 3


def test_drafts_that_are_right_keep_the_tokens(tmp_path: Path) -> None:
    """Without --accept, and with a draft model: what the engines are asked for, and what is compared."""
    head = tmp_path / "head"
    options = parse(["model", "--speculate", "2", "--draft-model", str(head), "--adaptive"], "")
    (column,) = (Column("allotrope", speculation=one) for one in speculations("eagle3", [2], []) if one)
    asked = engine_options(column, options, str(head))["speculative_config"]
    assert asked == {"method": "eagle3", "num_speculative_tokens": 2, "model": str(head), "adaptive": True}
    assert column.has_own_tokens


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--speculate", "0"], "--speculate [0]"),
        (["--speculate", "2", "2"], "--speculate [2, 2]"),
        (["--accept", "2"], "need --speculate"),
        (["--draft-model", "head"], "need --speculate"),
        (["--drafts-only"], "need --speculate"),
        (["--speculate", "2", "--accept", "3.5"], "from 1 to 3"),
        (["--speculate", "2", "--accept", "0.5"], "from 1 to 3"),
        (["--speculate", "2", "--peers", "sglang"], "neither SGLang"),
        (["--speculate", "2", "--roofline"], "nor --roofline"),
    ],
)
def test_options_of_drafts_are_checked(wrong: list[str], said: str, engine: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as status:
        engine.main(["model", *wrong])
    assert status.value.code == 2
    assert said in capsys.readouterr().err
