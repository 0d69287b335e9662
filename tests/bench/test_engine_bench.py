"""The engine bench without a GPU: random checkpoints load and generate, and a run leaves its numbers and tables."""

from __future__ import annotations

import json
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_scripts import BENCH, load_script

from allotrope import LLM, SamplingParams
from allotrope.architectures.eagle3 import is_eagle3
from allotrope.architectures.registry import find_architecture, read_spec
from allotrope.errors import ConfigError
from allotrope.rank_layout import RankLayout
from bench.engine import report as engine_report
from bench.engine import roofline_report
from bench.engine.measuring import await_signal, distinct_share, leave_word, random_prompts
from bench.engine.options import engine_options, parse, speculations
from bench.engine.report import Column
from bench.engine.worker_process import EngineFailed

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
KEPT = {"modules_to_not_convert": ["lm_head", "model.layers.*.mlp.gate"]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
CASES = ["16/4/2", "8/3/1"]


def tiny(architecture: str, quantization: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    config = find_architecture({"architectures": [architecture]}, "test").tiny() | more
    return config if quantization is None else config | {"quantization_config": quantization}


@pytest.fixture
def weights() -> Any:
    from bench import random_weights

    return random_weights


@pytest.fixture
def engine() -> Any:
    return load_script("engine")


def tokens(directory: Path, **more: Any) -> list[list[int]]:
    llm = LLM(str(directory), device="cpu", dtype="float32", max_model_len=64, max_num_seqs=2, threads=1, **more)
    try:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate([[5, 6, 7, 8], [9, 10, 11]], params)]
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (tiny("Qwen3MoeForCausalLM", FP8 | KEPT), "model.layers.0.mlp.experts.7.up_proj.weight"),
        (tiny("Qwen3NextForCausalLM", FP8), "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        (tiny("DeepseekV32ForCausalLM", FP8 | {"scale_fmt": "ue8m0"}), "model.layers.2.self_attn.kv_b_proj.weight"),
        (tiny("DeepseekV4ForCausalLM", FP8, expert_dtype="fp4"), "layers.3.ffn.experts.7.w2.weight"),
        (tiny("DeepseekV4ForCausalLM", FP8, expert_dtype="fp8"), "layers.0.attn.wo_a.weight"),
        (tiny("GptOssForCausalLM", MXFP4), "model.layers.3.mlp.experts.gate_up_proj_blocks"),
        (tiny("Gemma4ForCausalLM"), "model.layers.0.self_attn.q_proj.weight"),
    ],
    ids=["qwen3 moe fp8", "qwen3-next fp8", "v3.2 fp8", "v4 fp4", "v4 fp8", "gpt-oss mxfp4", "gemma 4"],
)
def test_a_random_checkpoint_generates(config: dict[str, Any], stored: str, weights: Any, tmp_path: Path) -> None:
    from allotrope.checkpoint.checkpoint import open_checkpoint

    weights.write_checkpoint(config, tmp_path, seed=3)
    header = open_checkpoint(str(tmp_path)).headers()[stored]
    plain = "quantization_config" not in config
    assert header.dtype in ((torch.bfloat16,) if plain else (torch.float8_e4m3fn, torch.int8, torch.uint8))
    found = tokens(tmp_path)
    # Neither stuck nor all alike.
    assert all(len(set(ids)) > 2 for ids in found) and found[0] != found[1]


def test_quantized_values_have_the_size_of_plain_ones(weights: Any) -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) / 300**0.5
    for power_of_two in (False, True):
        rounded, scale = weights.fp8_blocks(weight, (128, 128), power_of_two=power_of_two)
        assert list(scale.shape) == [2, 3] and rounded.shape == weight.shape
        whole = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300] * rounded.float()
        assert (whole - weight).norm() < 0.05 * weight.norm()
    spec = read_spec(tiny("GptOssForCausalLM"), "test")[1]
    maker = weights.Maker(tiny("GptOssForCausalLM", MXFP4), spec, 0, torch.device("cpu"))
    name = "model.layers.0.mlp.experts.down_proj"
    stored = dict(maker.make(name, torch.empty(4, 96, 256, device="meta")))
    assert {key: list(value.shape) for key, value in stored.items()} == {
        name + "_blocks": [4, 256, 3, 16],
        name + "_scales": [4, 256, 3],
    }
    from allotrope.checkpoint.dequantize import unpack_mxfp4

    plain = unpack_mxfp4(stored[name + "_blocks"], stored[name + "_scales"]).float()
    assert abs(float(plain.square().mean()) * 96 - 1) < 0.05


