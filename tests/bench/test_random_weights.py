"""Random checkpoints and draft heads load, generate and draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_scripts import BENCH
from random_models import FP8, KEPT, tiny, tokens

from allotrope.architectures.eagle3 import is_eagle3
from allotrope.architectures.registry import read_spec
from allotrope.errors import ConfigError

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


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


def test_a_released_mtp_layer_takes_no_memory_before_it_is_drawn(weights: Any) -> None:
    config = json.loads((BENCH / "configs" / "deepseek_v4_flash" / "config.json").read_text())
    cut = {key: value for key, value in weights.with_layers(config, 2).items() if key != "quantization_config"}
    head, copies = weights.mtp_tensors(cut, weights.released_tensors(cut)[0])
    assert sum(like.numel() for like in head.values()) > 6e9
    assert all(like.untyped_storage().nbytes() <= 8 for like in head.values() if like.device.type != "meta")
    assert copies == {"mtp.0.emb.tok_emb.weight": "embed.weight", "mtp.0.head.weight": "head.weight"}
