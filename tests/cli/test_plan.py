"""The plan's figures are those of the model and of the caches that the engine allocates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_run import Run

from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.engine.plan_report import report_model
from allotrope.errors import ConfigError, ModelError

# Of the tiny model: embedding and head, two layers (q, k, v, o; gate, up, down; two norms), the last norm; float32.
WEIGHTS = 4 * (2 * 320 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64)
# Keys and values of two layers with two heads of 16.
ROW = 4 * 2 * 2 * 2 * 16


def plan(run: Run, *args: Any) -> tuple[int, dict[str, Any]]:
    result = run("plan", *args, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_plan_counts_weights_and_rows(run: Run, dummy: list[str]) -> None:
    status, found = plan(run, *dummy, "--memory", "1GiB", "--page-size", "8")
    assert (status, found["fits"], found["refusal"]) == (0, True, None)
    assert found["weight_bytes"] == WEIGHTS
    (group,) = found["groups"]
    assert (group["layers"], group["row_bytes"], group["page_tokens"], group["page_bytes"]) == (2, ROW, 8, 8 * ROW)
    assert group["bytes"] == group["pages"] * 8 * ROW == found["cache_bytes"] <= 32_000_000
    assert found["tokens"] <= group["tokens"] == (group["pages"] - 1) * 8


def test_plan_is_what_the_engine_allocates(dummy: list[str]) -> None:
    config = EngineConfig(model=dummy[0], load_format="dummy", kv_cache_memory_bytes=32_000_000)
    engine, report = Engine(config), report_model(config)
    assert [group.pages for group in report.groups] == [group.pages for group in engine.memory.groups]
    assert report.tokens == engine.memory.tokens
    summary = engine.report().model_summary()
    assert [(group.label, group.pages, group.bytes) for group in summary.groups] == [
        (label, group.pages, group.bytes)
        for label, group in zip(engine.stats().pages_total, engine.memory.groups, strict=True)
    ]
    assert (summary.weight_bytes, summary.cache_bytes) == (WEIGHTS, engine.memory.bytes)
    engine.close()


def test_the_summary_counts_requests_that_fit_at_full_length(dummy: list[str]) -> None:
    """Caches for three and a half requests of full length serve three, whatever the batch may hold."""
    config = EngineConfig(
        model=dummy[0], load_format="dummy", kv_cache_memory_bytes=7 * 256 * ROW, max_model_len=512, max_num_seqs=16
    )
    report = report_model(config)
    assert (report.sequences, report.full_length_sequences) == (16, 3)
    assert "3 request(s) of 512 at a time (at most 16 requests)" in report.summary()[1]
    assert "3 of full length at a time" in "\n".join(report.lines())


def test_ranks_share_weights_and_rows(run: Run, dummy: list[str]) -> None:
    _, alone = plan(run, *dummy, "--memory", "1GiB")
    _, shared = plan(run, *dummy, "--memory", "1GiB", "-tp", "2")
    norms = 4 * (2 * 2 * 64 + 64)
    assert shared["weight_bytes"] == (alone["weight_bytes"] - norms) // 2 + norms
    assert shared["groups"][0]["row_bytes"] == ROW // 2
    assert shared["ranks"] == 2


def test_plan_says_what_ranks_hold_and_which_are_allowed(run: Run, dummy: list[str]) -> None:
    _, found = plan(run, *dummy, "--memory", "1GiB", "-tp", "2", "--max-num-seqs", "3")
    ranks, norms = found["tensor_parallel"], 4 * (2 * 2 * 64 + 64)
    held = ranks["weights"].values()
    assert sum(sum(share.values()) for share in held) == found["weight_bytes"]
    assert ranks["weights"]["norms"] == {"sharded": 0, "copied": 0, "replicated": norms}
    assert [one["ranks"] for one in ranks["sizes"]] == [1, 2, 4]
    assert {one["of"]: one["count"] for one in ranks["collectives"]} == {
        "embeddings": 1, "mixers": 2, "feed-forward blocks": 2, "logits": 1,
    }  # fmt: skip
    text = run("plan", *dummy, "--memory", "1GiB", "-tp", "2").stdout
    assert "\nweights of each of 2 ranks " in text and "\nrefused for 3, 5-16, 32, 64 ranks: num_attention" in text
    alone = run("plan", *dummy, "--memory", "1GiB").stdout
    assert "weights of each of" not in alone.partition("\nranks ")[0] and "\n4 " in alone
    with pytest.raises(ModelError, match="num_attention_heads=4 is not a multiple of tensor_parallel_size=3"):
        run("plan", *dummy, "-tp", "3")


def test_a_model_that_does_not_fit_names_a_remedy(run: Run, tiny: Path) -> None:
    model = [tiny, "--load-format", "dummy"]
    status, found = plan(run, *model, "--memory", WEIGHTS - 1)
    assert (status, found["fits"]) == (1, False)
    assert found["refusal"].startswith(f"the weights do not fit: they take {WEIGHTS} bytes")
    assert found["refusal"].endswith("--tensor-parallel-size 2.")
    advised = [*model, "--memory", WEIGHTS - 1, "--tensor-parallel-size", 2, "--max-num-seqs", 1]
    assert plan(run, *advised)[0] == 0

    status, found = plan(run, *model, "--memory", WEIGHTS + 100 * ROW, "-tp", "4", "--memory-utilization", "0.01")
    assert status == 1
    assert "--max-model-len" in found["refusal"] or "--kv-cache-memory-bytes" in found["refusal"]


def test_the_printed_plan_has_each_group_and_the_verdict(run: Run, dummy: list[str]) -> None:
    good = run("plan", *dummy, "--memory", "1GiB").stdout
    assert "LlamaForCausalLM" in good
    assert any(line.startswith("paged") for line in good.splitlines())
    assert good.endswith("\nfits\n")
    bad = run("plan", *dummy, "--memory", "100K")
    assert bad.exit_code == 1
    assert "\ndoes not fit: " in bad.stdout


def test_impossible_options_are_refused(run: Run, dummy: list[str]) -> None:
    with pytest.raises(ConfigError, match="max_model_len=9999"):
        run("plan", *dummy, "--max-model-len", "9999")


def test_weights_too_large_for_any_cache_ask_for_ranks_alone(run: Run, dummy: list[str]) -> None:
    """No size of caches helps where the weights alone do not fit."""
    status, found = plan(run, *dummy, "--memory", str(WEIGHTS * 3 // 4), "--kv-cache-memory-bytes", str(1 << 20))
    assert (status, found["fits"]) == (1, False)
    assert "--kv-cache-memory-bytes" not in found["refusal"]
    roomy = plan(run, *dummy, "--memory", str(WEIGHTS + (1 << 19)), "--kv-cache-memory-bytes", str(1 << 20))[1]
    assert f"Try --kv-cache-memory-bytes {1 << 19}." in roomy["refusal"]
