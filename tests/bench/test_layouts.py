"""Layouts of ranks as columns of the engine bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peer_packages import VLLM
from random_models import tiny

from allotrope.rank_layout import RankLayout
from bench.engine import report as engine_report
from bench.engine.options import engine_options, parse
from bench.engine.report import Column


def test_layouts_exclude_ranks_and_engines_that_would_go_on(
    engine: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        engine.main(["model", "--tensor-parallel-size", "2", "--layouts", "DP2"])
    assert "--layouts: not allowed with argument --tensor-parallel-size" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert parse(["model", "--layouts", "DP2", "--engines", "allotrope"], "").layouts == [RankLayout(1, 2)]
    with pytest.raises(SystemExit):
        engine.main(["model", "--layouts", "TP2", "DP2", "--engines", "vllm"])
    assert "--layouts TP2 DP2: vLLM's data-parallel engines" in capsys.readouterr().err


def test_each_engine_takes_all_requests_of_a_case_in_every_layout() -> None:
    options = parse(["model", "--cases", "8/3/2,8/3/300"], "")
    found = {
        f"{name} {layout.name}": engine_options(Column(name, layout), options, None)
        for name in ("allotrope", "vllm")
        for layout in (RankLayout(2, expert_parallel=True), RankLayout(1, 2))
    }
    for name in ("allotrope", "vllm"):
        tensor, data = found[f"{name} TP2 EP"], found[f"{name} DP2"]
        assert {
            "tensor_parallel_size": 2,
            "enable_expert_parallel": True,
            "max_num_seqs": 300,
        }.items() <= tensor.items()
        assert {"data_parallel_size": 2, "max_num_seqs": 150}.items() <= data.items()
        assert (
            "data_parallel_size" not in tensor and not {"tensor_parallel_size", "enable_expert_parallel"} & data.keys()
        )
    assert engine_options(Column("sglang"), options, None)["max_running_requests"] == 300


def test_layouts_are_compared_with_the_same_layout_of_ours() -> None:
    layouts = ["TP2", "TP2 EP", "DP2 EP"]
    engines: dict[str, Any] = {f"{name} {layout}": {} for name in ("allotrope", "vllm") for layout in layouts}
    pairs = [(f"allotrope {layout}", f"vllm {layout}") for layout in layouts]
    assert engine_report.compared_pairs(engines) == pairs
    own = [(f"allotrope {layout}", "allotrope") for layout in layouts]
    assert engine_report.compared_pairs(engines | {"allotrope": {}}) == own + pairs


def test_layouts_of_a_peer_are_columns(engine: Any, weights: Any, tmp_path: Path) -> None:
    model, out = tmp_path / "tiny", tmp_path / "found"
    weights.write_checkpoint(tiny("LlamaForCausalLM"), model)
    (tmp_path / "vllm.py").write_text(VLLM)
    command = [str(model), "--engines", "vllm", "--peer-path", str(tmp_path), "--cases", "8/3/3", "--runs", "1"]
    assert engine.main([*command, "--layouts", "TP2+EP", "DP2", "--forced", "5", "--out", str(out)]) == 0
    found = json.loads(out.with_suffix(".json").read_text())["models"]["tiny"]["engines"]
    assert [(name, one["ranks"], one["kv_tokens"]) for name, one in found.items()] == [
        ("vllm TP2 EP", 2, 64),
        ("vllm DP2", 2, 128),
    ]
    # It is told by its environment instead.
    assert found["vllm DP2"]["options"]["data_parallel_size"] == 2
    assert "data_parallel_size" not in json.loads((tmp_path / "vllm.json").read_text())[0]
    page = out.with_suffix(".md").read_text()
    assert "|  | tokens of context that fit | 64 | 128 |" in page and "| 8/3/3 | TPOT ms |" in page
