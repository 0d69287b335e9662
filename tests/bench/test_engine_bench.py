"""The engine bench without a GPU: a run leaves its numbers and tables, whatever becomes of an engine."""

from __future__ import annotations

import json
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peer_packages import SGLANG, VLLM
from random_models import tiny

from bench.engine import report as engine_report
from bench.engine.measuring import await_signal, distinct_share, leave_word
from bench.engine.worker_process import EngineFailed

CASES = ["16/4/2", "8/3/1"]


def test_share_of_tokens_that_differ() -> None:
    assert distinct_share([[1, 2, 3, 4]]) == 1
    assert distinct_share([[1, 2], [1, 3], [1, 3], [1, 4]]) == (1 / 4 + 3 / 4) / 2


def test_a_run_leaves_numbers_a_table_and_what_failed(engine: Any, weights: Any, tmp_path: Path) -> None:
    model, out = tmp_path / "tiny", tmp_path / "found"
    weights.write_checkpoint(tiny("LlamaForCausalLM"), model)
    small = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 128, "max_num_seqs": 4}
    command = [str(model), "--cases", ",".join(CASES), "--runs", "2", "--our-options", json.dumps(small)]
    command += ["--forced", "9,40"]
    assert engine.main([*command, "--peer-python", "false", "--out", str(out)]) == 1
    report = json.loads(out.with_suffix(".json").read_text())
    found = report["models"]["tiny"]["engines"]
    assert "ended with code 1" in found["vllm"]["error"] and found["allotrope"]["error"] is None
    ours = found["allotrope"]
    assert len(ours["start_s"]) == 1 and [len(ids) for ids in ours["parity_ids"]] == [16, 16] and ours["kv_tokens"] > 0
    assert [[len(step) >= 8 for step in steps] for steps in ours["forced"]] == [[True] * 16] * 2
    assert list(ours["cases"]) == CASES
    for case in ours["cases"].values():
        assert {key: len(values) for key, values in case.items()} == dict.fromkeys(
            ("prefill_s", "total_s", "tpot_ms", "tokens_per_s", "distinct"), 2
        )
        assert all(0 < share <= 1 for share in case["distinct"])
    assert report["commands"][0].startswith("python bench/engine.py tiny --cases") and str(tmp_path) not in str(report)
    page = out.with_suffix(".md").read_text()
    assert "| 16/4/2 | TPOT ms |" in page and "**vllm did not finish**" in page

    # A later run of the peer, twice as slow, parting after five tokens and a quarter off everywhere, is joined.
    slow = {key: [2 * value for value in values] for key, values in ours["cases"]["16/4/2"].items()}
    peer = ours | {
        "options": found["vllm"]["options"],
        "cases": {"16/4/2": slow},
        "start_s": [4 * ours["start_s"][0]],
        "forced": [[{id: value - 0.25 for id, value in step.items()} for step in steps] for steps in ours["forced"]],
        "parity_ids": [ours["parity_ids"][0], [*ours["parity_ids"][1][:5], -1, *ours["parity_ids"][1][6:]]],
    }
    later = report | {"models": {"tiny": report["models"]["tiny"] | {"engines": {"vllm": peer}}}}
    (tmp_path / "later.json").write_text(json.dumps(later))
    merge = ["--merge", str(out.with_suffix(".json")), str(tmp_path / "later.json"), "--out", str(tmp_path / "both")]
    assert engine.main(merge) == 0
    whole = json.loads((tmp_path / "both.json").read_text())["models"]["tiny"]
    assert whole["parity"] == {"vllm": [16, 5]}
    assert whole["apart"]["allotrope with each text alone"]["most"] < 1e-3
    assert whole["apart"]["vllm"] == pytest.approx({"places": 32, "median": 0.25, "most": 0.25})
    assert whole["ratios"]["vllm / allotrope"] == {"start_s": 4.0, "16/4/2": {"prefill_s": 2.0, "tpot_ms": 2.0}}
    page = (tmp_path / "both.md").read_text()
    assert "2.00×" in page and page.rstrip().endswith("`") and "| tiny | vllm / allotrope |" not in page
    assert not find_spec("matplotlib") or (tmp_path / "both.png").stat().st_size > 1000

    # With the plugin's host as well there is a row for each pair.
    hosted = later | {"models": {"tiny": later["models"]["tiny"] | {"engines": {"vllm+allotrope": peer}}}}
    (tmp_path / "hosted.json").write_text(json.dumps(hosted))
    assert engine.main([*merge[:3], str(tmp_path / "hosted.json"), "--out", str(tmp_path / "all")]) == 0
    page = (tmp_path / "all.md").read_text()
    assert page.count("| tiny | ") == 3 and "| tiny | vllm / vllm+allotrope | 1.00× |" in page

    other = later | {"models": {"tiny": later["models"]["tiny"] | {"digest": "another"}}}
    (tmp_path / "later.json").write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="not the same checkpoint"):
        engine.main(merge)


