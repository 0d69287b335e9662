"""The plan's figures are those of the model and of the caches that the engine allocates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_run import Run

from allotrope.architectures.registry import find_architecture
from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.engine.planning.plan_report import report_model
from allotrope.errors import ConfigError, ModelError
from allotrope.kernels.chip import gpu_count
from allotrope.kernels.chip_figures import FIGURES

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


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def quantized(directory: Path) -> str:
    """A model of which a GPU keeps the experts in FP8, and a CPU does not."""
    tiny = find_architecture({"architectures": ["Qwen3MoeForCausalLM"]}, "").tiny()
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(tiny | sizes | {"quantization_config": FP8}))
    return str(directory)


def test_a_chip_has_its_memory_and_its_way_of_keeping_weights(run: Run, tmp_path: Path) -> None:
    model = quantized(tmp_path)
    _, here = plan(run, model, "--memory", "1GiB", "--device", "cpu", "--dtype", "float16")
    status, there = plan(run, model, "--chip", "h200")
    assert (status, there["fits"], there["quantized"], here["quantized"]) == (0, True, True, False)
    assert there["memory_bytes"] == FIGURES["h200"].memory.value
    assert there["weight_bytes"] < 0.7 * here["weight_bytes"]
    # An architecture stands for its chip; less memory may be given.
    assert plan(run, model, "--chip", "sm_90")[1] == there
    assert plan(run, model, "--chip", "mi355x", "--memory", "1GiB")[1]["memory_bytes"] == 1 << 30
    # Each as its own kernels read them.
    kept = [plan(run, model, "--chip", name)[1]["weight_bytes"] for name in FIGURES]
    assert max(kept) < 0.7 * here["weight_bytes"]
    least = there["decode"]["least"]
    classes = there["decode"]["classes"].values()
    assert least == pytest.approx(sum(one["bytes"] for one in classes) / FIGURES["h200"].bandwidth.value, rel=0.2)
    assert f"at the ceilings of the chip that takes {least * 1e3:.2f} ms" in run("plan", model, "--chip", "h200").stdout
    with pytest.raises(ConfigError, match=r"chip='h900' is not known; allowed: a100, .*gfx950\."):
        run("plan", model, "--chip", "h900")


def test_a_plan_says_from_how_many_tokens_of_a_step_drafts_pay(run: Run, tmp_path: Path) -> None:
    model = quantized(tmp_path)
    lookup = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}', "--max-num-seqs", "64"]
    assert plan(run, model, "--chip", "h200")[1]["decode"]["draft_costs"] == {}
    assert plan(run, model, "--memory", "1GiB", *lookup)[1]["decode"]["draft_costs"] == {}
    costs = plan(run, model, "--chip", "h200", *lookup)[1]["decode"]["draft_costs"]
    # 64 requests with 5 drafts each would be more rows than a decode step has.
    assert {requests: list(found) for requests, found in costs.items()} == {
        **{requests: ["1", "2", "3", "5"] for requests in ("1", "4", "16")},
        "64": ["1", "2", "3"],
    }
    for found in costs.values():
        values = list(found.values())
        # Drafts are rows more: never free, and never as dear as steps of their own, which read all weights again.
        assert values[0] > 1 and values == sorted(values)
        assert all(cost < 1 + int(count) for count, cost in found.items())
    # Of few requests each row reads experts of its own; more share them.
    assert costs["1"]["1"] > costs["64"]["1"]
    shown = run("plan", model, "--chip", "h200", *lookup).stdout
    lines = shown[shown.index("drafts pay where") :].splitlines()
    assert lines[1].split() == ["requests", "1", "draft", "2", "drafts", "3", "drafts", "5", "drafts"]
    assert lines[2].split() == ["1", *(f"{cost:.2f}" for cost in costs["1"].values())]
    assert lines[5].split()[-1] == "-"


def test_passes_of_a_draft_model_count(run: Run, tmp_path: Path) -> None:
    tiny = find_architecture({"architectures": ["Qwen3NextForCausalLM"]}, "").tiny()
    (tmp_path / "config.json").write_text(json.dumps(tiny | {"torch_dtype": "bfloat16"}))
    given = (str(tmp_path), "--chip", "h200", "--load-format", "dummy", "--speculative-config")
    drafted, looked_up = (
        plan(run, *given, json.dumps({"method": method, "num_speculative_tokens": 2}))[1]["decode"]["draft_costs"]
        for method in ("mtp", "ngram")
    )
    assert drafted.keys() == looked_up.keys() >= {"1", "4", "16", "64"}
    assert all(drafted[one][count] > looked_up[one][count] for one in drafted for count in drafted[one])


def test_layouts_are_compared_and_one_is_proposed(run: Run, tmp_path: Path) -> None:
    model = quantized(tmp_path)
    status, found = plan(run, model, "--chip", "h200", "--gpus", "4", "--context", "64")
    assert (status, found["fits"], found["gpus"], found["hosts"]) == (0, True, 4, 1)
    shown = {one["options"]: one for one in found["layouts"]}
    assert len(shown) == 11 and all(one["reason"] for one in found["layouts"])
    refused = {options for options, one in shown.items() if one["refusal"] is not None}
    assert refused == {"--pipeline-parallel-size 4"} and "3 layers" in shown["--pipeline-parallel-size 4"]["reason"]
    proposed = [one for one in found["layouts"] if {key: one[key] for key in found["proposed"]} == found["proposed"]]
    assert len(proposed) == 1 and len(proposed[0]["decode"]) == 4
    assert set(found["best"]) == {"4", "16", "64", "256"}
    assert [one["requests"] for one in proposed[0]["decode"]] == found["requests"]
    text = run("plan", model, "--chip", "h200", "--gpus", "4", "--context", "64").stdout
    assert "\nlayout " in text and f"\nproposed: {proposed[0]['options']}: it holds" in text
    assert "\nbest with 4 requests: DP4, " in text and "\n  PP4: pipeline_parallel_size=4 (needs 3 or fewer" in text


def test_sizes_that_are_given_choose_among_layouts(run: Run, tmp_path: Path) -> None:
    model = quantized(tmp_path)
    some = plan(run, model, "--chip", "h200", "--gpus", "4", "-dp", "2")[1]["layouts"]
    assert {(one["tensor"], one["data"], one["pipeline"], one["expert_parallel"]) for one in some} == {
        (2, 2, 1, False), (2, 2, 1, True), (1, 2, 2, False), (1, 2, 2, True),
    }  # fmt: skip
    longer = ("--hf-overrides", '{"max_position_embeddings": 2048}', "--context", "1K")
    found = plan(run, model, "--chip", "h200", "-dp", "2", "-ep", *longer)[1]
    assert found["context"] == 1024
    (one,) = found["layouts"]
    assert one["options"] == "--data-parallel-size 2 --enable-expert-parallel"
    # Experts of a stage of one rank are whole anyway: no layout of its own, and yet one that is served.
    found = plan(run, model, "--chip", "h200", "-pp", "2", "-ep", "--context", "64")[1]
    assert [one["options"] for one in found["layouts"]] == ["--pipeline-parallel-size 2 --enable-expert-parallel"]
    with pytest.raises(ConfigError, match="gpus=4 have no layout with tensor_parallel_size=1, data_parallel_size=3"):
        run("plan", model, "--chip", "h200", "--gpus", "4", "-dp", "3")
    if gpu_count() == 0:
        with pytest.raises(ConfigError, match=r"layouts are planned for a chip, .* give --chip, one of a100, "):
            run("plan", model, "-dp", "2")
    drafts = '{"method": "ngram", "num_speculative_tokens": 2}'
    with pytest.raises(ConfigError, match="layouts are compared without drafts"):
        run("plan", model, "--chip", "h200", "--gpus", "4", "--speculative-config", drafts)
    with pytest.raises(ConfigError, match="hosts=3 do not share gpus=4 evenly"):
        run("plan", model, "--chip", "h200", "--gpus", "4", "--hosts", "3")


def test_layouts_are_compared_for_what_the_engine_serves(run: Run) -> None:
    asked = ("bench/configs/gpt_oss_120b", "--chip", "h200", "--gpus", "2")
    limits = "--max-num-seqs", "40", "--max-model-len", "4096"
    result = run("plan", *asked, *limits)
    assert result.exit_code == 0 and "ms per token of 4, 16 requests that each see 4096 tokens" in result.stdout
    with pytest.raises(ConfigError, match="context=4097; sequences have at most 4096 tokens"):
        run("plan", *asked, *limits, "--context", "4097")
    # Three hosts have places for 20, and do not share them evenly.
    assert "on 4 hosts" in run("plan", *asked[:-1], "20").stdout


def test_options_of_a_comparison_need_one(run: Run, tmp_path: Path) -> None:
    model = quantized(tmp_path)
    for options, named in (
        (["--context", "77"], "context=77;"),
        (["--hosts", "3"], "hosts=3;"),
        (["--hosts", "1", "--context", "8192"], "hosts=1, context=8192;"),
    ):
        with pytest.raises(ConfigError, match=f"{named} only a comparison of layouts reads that. Give --gpus"):
            run("plan", model, "--chip", "h200", *options)
        with pytest.raises(ConfigError, match=named):
            run("plan", model, "--chip", "h200", "-tp", "2", *options)


def test_layouts_that_do_not_fit_end_with_one(run: Run, tmp_path: Path) -> None:
    model = quantized(tmp_path)
    status, found = plan(run, model, "--chip", "h200", "--gpus", "2", "--memory", "1MiB")
    assert (status, found["fits"], found["proposed"]) == (1, False, None)
    assert all(one["refusal"].startswith("does not fit: ") for one in found["layouts"])
    assert run("plan", model, "--chip", "h200", "--gpus", "2", "--memory", "1MiB").stdout.count("does not fit") == 5
