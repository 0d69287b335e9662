"""The engine against Transformers: clean models pass in every mode, and a fault is found where it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from random_models import tiny as tiny_model
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TinyCheckpoint, write_tiny
from verify_fixtures import Spoil, Tiny

from allotrope.cache.prefix import PrefixCache
from allotrope.config import EngineConfig
from allotrope.engine.kv_cache_manager import KVCacheManager
from allotrope.errors import ConfigError, ModelError
from allotrope.verify.options import MODES, VerifyOptions
from allotrope.verify.report import Report
from allotrope.verify.run import verify
from allotrope.verify.transformers_model import load_transformers


def run(directory: Path, engine: dict[str, object] | None = None, **options: object) -> Report:
    return verify(EngineConfig(model=str(directory), **(engine or {})), VerifyOptions(**options))


def test_the_reference_keeps_its_angles_exact(tiny: Tiny) -> None:
    """Of a model in bf16 the parameters are rounded; what Transformers computes in fp32 stays so."""
    directory = tiny("llama").directory
    config = json.loads((directory / "config.json").read_text())
    model = load_transformers(directory, config, torch.bfloat16, config["num_hidden_layers"]).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    angles = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert angles and all(buffer.dtype == torch.float32 for buffer in angles)


def test_nothing_compared_is_no_pass(tmp_path: Path) -> None:
    """Routers of zeros tie everywhere: what another head says is behind a near-tie in every position."""
    model, other = tmp_path / "model", tmp_path / "other"
    write_tiny(tiny_model("Qwen3MoeForCausalLM"), model)
    tensors = load_file(model / "model.safetensors")
    tensors |= {name: torch.zeros_like(one) for name, one in tensors.items() if name.endswith("mlp.gate.weight")}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    shutil.copytree(model, other)
    head = {"lm_head.weight": torch.randn_like(tensors["lm_head.weight"])}
    save_file(tensors | head, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="nothing was compared"):
        run(model, against="transformers", reference=str(other), modes="whole,batched", lengths="3,20", new_tokens=3)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_clean_models_pass_in_every_mode(tiny: Tiny, name: str) -> None:
    report = run(tiny(name).directory)
    assert report.passed, report.verdict()
    verdicts = {result.name: result.verdict for result in report.modes}
    assert list(verdicts) == [name for name in MODES if name != "graphs"]
    assert set(verdicts.values()) == {"pass"}
    remarks = {result.name: result.remark for result in report.modes}
    reused, _, total, *_ = remarks["cached"].split()
    assert 0 < int(reused) < int(total)
    assert report.layers is not None
    assert [layer.kind for layer in report.layers.layers] == ["mha"] * 3
    assert all(layer.error < 5e-6 for layer in report.layers.layers)
    assert {stage for layer in report.layers.layers for stage in layer.rms} >= {"mixer in", "mixer out", "ffn out"}
    # Lengths cross the window (32), the page (16) and the chunk (64).
    assert set(report.lengths) >= {15, 16, 17, 63, 64, 65} | ({31, 32, 33} if name == "mistral" else set())


FAULTS = {
    "layers.1.self_attn.o_proj.weight": (1, "in its mixer"),
    "layers.2.mlp.down_proj.weight": (2, "in its ffn"),
    "layers.0.input_layernorm.weight": (0, "in the norm before its mixer"),
    "layers.1.post_attention_layernorm.weight": (1, "between its mixer and its ffn"),
}


@pytest.mark.parametrize("tensor", FAULTS)
def test_a_spoiled_tensor_is_found_in_its_layer(tiny: Tiny, spoil: Spoil, tensor: str) -> None:
    layer, part = FAULTS[tensor]
    source = tiny("llama").directory
    spoiled = spoil(source, f"model.{tensor}", lambda weight: weight * 1.01)
    report = run(spoiled, reference=str(source), lengths="3,20", modes="whole")
    assert not report.passed
    assert report.layers is not None and report.layers.first is not None
    assert report.layers.first.index == layer
    assert report.finding is not None and f"layer {layer} (mha)" in report.finding and part in report.finding
    assert report.as_json()["first_diverging_layer"] == layer


@pytest.mark.parametrize("tensor", ["model.embed_tokens.weight", "lm_head.weight"])
def test_faults_outside_of_layers_are_told_apart(tiny: Tiny, spoil: Spoil, tensor: str) -> None:
    source = tiny("llama").directory
    report = run(
        spoil(source, tensor, lambda weight: weight * 1.01), reference=str(source), lengths="3,20", modes="whole"
    )
    assert not report.passed
    assert report.modes[0].verdict == "wrong"
    if tensor == "lm_head.weight":
        assert report.finding is None
        assert "every layer agrees" in "\n".join(report.verdict())
    else:
        assert report.finding is not None and "embedding differs" in report.finding


def test_one_wrong_row_among_many_positions_is_found(tiny: Tiny, spoil: Spoil) -> None:
    """A fault that only one token of one prompt meets."""

    def change(weight: torch.Tensor) -> torch.Tensor:
        weight[100] += 0.1
        return weight

    source = tiny("llama").directory
    report = run(spoil(source, "lm_head.weight", change), reference=str(source), lengths="3,20", modes="whole")
    assert not report.passed


def test_a_fault_of_one_mode_is_found_in_it_alone(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong last page of a cached prefix: only what reads the prefix cache goes wrong, and its layer is said."""
    right = PrefixCache._pages

    def wrong_page(cache: PrefixCache, *args: object) -> tuple[tuple[int, ...], ...]:
        return tuple((*table[:-1], *table[:1]) for table in right(cache, *args))

    monkeypatch.setattr(PrefixCache, "_pages", wrong_page)
    report = run(tiny("llama").directory, lengths="40,70", modes="whole,chunked-64,cached,batched")
    assert {result.name: result.verdict for result in report.modes} == {
        "whole": "pass",
        "chunked-64": "pass",
        "cached": "wrong",
        "batched": "pass",
    }
    found = report.modes[2].layer
    assert found is not None and "layer 0 (mha)" in found and "in its mixer" in found


