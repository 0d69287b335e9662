"""Qwen3-Next and Qwen3.5 in all their variants, against Transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.execution_modes import assert_matches
from engine.watching import assert_idle, assert_same, engine, request, run
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TinyCheckpoint, prompts
from tiny_checkpoints import write_tiny as write_around_one

from allotrope.architectures.qwen3_5 import tiny_moe_wrapper, tiny_qwen3_5, tiny_qwen3_5_moe, tiny_wrapper
from allotrope.architectures.qwen3_next import tiny_qwen3_next
from allotrope.architectures.registry import read_spec
from allotrope.errors import ModelError

# Shorter than the convolution, around a chunk of the delta rule, and several of them.
LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 150)
VARIANTS = {
    "qwen3_next": tiny_qwen3_next,
    "qwen3_next without experts, tied": lambda: (
        tiny_qwen3_next() | {"mlp_only_layers": [0, 1, 2, 3], "tie_word_embeddings": True, "num_hidden_layers": 4}
    ),
    "qwen3_next, eight value heads to a key head": lambda: (
        tiny_qwen3_next() | {"linear_num_value_heads": 8, "linear_num_key_heads": 1, "norm_topk_prob": False}
    ),
    "qwen3_5": tiny_qwen3_5,
    "qwen3_5 with experts": tiny_qwen3_5_moe,
}


def write_tiny(config: dict[str, Any], directory: Path, rename: Callable[[str], str] | None = None) -> TinyCheckpoint:
    """With norm weights around 0, as layers that multiply by 1 + w have them, and states that last for many tokens.

    A random query now and then reads nearly 0 from a state of few tokens, or of a head that forgets at once. The norm
    of that output would blow the rounding of both sides up; a larger eps bounds by how much.
    """
    eps = {"rms_norm_eps": 1e-3}
    text = {"text_config": config["text_config"] | eps} if "text_config" in config else eps
    tiny = write_around_one(config | text, directory, rename=rename)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor -= 1
        if name.endswith("A_log"):
            tensor -= 3
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tiny


@pytest.mark.parametrize("variant", VARIANTS)
def test_qwen(variant: str, tmp_path: Path) -> None:
    assert_matches(write_tiny(VARIANTS[variant](), tmp_path), LENGTHS)


@pytest.mark.parametrize("config", [tiny_wrapper, tiny_moe_wrapper], ids=["dense", "experts"])
def test_the_text_part_of_a_model_that_sees_images(config: type, tmp_path: Path) -> None:
    def released(name: str) -> str:
        return name.replace("model.", "model.language_model.", 1)

    tiny = write_tiny(config(), tmp_path, rename=released)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.language_model.norm.weight" in tensors
    tensors["model.visual.pos_embed.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_matches(tiny, (2, 70))


def test_warm_equals_cold_at_every_cut(tmp_path: Path) -> None:
    """A shared prefix comes back from a state checkpoint, wherever the next prompt leaves it."""
    tiny = write_tiny(tiny_qwen3_next(), tmp_path)
    prompt, other_request = prompts((65, 30))
    want = {"p65": tiny.greedy(prompt, 8)}
    running = engine(tmp_path, page_size=8, max_num_seqs=4, max_model_len=256)
    for cut in (1, 7, 8, 9, 31, 32, 63, 64, 65):
        for _ in range(2):
            run(running, [request("warm", [*prompt[:cut], *other_request])])
            assert_same(run(running, [request("p65", prompt)]), want)
            assert_idle(running)
    assert running.stats().prefix_hits > 0


def test_stacked_experts_load_as_single_ones(tmp_path: Path) -> None:
    tiny = write_tiny(tiny_qwen3_next(), tmp_path / "single")
    tensors = load_file(tiny.directory / "model.safetensors")
    for layer in (0, 1, 3, 4):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{e}.{name}_proj.weight") for e in range(8)])
            for name in ("gate", "up", "down")
        )
        tensors |= {prefix + "gate_up_proj": torch.cat((gate, up), dim=1), prefix + "down_proj": down}
    stacked = tmp_path / "stacked"
    stacked.mkdir()
    save_file(tensors, stacked / "model.safetensors")
    (stacked / "config.json").write_text((tiny.directory / "config.json").read_text())
    ids = {f"p{len(one)}": one for one in prompts((3, 70))}
    want = run(engine(tiny.directory), [request(name, prompt) for name, prompt in ids.items()])
    assert_same(run(engine(stacked), [request(name, prompt) for name, prompt in ids.items()]), want)


def test_multi_token_prediction_layers_are_dropped_and_unknown_weights_refused(tmp_path: Path) -> None:
    write_tiny(tiny_qwen3_5(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"mtp.fc.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    engine(tmp_path)
    unknown = "model.layers.0.linear_attn.in_proj_c.weight"
    save_file(tensors | {unknown: torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"{unknown} is used by no rule"):
        engine(tmp_path)


def test_layers_are_what_the_config_says() -> None:
    def kinds(config: dict[str, object]) -> str:
        _, spec = read_spec(config, "tiny")
        return "".join(type(layer.mixer).__name__[0] for layer in spec.layers)

    assert kinds(tiny_qwen3_next()) == "GGGMG"
    assert kinds(tiny_qwen3_next() | {"full_attention_interval": 2}) == "GMGMG"
    stated = ["full_attention"] + ["linear_attention"] * 4
    listed = tiny_qwen3_next() | {"layer_types": stated, "full_attention_interval": None}
    assert kinds(listed) == "MGGGG"


def test_a_wrapper_may_tie_its_embeddings() -> None:
    config = tiny_wrapper()
    _, untied = read_spec(config, "tiny")
    del config["text_config"]["tie_word_embeddings"]
    _, tied = read_spec(config | {"tie_word_embeddings": True}, "tiny")
    assert tied == dataclasses.replace(untied, tied=True)
    with pytest.raises(ModelError, match="tie_word_embeddings=True but text_config has False"):
        read_spec(tiny_wrapper() | {"tie_word_embeddings": True}, "tiny")


def test_unsupported_values_are_refused() -> None:
    config = tiny_qwen3_5() | {"mamba_ssm_dtype": "bfloat16", "attn_output_gate": False, "hidden_act": "gelu"}
    with pytest.raises(ModelError) as caught:
        read_spec(config, "tiny")
    assert [reason.split()[1].split("=")[0] for reason in caught.value.reasons] == [
        "attn_output_gate",
        "mamba_ssm_dtype",
        "hidden_act",
    ]