def test_released_configs_shrink_to_whole_patterns(weights: Any) -> None:
    """Every config under bench/configs is one that we read, and names what its release leaves unquantized."""
    periods = {
        "qwen3_next_80b_fp8": 4,
        "qwen3_5_27b_fp8": 4,
        "gpt_oss_120b": 2,
        "gemma4_31b": 6,
        "deepseek_v4_flash": 2,
    }
    found = {file.parent.name: json.loads(file.read_text()) for file in BENCH.glob("configs/*/config.json")}
    assert periods.keys() <= found.keys()
    for name, config in found.items():
        if is_eagle3(config):
            continue
        weights.read_quantization(config)
        period = periods.get(name, 1)
        cut = weights.with_layers(config, 2 * period)
        assert len(read_spec(cut, name)[1].layers) == 2 * period
        assert cut.get("first_k_dense_replace", 0) <= 1 and cut.get("num_hash_layers", 0) <= 1
        if period > 1:
            with pytest.raises(ConfigError, match=f"multiple of {period}"):
                weights.with_layers(config, period + 1)


def test_a_random_eagle3_head_drafts_for_its_model(weights: Any, tmp_path: Path) -> None:
    """Its released config, made small, beside the model's. Tokens are those without drafts."""
    from bench import random_eagle3

    model = tiny("GptOssForCausalLM", num_hidden_layers=8, layer_types=["sliding_attention", "full_attention"] * 4)
    weights.write_checkpoint(model, tmp_path / "model")
    head = json.loads((BENCH / "configs" / "gpt_oss_120b_eagle3" / "config.json").read_text())
    head |= {key: model[key] for key in ("vocab_size", "hidden_size", "max_position_embeddings")}
    head |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    head["draft_vocab_size"] = model["vocab_size"] // 2
    random_eagle3.write_head(head, model, tmp_path / "head", seed=0, device="cpu")
    drafts = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 2}
    assert tokens(tmp_path / "model", speculative_config=drafts) == tokens(tmp_path / "model")


def test_shards_are_indexed_and_written_once(weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", 100_000)
    config = tiny("Qwen3MoeForCausalLM", FP8 | KEPT)
    count, size = weights.write_checkpoint(config, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(files) > 1 and sorted(set(index["weight_map"].values())) == files
    assert len(index["weight_map"]) == count and index["metadata"]["total_size"] == size
    kept = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert kept == ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(config["num_hidden_layers"]))]
    with pytest.raises(ConfigError, match="has weights already"):
        weights.write_checkpoint(config, tmp_path)


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