def test_stale_pages_after_preemption_are_found(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that is sent back forgets its pages, but not how far it was computed."""
    right = KVCacheManager._match

    def stale(kv_cache_manager: KVCacheManager, seq: object) -> object:
        match = right(kv_cache_manager, seq)
        if seq.started and not match.tokens and len(kv_cache_manager.groups) == 1:
            size = kv_cache_manager.groups[0].page_size
            return type(match)(size, ((1,),), (0,))
        return match

    monkeypatch.setattr(KVCacheManager, "_match", stale)
    report = run(tiny("llama").directory, lengths="20,30,40,50", modes="whole,preempted")
    assert {result.name: result.verdict for result in report.modes} == {"whole": "pass", "preempted": "wrong"}


def test_an_engine_that_breaks_is_wrong_and_the_others_still_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cache: PrefixCache, *args: object) -> None:
        raise IndexError("no such page")

    monkeypatch.setattr(PrefixCache, "_pages", broken)
    report = run(tiny("llama").directory, lengths="20", modes="whole,cached,chunked-3")
    assert [result.verdict for result in report.modes] == ["pass", "wrong", "pass"]
    assert "IndexError: no such page" in "\n".join(report.verdict())


def test_nothing_compared_is_not_a_pass(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="nothing was compared: cached: nothing could be reused"):
        run(tiny("llama").directory, lengths="3", modes="cached")


def test_types_that_round_are_measured_against_transformers_in_them(tiny: Tiny, spoil: Spoil) -> None:
    source = tiny("llama").directory
    report = run(source, {"dtype": "bfloat16"}, lengths="5,33", modes="whole")
    assert report.passed, report.verdict()
    assert "Transformers in bfloat16" in report.limits.origin
    spoiled = spoil(source, "model.layers.1.mlp.down_proj.weight", lambda weight: weight * 1.5)
    report = run(spoiled, {"dtype": "bfloat16"}, reference=str(source), lengths="5,33", modes="whole")
    assert not report.passed
    assert report.layers is not None and report.layers.first is not None
    assert report.layers.first.index == 1


def test_experts_are_compared(tiny: Tiny, spoil: Spoil) -> None:
    source = tiny("moe").directory
    report = run(source, lengths="3,40", modes="whole,batched")
    assert report.passed, report.verdict()
    assert report.layers is not None
    assert "same" in {layer.selections for layer in report.layers.layers}
    router = next(name for name in _names(source) if name.endswith("mlp.gate.weight"))
    spoiled = spoil(source, router, lambda weight: weight.flip(0))
    report = run(spoiled, reference=str(source), lengths="3,40", modes="whole")
    assert report.layers is not None and report.layers.first is not None
    assert report.layers.first.selections == "wrong"
    assert report.finding is not None and "top-k: wrong" in report.finding
    assert report.modes[0].score is not None and not report.modes[0].score.router_ties


def _names(directory: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(str(directory / "model.safetensors"), framework="pt") as file:
        return sorted(file.keys())


def test_a_reference_that_makes_weights_up_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    source: TinyCheckpoint = tiny("llama")
    gaps = tmp_path / "gaps"
    shutil.copytree(source.directory, gaps)
    weights = load_file(gaps / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, gaps / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"found no weights for model\.layers\.2\.mlp\.up_proj\.weight"):
        run(source.directory, reference=str(gaps), lengths="3", modes="whole")
