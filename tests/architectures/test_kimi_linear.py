"""Kimi-Linear against Transformers, and what its config may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.execution_modes import ATOL, assert_matches
from engine.watching import Watch, assert_idle, assert_same, engine, request, run
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TinyCheckpoint, prompts
from tiny_checkpoints import write_tiny as write_around_one

from allotrope.architectures.kimi_linear import FULL, LINEAR, tiny_kimi_linear
from allotrope.architectures.registry import read_spec
from allotrope.errors import ModelError
from allotrope.layers.mixers.kda import KdaMixerSpec
from allotrope.layers.mixers.mla import MlaMixerSpec
from allotrope.layers.moe import MoeSpec

# Shorter than the convolution, around a chunk of the delta rule, and several of them.
LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 150)

Config = dict[str, Any]


def linear(**changes: Any) -> Config:
    """The tiny config with other numbers in its linear layers."""
    tiny = tiny_kimi_linear()
    return tiny | {"linear_attn_config": tiny["linear_attn_config"] | changes}


VARIANTS: dict[str, Config] = {
    "released": tiny_kimi_linear(),
    "queries from a latent": tiny_kimi_linear() | {"q_lora_rank": 24},
    "groups of experts": tiny_kimi_linear() | {"num_expert_group": 4, "topk_group": 2, "moe_renormalize": False},
    "full layers first and last": linear(full_attn_layers=[1, 5], kda_layers=[2, 3, 4]),
    "other sizes": linear(num_heads=2, head_dim=24, short_conv_kernel_size=3),
}


def write_tiny(config: Config, directory: Path) -> TinyCheckpoint:
    """With states that last for many tokens, and channels that forget at very different rates."""
    tiny = write_around_one(config, directory)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor -= 2
        if name.endswith("dt_bias"):
            tensor *= 8
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tiny


@pytest.mark.parametrize("variant", VARIANTS)
def test_against_transformers(variant: str, tmp_path: Path) -> None:
    assert_matches(write_tiny(VARIANTS[variant], tmp_path), LENGTHS, page_size=8)


def test_released_names(tmp_path: Path) -> None:
    """Transformers saves the plain block under the experts' name; the release keeps its own."""
    tiny = write_tiny(tiny_kimi_linear(), tmp_path)
    (prompt,) = prompts((70,))
    want = run(engine(tmp_path), [request("a", prompt)])
    tensors = load_file(tmp_path / "model.safetensors")
    plain = "model.layers.0.block_sparse_moe."
    assert plain + "down_proj.weight" in tensors
    released = {name.replace(plain, "model.layers.0.mlp."): tensor for name, tensor in tensors.items()}
    save_file(released, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert run(engine(tmp_path), [request("a", prompt)]) == want == {"a": tiny.greedy(prompt, 8)}


def test_warm_equals_cold_at_every_cut(tmp_path: Path) -> None:
    """A shared prefix comes back from a state checkpoint and pages, wherever the next prompt leaves it."""
    tiny = write_tiny(tiny_kimi_linear(), tmp_path)
    prompt, other_request = prompts((65, 30))
    want = {"p65": tiny.greedy(prompt, 8)}
    running = engine(tmp_path, page_size=8, max_num_seqs=4, max_model_len=256)
    for cut in (1, 7, 8, 9, 32, 63, 64, 65):
        run(running, [request("warm", [*prompt[:cut], *other_request])])
        assert_same(run(running, [request("p65", prompt)]), want)
        assert_idle(running)
    assert running.stats().prefix_hits > 0


@pytest.mark.parametrize(
    "change",
    [
        {"routed_scaling_factor": 1.0},
        {"moe_renormalize": False},
        {"rms_norm_eps": 1e-2},
        {"num_experts_per_token": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_wrong_value_changes_the_logits(change: Config, tmp_path: Path) -> None:
    """The comparison with Transformers would not pass if the number were ignored."""
    tiny, (prompt,) = write_tiny(tiny_kimi_linear(), tmp_path), prompts((60,))
    watch = Watch()
    run(engine(tmp_path, watch, hf_overrides=json.dumps(change)), [request("a", prompt)])
    got = torch.stack([watch.seen["a"][i] for i in range(len(prompt))])
    assert (got - tiny.logits(prompt)).abs().max() > 10 * ATOL


def test_multi_token_prediction_layers_are_dropped_and_unknown_weights_refused(tmp_path: Path) -> None:
    write_tiny(tiny_kimi_linear() | {"num_nextn_predict_layers": 1}, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    drafting = {"model.layers.5.eh_proj.weight": torch.ones(2, 2)}
    save_file(tensors | drafting, tmp_path / "model.safetensors")
    engine(tmp_path)
    unknown = "model.layers.3.self_attn.k_conv1d.weight"
    save_file(tensors | {unknown: torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"{unknown} is used by no rule"):
        engine(tmp_path)


def test_layers_are_counted_from_one() -> None:
    _, spec = read_spec(linear(full_attn_layers=[2, 5], kda_layers=[1, 3, 4]), "tiny")
    kinds = [type(layer.mixer) for layer in spec.layers]
    assert kinds == [KdaMixerSpec, MlaMixerSpec, KdaMixerSpec, KdaMixerSpec, MlaMixerSpec]
    assert [isinstance(layer.ffn, MoeSpec) for layer in spec.layers] == [False, True, True, True, True]


def test_mla_has_no_rope() -> None:
    _, spec = read_spec(tiny_kimi_linear(), "tiny")
    mixer = spec.layers[3].mixer
    assert isinstance(mixer, MlaMixerSpec)
    assert (mixer.rope, mixer.q_rank, mixer.norm_eps) == (None, None, 1e-6)
    assert mixer.scale == pytest.approx(48**-0.5)


def test_both_spellings_of_a_config_are_one_model() -> None:
    old = tiny_kimi_linear()
    new = {key: value for key, value in old.items() if key not in ("linear_attn_config", "rope_scaling")}
    new |= {
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL, LINEAR],
        "mlp_layer_types": ["dense"] + ["sparse"] * 4,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "qk_head_dim": 48,
        "rope_parameters": None,
    }
    want = read_spec(old, "old")[1]
    assert read_spec(new, "new")[1] == want
    assert read_spec(old | new, "both")[1] == want
    for wrong in ({"layer_types": [FULL] + [LINEAR] * 4}, {"linear_num_heads": 2}):
        with pytest.raises(ModelError, match=next(iter(wrong))):
            read_spec(old | new | wrong, "both")


@pytest.mark.parametrize(
    ("full", "kda"),
    [([4], [1, 2, 3]), ([4], [1, 2, 3, 4]), ([4, 5], [1, 2, 3, 5]), ([3], [0, 1, 2, 4]), (["4"], [1, 2, 3, 5])],
    ids=str,
)
def test_every_layer_is_named_once(full: list[int], kda: list[int]) -> None:
    with pytest.raises(ModelError, match="each of the layers 1 to 5 once"):
        read_spec(linear(full_attn_layers=full, kda_layers=kda), "tiny")


def test_what_is_not_computed_is_refused_together() -> None:
    changes: Config = {
        "mla_use_nope": False,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "moe_router_activation_func": "softmax",
        "use_grouped_topk": False,
        "moe_layer_freq": 2,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "something_new": 1,
    }
    with pytest.raises(ModelError) as caught:
        read_spec(linear(gate="silu") | changes, "tiny")
    assert [key for key in ("gate", *changes) if key not in str(caught.value)] == []


def test_a_config_without_layer_types_is_refused() -> None:
    config = tiny_kimi_linear()
    del config["linear_attn_config"]
    with pytest.raises(ModelError, match="neither 'linear_attn_config' nor a valid 'layer_types'"):
        read_spec(config, "tiny")