VLLM = """
import json, os, pathlib, sys, torch, types
__version__ = "0.0"
SamplingParams = lambda **params: types.SimpleNamespace(**params)
# The mean number of accepted drafts stands for all rates.
rates_of = types.SimpleNamespace(_acceptance_length_to_rates=lambda length, drafts: [length - 1] + [0] * (drafts - 1))
sys.modules["vllm.config"] = types.SimpleNamespace(SpeculativeConfig=rates_of)
sys.modules["vllm.v1.spec_decode.utils"] = types.SimpleNamespace(unconditional_to_conditional_rates=list)


class LLM:
    def __init__(self, directory, **options):
        log = pathlib.Path(__file__).with_name("vllm.json")
        log.write_text(json.dumps([options, os.environ["ALLOTROPE_VLLM"]]))
        drafts = options.get("speculative_config", {"num_speculative_tokens": 1})
        self.rates = torch.zeros(drafts["num_speculative_tokens"])
        self.rates[0] = drafts.get("synthetic_acceptance_length", 1) - 1
        cache = types.SimpleNamespace(num_gpu_blocks=4, block_size=16)
        self.drafted = self.accepted = 0
        self.llm_engine = types.SimpleNamespace(vllm_config=types.SimpleNamespace(cache_config=cache))

    def generate(self, prompts, params, use_tqdm):
        self.drafted += 2
        self.accepted += 2 * self.rates.sum().item()
        step = {id: types.SimpleNamespace(logprob=-id) for id in range(8)}
        made = lambda one: types.SimpleNamespace(token_ids=range(one.max_tokens), logprobs=[step] * one.max_tokens)
        return [types.SimpleNamespace(outputs=[made(one)]) for one in params]

    def get_metrics(self):
        # As its counters: of two engines, and others beside them.
        counts = {"drafts": self.drafted, "draft_tokens": 3 * self.drafted, "accepted_tokens": self.accepted}
        counter = lambda name, value: types.SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=value)
        found = [counter(*count) for count in counts.items()]
        return [*found, *found, types.SimpleNamespace(name="vllm:kv_cache_usage_perc", value=0.5)]

    def collective_rpc(self, what):
        sampler = types.SimpleNamespace(synthetic_conditional_rates=self.rates)
        model = type("Model", (), {"__module__": "allotrope.plugins.vllm.model"})()
        worker = types.SimpleNamespace(
            model_runner=types.SimpleNamespace(rejection_sampler=sampler), get_model=lambda: model
        )
        return [what(worker)] * 2
"""
SGLANG = """
import importlib.metadata, json, os, pathlib
__version__ = "0.1"


class Engine:
    def __init__(self, model_path, **options):
        pathlib.Path(__file__).with_name("sglang.json").write_text(json.dumps(options))

    def get_server_info(self):
        points = {point.value for point in importlib.metadata.entry_points(group="sglang.srt.plugins")}
        ours = os.environ["ALLOTROPE_SGLANG"] == "1" and "allotrope.plugins.sglang:register" in points
        return {"max_total_num_tokens": 77, "attention_backend": "allotrope" if ours else "fa3"}

    def generate(self, input_ids, sampling_params, return_logprob=False, logprob_start_len=None, top_logprobs_num=None):
        runs = os.environ.get("RUNS")
        if runs:
            with open(runs, "a") as file:
                file.write(f"{os.environ['ALLOTROPE_SGLANG']} {len(input_ids)}/{sampling_params['max_new_tokens']}\\n")
            if os.environ["ALLOTROPE_SGLANG"] == "1" and len(input_ids) == 3:
                raise MemoryError("too many")
        # The logprobs of a token say which one it is: after the first, which has none.
        outputs = []
        for i, ids in enumerate(input_ids):
            output = {"output_ids": list(range(sampling_params["max_new_tokens"])), "meta_info": {}}
            if return_logprob:
                later = range(logprob_start_len[i] + 1, len(ids))
                tops = [[(-float(at), id, None) for id in range(top_logprobs_num)] for at in later]
                output["meta_info"]["input_top_logprobs"] = [None, *tops]
            outputs.append(output)
        return outputs
"""


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


