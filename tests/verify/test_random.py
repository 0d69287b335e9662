"""Random checkpoints: in the released layout, equal for equal seeds, shrunk, and refused where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from architectures.draft_steps import DraftSteps
from safetensors.torch import load_file

from allotrope.architectures.deepseek_v3 import tiny_deepseek_v3
from allotrope.architectures.deepseek_v4 import tiny_deepseek_v4
from allotrope.architectures.deepseek_v32 import tiny_deepseek_v32
from allotrope.architectures.llama import tiny_llama
from allotrope.architectures.qwen3_next import tiny_qwen3_next
from allotrope.architectures.registry import ARCHITECTURES, find_architecture
from allotrope.config import EngineConfig
from allotrope.errors import ConfigError, ModelError
from allotrope.verify.options import VerifyOptions
from allotrope.verify.random_checkpoint import first_layers, write_random
from allotrope.verify.run import verify


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_weights_are_reproducible_and_never_neutral(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_random(tiny_llama(), tmp_path / name, None, seed)
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert a.keys() == b.keys() == c.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=0, atol=0)
        assert not torch.equal(tensor, c[name])
        assert len(tensor.unique()) > tensor.numel() // 2, name
    assert json.loads((tmp_path / "a" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_another_library_may_have_changed_what_a_type_means(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM registers configs of its own, or those of other types, for types that Transformers knows."""
    from transformers import AutoConfig
    from transformers.models.deepseek_v3 import DeepseekV3Config

    write_random(tiny_deepseek_v32(), tmp_path / "a", None, 0)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda path, **_: DeepseekV3Config.from_pretrained(path))
    write_random(tiny_deepseek_v32(), tmp_path / "b", None, 0)
    a, b = (weights(tmp_path / name) for name in "ab")
    assert {name: tensor.shape for name, tensor in a.items()} == {name: tensor.shape for name, tensor in b.items()}


def test_names_that_transformers_does_not_write_come_from_the_rules(tmp_path: Path) -> None:
    config = tiny_deepseek_v4()
    write_random(config, tmp_path / "made", None, 0)
    made = weights(tmp_path / "made")
    assert {"embed.weight", "layers.0.attn.wq_a.weight", "layers.1.ffn.experts.7.w3.weight"} <= made.keys()
    table = made["layers.0.ffn.gate.tid2eid"]
    assert table.dtype == torch.int64
    # Every token has different experts, and between them all are used.
    assert all(len(set(row)) == config["num_experts_per_tok"] for row in table.tolist())
    assert sorted(table.unique().tolist()) == list(range(config["n_routed_experts"]))


def test_layers_are_cut_everywhere() -> None:
    config = {
        "num_hidden_layers": 4,
        "layer_types": ["a", "b", "a", "b"],
        "ratios": [1, 2, 3, 4, 9],
        "eos_token_id": [1, 2],
        "hidden_size": 8,
    }
    assert first_layers(config, 2) == {
        "num_hidden_layers": 2,
        "layer_types": ["a", "b"],
        "ratios": [1, 2, 9],
        "eos_token_id": [1, 2],
        "hidden_size": 8,
    }
    assert first_layers({"text_config": config}, 1)["text_config"]["layer_types"] == ["a"]
    with pytest.raises(ConfigError, match="num_hidden_layers=4"):
        first_layers(config, 5)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV4ForCausalLM"])
def test_an_architecture_by_name(name: str) -> None:
    assert name in ARCHITECTURES
    options = VerifyOptions(random=True, layers=2, lengths="1,18,40", modes="whole,cached", new_tokens=4)
    report = verify(EngineConfig(model=name), options)
    assert report.passed, report.verdict()
    assert report.layers is not None and len(report.layers.layers) == 2
    assert (report.model, report.architecture) == (name, name)


def test_overrides_of_an_architecture_by_name() -> None:
    overrides = json.dumps({"head_dim": 128, "num_hidden_layers": 1})
    options = VerifyOptions(random=True, lengths="1,18", modes="whole", new_tokens=2)
    report = verify(EngineConfig(model="LlamaForCausalLM", hf_overrides=overrides), options)
    assert report.passed, report.verdict()
    assert report.layers is not None and len(report.layers.layers) == 1
    assert any("mha" in backend and "head_dim=128" in backend for backend in report.backends), report.backends


def test_a_config_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama() | {"quantization_config": {"quant_method": "fp8"}}))
    options = VerifyOptions(random=True, lengths="5", modes="whole")
    report = verify(EngineConfig(model=str(tmp_path)), options)
    assert report.passed
    assert "quantization_config is left out" in "\n".join(report.verdict())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json"]


def test_too_large_a_model_is_refused_with_the_numbers(tmp_path: Path) -> None:
    config = tiny_llama() | {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 40}
    with pytest.raises(ConfigError, match=r"billion random weights need \d+ GB .* --layers"):
        write_random(config, tmp_path, None, 0)


def test_what_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    config = tiny_llama() | {"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"}
    with pytest.raises(ModelError, match="Transformers cannot make the model"):
        write_random(config, tmp_path, None, 0)


# Every architecture whose config says in its own words that there is a draft head, or whose releases all have one.
DRAFTING = [name for name in ARCHITECTURES if find_architecture({"architectures": [name]}, name).tiny_draft]


@pytest.mark.parametrize("name", DRAFTING)
def test_a_draft_head_has_random_weights_too(name: str, tmp_path: Path) -> None:
    """We load all of it."""
    made = find_architecture({"architectures": [name]}, name).tiny_draft
    assert made is not None
    remarks = write_random(made(), tmp_path, None, 0)
    assert not any("draft head" in remark for remark in remarks)
    running = DraftSteps(tmp_path)
    prompt = list(range(8, 29))
    _, features = running.target_pass(prompt[:20], 0)
    logits = running.draft.logits(running.draft_pass(features, prompt[1:], 0))
    assert logits.isfinite().all() and logits.std() > 0.1


def test_a_model_with_a_draft_head_is_verified(tmp_path: Path) -> None:
    """Transformers leaves the head alone."""
    write_random(tiny_deepseek_v3() | {"num_nextn_predict_layers": 1}, tmp_path, None, 0)
    assert "model.layers.3.eh_proj.weight" in weights(tmp_path)
    report = verify(EngineConfig(model=str(tmp_path), device="cpu"), VerifyOptions())
    assert report.passed, report.verdict()


def test_a_draft_head_that_no_layer_is_like_is_left_out(tmp_path: Path) -> None:
    """The first layers of Qwen3-Next are linear, and the head has full attention."""
    remarks = write_random(tiny_qwen3_next(), tmp_path, 2, 0)
    assert remarks == ["no layer is like that of the draft head, which is left out"]
    assert not any(name.startswith("mtp.") for name in weights(tmp_path))
