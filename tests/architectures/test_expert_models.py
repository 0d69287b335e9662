"""Models of plain attention with mixtures of experts against Transformers, and both layouts of experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.execution_modes import assert_matches
from engine.watching import engine, request, run
from safetensors.torch import load_file, save_file
from tiny_checkpoints import prompts, write_tiny

from allotrope.architectures.glm4_moe import tiny_glm4_moe
from allotrope.architectures.minimax_m2 import tiny_minimax_m2
from allotrope.architectures.qwen3_moe import tiny_qwen3_moe
from allotrope.architectures.registry import read_spec
from allotrope.errors import ModelError
from allotrope.layers.moe import MoeSpec

LENGTHS = (1, 2, 15, 16, 17, 33, 100)

MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "qwen3_moe": tiny_qwen3_moe,
    "qwen3_moe unnormalised": lambda: tiny_qwen3_moe() | {"norm_topk_prob": False, "decoder_sparse_step": 2},
    "glm4_moe": tiny_glm4_moe,
    "glm4_moe groups": lambda: tiny_glm4_moe() | {"use_qk_norm": False, "n_group": 4, "topk_group": 2},
    "minimax_m2": tiny_minimax_m2,
}


@pytest.mark.parametrize("name", MODELS)
def test_against_transformers(name: str, tmp_path: Path) -> None:
    assert_matches(write_tiny(MODELS[name](), tmp_path), LENGTHS, page_size=8)


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "minimax_m2"])
def test_experts_in_one_tensor_are_the_same_model(name: str, tmp_path: Path) -> None:
    unfused = write_tiny(MODELS[name](), tmp_path / "unfused")
    state = load_file(unfused.directory / "model.safetensors")
    fused, names = tmp_path / "fused", ("gate_proj", "up_proj", "down_proj")
    experts: dict[str, dict[str, torch.Tensor]] = {}
    for tensor_name in [one for one in state if ".experts." in one]:
        layer, _, rest = tensor_name.partition("experts.")
        experts.setdefault(layer, {})[rest.removesuffix(".weight")] = state.pop(tensor_name)
    assert experts
    if name == "minimax_m2":
        names = ("w1", "w3", "w2")
    for layer, parts in experts.items():
        gate, up, down = (torch.stack([parts[f"{e}.{one}"] for e in range(8 * len(parts) // 24)]) for one in names)
        state[layer + "experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        state[layer + "experts.down_proj"] = down
    fused.mkdir()
    save_file(state, fused / "model.safetensors")
    (fused / "config.json").write_text((unfused.directory / "config.json").read_text())
    requests = [request(f"p{len(ids)}", ids) for ids in prompts((3, 40))]
    assert run(engine(fused), requests) == run(engine(unfused.directory), requests)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tiny = write_tiny(tiny_qwen3_moe(), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.2\.ffn\.experts\.gate_up \(up, expert 5\)"):
        engine(tiny.directory)


def sparse(**changes: Any) -> list[bool]:
    layers = read_spec(tiny_qwen3_moe() | {"num_hidden_layers": 4} | changes, "tiny")[1].layers
    return [isinstance(layer.ffn, MoeSpec) for layer in layers]


def test_which_layers_have_experts() -> None:
    assert sparse(mlp_only_layers=[]) == [True] * 4
    assert sparse(mlp_only_layers=[0, 3]) == [False, True, True, False]
    assert sparse(mlp_only_layers=None, decoder_sparse_step=2) == [False, True, False, True]
    glm = read_spec(tiny_glm4_moe() | {"first_k_dense_replace": 2}, "tiny")[1]
    assert [isinstance(layer.ffn, MoeSpec) for layer in glm.layers] == [False, False, True]


def test_rope_dims_in_both_spellings() -> None:
    released = tiny_minimax_m2()
    respelled = {key: value for key, value in released.items() if key != "rope_theta"} | {
        "rope_parameters": {"rope_theta": 5000000, "rope_type": "default", "partial_rotary_factor": 0.5}
    }
    first, second = (read_spec(config, "tiny")[1] for config in (released, respelled))
    assert first == second
    assert getattr(first.layers[0].mixer, "rope").dim == 16  # noqa: B009


def test_unreleased_layer_types_are_refused() -> None:
    wrong = tiny_minimax_m2() | {"attn_type_list": [1, 0, 1], "qk_norm_type": "per_head", "sliding_window": 128}
    with pytest.raises(ModelError, match=r"qk_norm_type(.|\n)*attn_type_list(.|\n)*sliding_window"):
        read_spec(wrong, "tiny")