def test_a_roofline_needs_a_gpu_and_one_model(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert engine.main([str(tmp_path), "--roofline"]) == 2
    assert capsys.readouterr().err == "there is no GPU to measure a roofline on\n"
    with pytest.raises(SystemExit):
        engine.main([str(tmp_path), str(tmp_path / "other"), "--roofline"])


def test_a_roofline_of_a_synthetic_profile(engine: Any, tmp_path: Path) -> None:
    from bench.engine.launches import Launch, Span, micros_by_class

    spans = [Span("mha", 10, 20), Span("dense", 20, 30), Span("experts", 30, 40), Span("head", 40, 50)]
    kernels = [("attend", 11, 8.0), ("store", 12, 2.0), ("gemm", 21, 4.0), ("group", 31, 1.0), ("product", 32, 9.0)]
    kernels += [("gemm", 41, 5.0), ("norm_kernel", 51, 1.0), ("nvjet_router", 52, 6.0)]
    micros = micros_by_class([Launch(*kernel) for kernel in kernels], spans, frozenset({"norm_kernel"}))
    assert micros == {"mha": 10.0, "dense": 10.0, "experts": 10.0, "head": 5.0, "rest": 1.0}

    work = {
        "mha": {"bytes": 5_000_000, "flops": 10**9, "fp8": 0},
        "dense": {"bytes": 1_000_000, "flops": 4 * 10**9, "fp8": 2 * 10**9},
        "experts": {"bytes": 0, "flops": 2 * 10**9, "fp8": 0},
        "head": {"bytes": 5_000_000, "flops": 0, "fp8": 0},
    }
    ceilings = {"copy": 1e12, "matmul": {"bf16": 1e15, "fp8": 2e15}}
    classes = roofline_report.roofline_classes(work, micros, ceilings)
    assert {kind: (one["least_us"], one["bound"], one["of_ceiling"]) for kind, one in classes.items()} == {
        "mha": (pytest.approx(5.0), "copy", pytest.approx(0.5)),
        "dense": (pytest.approx(3.0), "matmul", pytest.approx(0.3)),
        "experts": (pytest.approx(2.0), "matmul", pytest.approx(0.2)),
        "head": (pytest.approx(5.0), "copy", pytest.approx(1.0)),
        "rest": (0.0, "copy", 0.0),
    }
    slow = roofline_report.roofline_classes(work, {}, {"copy": 1e12, "matmul": {"bf16": 1e15}})
    assert slow["dense"]["least_us"] == pytest.approx(4.0) and slow["dense"]["of_ceiling"] is None

    step = {"requests": 2, "tokens": 2, "seen": 20, "classes": classes}
    report = {
        "command": "python bench/engine.py tiny --roofline", "date": "today", "model": "tiny", "described": "Small.",
        "settings": {"runs": 3}, "environment": {"device": "none"}, "ceilings": ceilings, "steps": {"decode": step},
    }  # fmt: skip
    paths = roofline_report.write_roofline(tmp_path / "found" / "roofline", report)
    assert json.loads(paths[0].read_text()) == report
    page = paths[1].read_text()
    assert "## decode: 2 requests, 2 tokens, 20 visible" in page
    assert "| mha | 0.005 | 1.0 | copy | 5.0 | 10.0 | 50% |" in page
    assert "| all | 0.011 | 7.0 |  | 15.0 | 36.0 | 42% |" in page


@pytest.mark.parametrize(("architecture", "family"), [("Qwen3MoeForCausalLM", "mha"), ("DeepseekV4ForCausalLM", "csa")])
def test_a_profiled_step_names_every_class(architecture: str, family: str, tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    from allotrope.config import EngineConfig
    from bench.engine.launches import classes_of, decoding, lengths_of, named_spans

    (tmp_path / "config.json").write_text(json.dumps(tiny(architecture)))
    config = EngineConfig(
        model=str(tmp_path), load_format="dummy", device="cpu", dtype="float32", threads=1, max_model_len=64
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    running = decoding(config, [[5, 6, 7], [8, 9, 10, 11]], params)
    before = running.model.backends
    profiler = profile(activities=[ProfilerActivity.CPU])
    plans: Any = running._executor.worker.model_runner._layers  # type: ignore[attr-defined]
    with classes_of(running.model), lengths_of(plans) as passes, profiler as profiled:
        running.step()
    assert running.model.backends == before
    ((new, seen),) = passes
    assert new == (1, 1) and seen[1] == seen[0] + 1
    names = [span.name for span in named_spans(profiled.profiler.kineto_results.events())]
    layers = len(running.model.layers)
    assert set(names) == {family, "experts", "dense", "head"}
    assert names.count(family) == layers and names.count("head") == 1
    running.close()


def test_roofline_steps_are_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where no kernel is seen: what the steps read, and their least work."""
    from allotrope.config import EngineConfig
    from allotrope.engine.load_plan import resolve_load_plan
    from bench.engine import roofline
    from bench.engine.launches import Launch, Span

    def unprofiled(running: Any, spans: Any) -> tuple[list[Launch], list[Span]]:
        with spans(running.model):
            running.step()
        return [Launch("attend", 1, 2.0)], [Span("mha", 0, 2)]

    monkeypatch.setattr(roofline, "record", unprofiled)
    monkeypatch.setattr(roofline, "our_kernels", frozenset)
    (tmp_path / "config.json").write_text(json.dumps(tiny("Qwen3MoeForCausalLM")))
    options = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "threads": 1, "async_scheduling": "on"}
    sizes = roofline.Sizes(requests=3, context=20, prefill=50, runs=2)

    def prompts(what: str, count: int, length: int) -> list[list[int]]:
        return random_prompts(what, count, length, 320)

    found = roofline.profile_steps(str(tmp_path), sizes, prompts, options)
    decode, prefill = found["decode"], found["prefill"]
    assert decode.new == (1, 1, 1) and all(20 < n < 40 for n in decode.seen) and decode.micros == {"mha": 2.0}
    assert (prefill.new, prefill.seen) == ((50,), (50,))
    load_plan = resolve_load_plan(EngineConfig(model=str(tmp_path), **options))
    assert prefill.work == roofline.least(load_plan, (50,), (50,))
    with pytest.raises(RuntimeError, match=r"requests=3, of which \d decode at once"):
        roofline.profile_steps(str(tmp_path), sizes, prompts, options | {"kv_cache_memory_bytes": 61_440})


MTP_LAYERS = [
    (tiny("Qwen3NextForCausalLM", FP8 | KEPT), "mtp.", "mtp.layers.0.self_attn.q_proj.weight", "mtp.fc.weight"),
    (
        tiny("DeepseekV3ForCausalLM", FP8, num_nextn_predict_layers=1),
        "model.layers.3.",
        "model.layers.3.self_attn.kv_b_proj.weight",
        "model.layers.3.eh_proj.weight",
    ),
]


@pytest.mark.parametrize(("config", "prefix", "stored", "plain"), MTP_LAYERS, ids=["qwen3-next", "v3"])
def test_a_random_checkpoint_drafts(
    config: dict[str, Any], prefix: str, stored: str, plain: str, weights: Any, tmp_path: Path
) -> None:
    from allotrope.checkpoint.checkpoint import open_checkpoint

    weights.write_checkpoint(config, tmp_path, seed=3, mtp=True)
    checkpoint = open_checkpoint(str(tmp_path))
    headers = checkpoint.headers()
    assert headers[stored].dtype == torch.float8_e4m3fn and headers[plain].dtype == torch.bfloat16
    named = checkpoint.config["quantization_config"].get("modules_to_not_convert")
    assert named is None or {"mtp.fc", "mtp.layers.0.mlp.gate"} <= set(named)
    copies = {prefix + "embed_tokens.weight": "model.embed_tokens.weight"}
    copies[prefix + "shared_head.head.weight"] = "lm_head.weight"
    for copy, name in copies.items():
        assert copy not in headers or torch.equal(checkpoint.read(copy), checkpoint.read(name))
    assert set(copies) <= headers.keys() or prefix == "mtp."
    with_drafts = tokens(tmp_path, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    assert with_drafts == tokens(tmp_path)


def test_a_config_without_an_mtp_layer_has_none(weights: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no multi-token-prediction layer"):
        weights.write_checkpoint(tiny("LlamaForCausalLM"), tmp_path, mtp=True)


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


def test_a_released_mtp_layer_takes_no_memory_before_it_is_drawn(weights: Any) -> None:
    config = json.loads((BENCH / "configs" / "deepseek_v4_flash" / "config.json").read_text())
    cut = {key: value for key, value in weights.with_layers(config, 2).items() if key != "quantization_config"}
    head, copies = weights.mtp_tensors(cut, weights.released_tensors(cut)[0])
    assert sum(like.numel() for like in head.values()) > 6e9
    assert all(like.untyped_storage().nbytes() <= 8 for like in head.values() if like.device.type != "meta")
    assert copies == {"mtp.0.emb.tok_emb.weight": "embed.weight", "mtp.0.head.weight": "head.weight"}
