"""The agent trace: what its turns find in the prefix cache of a hybrid model, and that drafts change no token."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import load_script

from allotrope.engine.kv_cache_manager import KVCacheManager
from allotrope.engine.sequence import Sequence

MODEL = Path(__file__).parents[2] / "train" / "models" / "qwen3_next"
SMALL = {"threads": 1, "dtype": "float32", "max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 26}


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = load_script("agent_trace")
    monkeypatch.setattr(found, "SYSTEM_FILES", 2)
    return found


def test_ten_turns_hit_what_is_reusable_and_drafts_change_no_token(
    trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[int] = []
    allocate = KVCacheManager.allocate

    def recorded(self: KVCacheManager, seq: Sequence) -> bool:
        done = allocate(self, seq)
        resumed.append(seq.replay)
        return done

    monkeypatch.setattr(KVCacheManager, "allocate", recorded)
    command = [str(MODEL), "--device", "cpu", "--answer", "80", "--options", json.dumps(SMALL)]
    assert trace.main([*command, "--out", str(tmp_path / "found")]) == 0
    report = json.loads((tmp_path / "found.json").read_text())
    assert list(report["turns"]) == ["none", "mtp", "suffix", "ngram"]
    for method, turns in report["turns"].items():
        assert len(turns) == 10 and all(len(turn["answer"]) == 80 for turn in turns)
        # Units of 16 tokens: the tokens of the turn before, but for the last one, which was not run.
        for former, turn in itertools.pairwise(turns):
            assert turn["reusable"] == (former["prompt"] + 79) // 16 * 16 >= turn["hit"]
        rate = sum(turn["hit"] for turn in turns[1:]) / sum(turn["reusable"] for turn in turns[1:])
        assert rate >= 0.95 and turns[0]["hit"] == 0
        assert (sum(turn["accepted"] for turn in turns) > 0) == (method != "none")
    # Some turns begin with a state that lacks drafts.
    assert max(resumed) > 0
    page = (tmp_path / "found.md").read_text()
    assert page.count("| yes |") == 40 and "## ngram" in page

    # The cache changes no token either.
    options = trace.argparse.Namespace(
        answer=80, device="cpu", drafts=3, options=SMALL | {"enable_prefix_caching": False}
    )
    cold = trace.run_method(MODEL, "ngram", trace.generated_messages(0, 10), options)
    assert [turn.answer for turn in cold] == [turn["answer"] for turn in report["turns"]["ngram"]]
    assert trace.hit_rate(cold) == 0


def test_few_hits_and_other_tokens_are_faults(trace: Any) -> None:
    turn = {"prompt": 20, "reusable": 0, "hit": 0, "answer": [1], "verified": 0, "accepted": 0, "seconds": 0.1}
    later = turn | {"prompt": 40, "reusable": 32, "hit": 32, "answer": [2]}
    right = {"none": [turn, later], "mtp": [turn, later]}
    assert trace.faults({"turns": right}, 0.95) == []
    wrong = {"none": [turn, later], "mtp": [turn, later | {"hit": 16}], "ngram": [turn, later | {"answer": [3]}]}
    assert trace.faults({"turns": wrong}, 0.95) == [
        "mtp: 50.0% of what was reusable was hit (--least-hit 0.95)",
        "ngram: tokens differ from those without speculative decoding in turns [2]",
    ]


def test_the_shortest_recorded_session_that_is_long_enough(trace: Any, tmp_path: Path) -> None:
    def session(*texts: str) -> dict[str, Any]:
        roles = ("user", "assistant")
        return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}

    file = tmp_path / "cases.json"
    short, long = session("a", "x"), session("bb", "x", "cc", "x", "dd")
    file.write_text(json.dumps({"cases": [short, session("e" * 9, "x", "f" * 9), long]}))
    assert trace.recorded_messages(file, 2) == ["\nuser: bb\n", "\nuser: cc\n"]
    assert len(trace.recorded_messages(file, 3)) == 3
    with pytest.raises(SystemExit, match="no session has 4 turns; the longest has 3"):
        trace.recorded_messages(file, 4)