def test_each_peer_has_its_own_packages_options_and_ranks(engine: Any, weights: Any, tmp_path: Path) -> None:
    """The peers are packages with the names and arguments that the bench uses, each in a folder of its own."""
    model, out = tmp_path / "tiny", tmp_path / "found"
    weights.write_checkpoint(tiny("LlamaForCausalLM"), model)
    for name, text in (("vllm", VLLM), ("sglang", SGLANG)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(text)
    names = ["vllm", "vllm+allotrope", "sglang", "sglang+allotrope"]
    command = [str(model), "--engines", *names, "--cases", "8/3/2", "--runs", "1"]
    command += ["--peer-path", f"vllm={tmp_path / 'vllm'}", f"sglang={tmp_path / 'sglang'}", "--forced", "5,7"]
    command += ["--peer-options", '{"seed": 1}', "--peer-options", 'sglang={"attention_backend": "fa3"}']
    assert engine.main([*command, "--tensor-parallel-size", "1", "2", "--out", str(out)]) == 0
    report = json.loads(out.with_suffix(".json").read_text())
    assert str(tmp_path) not in str(report) and "vllm=vllm sglang=sglang" in report["commands"][0]
    found = report["models"]["tiny"]["engines"]
    assert list(found) == [*names, *(f"{name} TP2" for name in names)]

    sglang = json.loads((tmp_path / "sglang" / "sglang.json").read_text())
    assert sglang == found["sglang+allotrope TP2"]["options"] == found["sglang TP2"]["options"]
    assert found["sglang"]["options"]["tp_size"] == 1
    assert {"tp_size": 2, "attention_backend": "fa3", "disable_radix_cache": True}.items() <= sglang.items()
    assert not sglang.keys() & {"seed", "tensor_parallel_size", "max_model_len"}
    assert found["sglang"]["kv_tokens"] == 77 and found["sglang"]["environment"]["version"].startswith("0.1")
    vllm, plugin = json.loads((tmp_path / "vllm" / "vllm.json").read_text())
    assert vllm == found["vllm+allotrope TP2"]["options"] and plugin == "1"
    assert {"tensor_parallel_size": 2, "seed": 1}.items() <= vllm.items()
    assert "tensor_parallel_size" not in found["vllm"]["options"] and found["vllm"]["kv_tokens"] == 64

    # Of a prompt of 5 and 16 forced tokens: those of tokens 5 to 20, as the others have those of 16 decode steps.
    forced = found["sglang"]["forced"]
    assert [[next(iter(step.values())) for step in steps] for steps in forced] == [
        [-at for at in range(length, length + 16)] for length in (5, 7)
    ]
    assert [len(steps) for steps in found["vllm"]["forced"]] == [16, 16]
    assert (found["sglang"]["forced_by"], found["vllm"]["forced_by"]) == ("prefill", "decode")
    pairs = [f"{host}{ranks} / {host}+allotrope{ranks}" for ranks in ("", " TP2") for host in ("vllm", "sglang")]
    assert f"| {' | '.join(pairs)} |" in out.with_suffix(".md").read_text()


def test_runs_of_engines_are_interleaved(
    engine: Any, weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails is left out from there on, and keeps what it had."""
    model, out, runs = tmp_path / "tiny", tmp_path / "found", tmp_path / "runs"
    weights.write_checkpoint(tiny("LlamaForCausalLM"), model)
    (tmp_path / "sglang.py").write_text(SGLANG)
    monkeypatch.setenv("RUNS", str(runs))
    command = [str(model), "--engines", "sglang", "sglang+allotrope", "--cases", "8/4/2,8/4/3", "--runs", "2"]
    command += ["--peer-path", str(tmp_path), "--forced", "5", "--interleave", "--out", str(out)]
    assert engine.main(command) == 1
    found = json.loads(out.with_suffix(".json").read_text())["models"]["tiny"]["engines"]
    assert list(found["sglang"]["cases"]) == ["8/4/2", "8/4/3"] and found["sglang"]["error"] is None
    assert list(found["sglang+allotrope"]["cases"]) == ["8/4/2"] and "too many" in found["sglang+allotrope"]["error"]
    made = runs.read_text().split("\n")
    begin = made.index("0 2/4")
    # Both warm up, then each measures prefill and the whole, twice.
    turn = ["2/1", "2/4"]
    wanted = [f"{who} {run}" for who in "01" for run in ("2/4", "2/1")]
    wanted += [f"{who} {run}" for _ in range(2) for who in "01" for run in turn]
    assert made[begin : begin + len(wanted)] == wanted
    assert "1 3/1" not in made and made.count("0 3/4") == 3


def test_ranks_and_peers_are_compared_with_ours() -> None:
    found: dict[str, Any] = {
        name: {"start_s": [start], "parity_ids": [[1, 2, start]], "forced": [[{"5": -float(start)}]], "cases": {}}
        for name, start in [("allotrope", 2), ("vllm", 4), ("sglang", 6), ("allotrope TP2", 1), ("sglang TP2", 9)]
    }
    found["sglang"]["forced_by"] = "prefill"
    model = engine_report.summarize({"models": {"tiny": {"engines": found}}})["models"]["tiny"]
    assert {pair: one["start_s"] for pair, one in model["ratios"].items()} == {
        "vllm / allotrope": 2.0,
        "sglang / allotrope": 3.0,
        "allotrope / allotrope TP2": 2.0,
        "sglang TP2 / allotrope TP2": 9.0,
    }
    assert model["parity"] == {"vllm": [2], "sglang": [2], "allotrope TP2": [2], "sglang TP2": [2]}
    assert {who: one["most"] for who, one in model["apart"].items()} == {
        "vllm": 2.0,
        "sglang": 4.0,
        "allotrope TP2": 1.0,
        "sglang TP2": 8.0,
    }
    for one in found.values():
        one |= {"environment": {}, "kv_tokens": None, "memory": {}, "options": {}, "error": None}
    settings = {"prefix_caching": False, "runs": 1, "parity_tokens": 3}
    page = engine_report.page(
        {"settings": settings, "date": "today", "commands": [], "models": {"tiny": model | {"described": "Small."}}}
    )
    assert "- allotrope and sglang (by a prefill), logprobs of forced texts: they differ by 4.000" in page
    assert "- allotrope TP2 and sglang TP2: equal leading tokens of 3, by prompt: 2." in page


def test_cases_that_caches_do_not_hold_are_not_compared() -> None:
    """Two requests of 24 tokens: their times have the wait of one for the other."""
    times = {key: [2.0] for key in engine_report.MEASURES}
    one = {"start_s": [1.0], "cases": {"16/8/1": times, "16/8/2": times}, "error": None, "parity_ids": []}
    one |= {"environment": {}, "memory": {}, "options": {}}
    holds, waits = one | {"kv_tokens": 48}, one | {"kv_tokens": 47}
    for pair in ((holds, waits), (waits, holds)):
        assert engine_report.ratios(*pair).keys() == {"start_s", "16/8/1"}
    assert engine_report.ratios(holds, one | {"kv_tokens": None}).keys() == {"start_s", "16/8/1", "16/8/2"}
    engines = {"allotrope": holds, "vllm": waits}
    settings = {"prefix_caching": False, "runs": 1, "parity_tokens": 3}
    model = {"engines": engines, "described": "Small."}
    report = {"settings": settings, "date": "today", "commands": [], "models": {"tiny": model}}
    page = engine_report.page(engine_report.summarize(report))
    assert "- vllm: requests of 16/8/2 waited for others" in page and "- allotrope: requests of" not in page


@pytest.mark.parametrize(
    "wrong",
    [
        ["--peer-path", "vllm=a", "vllm=b"],
        ["--peer-path", "a", "--peer-path", "b"],
        ["--peer-options", "sglang={"],
        ["--tensor-parallel-size", "2", "2"],
        ["--tensor-parallel-size", "0"],
        ["--tensor-parallel-size", "2", "--roofline"],
        ["--layouts", "TP2+XP2"],
        ["--layouts", "TP2", "DP2", "TP2"],
        ["--layouts", "DP2", "--roofline"],
        ["--layouts", "TP2+EP", "--engines", "sglang"],
        ["--our-options", '{"data_parallel_size": 2}'],
        ["--peer-options", 'vllm={"enable_expert_parallel": true}'],
    ],
)
def test_options_of_peers_and_ranks_are_checked(wrong: list[str], engine: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as status:
        engine.main(["model", *wrong])
    assert status.value.code == 2
    assert f"error: {wrong[0]} " in capsys.readouterr().err


def test_an_engine_that_takes_too_long_is_killed(engine: Any, weights: Any, tmp_path: Path) -> None:
    weights.write_checkpoint(tiny("LlamaForCausalLM"), tmp_path / "tiny")
    command = [str(tmp_path / "tiny"), "--engines", "allotrope", "--limit", "0.3", "--out", str(tmp_path / "found")]
    assert engine.main(command) == 1
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["models"]["tiny"]["engines"]["allotrope"]["error"] == "killed after --limit 0.3 s"


def test_an_engine_that_takes_too_long_to_start_is_killed_and_not_waited_for(
    engine: Any, weights: Any, tmp_path: Path
) -> None:
    weights.write_checkpoint(tiny("LlamaForCausalLM"), tmp_path / "tiny")
    command = [str(tmp_path / "tiny"), "--engines", "allotrope", "--out", str(tmp_path / "found")]
    assert engine.main([*command, "--start-limit", "0.3", "--signal", str(tmp_path / "go")]) == 1
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["models"]["tiny"]["engines"]["allotrope"]["error"] == "killed after --start-limit 0.3 s"
    assert (tmp_path / "go.tiny_allotrope").exists() and not (tmp_path / "go").exists()


def test_engines_wait_for_the_signal_to_be_measured(tmp_path: Path) -> None:
    signal = tmp_path / "go"
    leave_word(signal, Path("/weights/model"), "vllm mtp 3/1.8")
    assert (tmp_path / "go.model_vllm_mtp_3_1_8").exists()
    waiting = threading.Thread(target=await_signal, args=(signal, SimpleNamespace(late="")))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()
    signal.touch()
    waiting.join(timeout=10)
    assert not waiting.is_alive()
    signal.unlink()
    with pytest.raises(EngineFailed, match="killed after --limit 7 s, waiting for go"):
        await_signal(signal, SimpleNamespace(late="killed after --limit 7 s"))
