"""Every architecture from a GGUF file as llama.cpp writes it, against the checkpoint that was converted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.watching import Watch, engine, request, run
from gguf_twins import ARCHITECTURES, write_gguf_twin
from safetensors.torch import load_file, save_file
from tiny_checkpoints import prompts, write_tiny

from allotrope.architectures.gemma4 import tiny_gemma4, tiny_gemma4_wrapper
from allotrope.architectures.registry import ARCHITECTURES as KNOWN
from allotrope.architectures.registry import find_architecture
from allotrope.checkpoint.gguf_architectures import ARCHITECTURES as READ
from allotrope.checkpoint.gguf_architectures import REFUSED

LENGTHS = (1, 3, 40)


def tiny_config(name: str) -> dict[str, Any]:
    """The tiny config of an architecture, within what llama.cpp has."""
    config = find_architecture({"architectures": [name]}, "").tiny()
    if name == "DeepseekV2ForCausalLM":
        # A file has one number for both.
        config["rope_scaling"]["mscale"] = config["rope_scaling"]["mscale_all_dim"]
    if name == "LlamaForCausalLM":
        config["rope_scaling"]["original_max_position_embeddings"] = 8192
    if "mlp_only_layers" in config:
        config["mlp_only_layers"] = []
    if name == "Gemma3ForCausalLM":
        config["query_pre_attn_scalar"] = config["head_dim"]
    return config


def sandwich_with_experts() -> dict[str, Any]:
    """A Gemma 4 with experts beside the dense MLP."""
    return tiny_gemma4() | {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    }


def sandwich_that_shares() -> dict[str, Any]:
    """A Gemma 4 with per-layer embeddings, and layers that share a KV cache."""
    text: dict[str, Any] = tiny_gemma4_wrapper()["text_config"]
    return text | {"architectures": ["Gemma4ForCausalLM"]}


def without_query_rank() -> dict[str, Any]:
    """DeepSeek V2-Lite: one projection of queries, one group of experts."""
    return tiny_config("DeepseekV2ForCausalLM") | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}


CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: lambda name=name: tiny_config(name) for name in ARCHITECTURES},
    "Gemma4 with experts": sandwich_with_experts,
    "Gemma4 that shares": sandwich_that_shares,
    "DeepSeek V2-Lite": without_query_rank,
}


def write_checkpoint(config: dict[str, Any], directory: Path) -> Path:
    write_tiny(config, directory)
    if config["model_type"] == "kimi_linear":
        # As released: a dense MLP does not have the name of the experts.
        file = directory / "model.safetensors"
        names = re.compile(r"block_sparse_moe\.((gate|up|down)_proj)\.")
        save_file({names.sub(r"mlp.\1.", name): value for name, value in load_file(file).items()}, file)
    return directory


def seen_logits(model: str, ids: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Name -> [L, vocabulary]: the logits that the engine computes at every position of each prompt."""
    watch = Watch()
    running = engine(model, watch, max_model_len=64, max_num_seqs=4, enable_prefix_caching=False)
    run(running, [request(name, prompt) for name, prompt in ids.items()])
    return {name: torch.stack([watch.seen[name][i] for i in range(len(prompt))]) for name, prompt in ids.items()}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_converted_checkpoint_has_the_same_logits(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    directory = write_checkpoint(CONFIGS[name](), tmp_path / "model")
    file = write_gguf_twin(directory, tmp_path / "model.gguf")
    ids = {f"p{len(one)}": one for one in prompts(LENGTHS)}
    want, got = seen_logits(str(directory), ids), seen_logits(file, ids)
    for prompt in ids:
        torch.testing.assert_close(got[prompt], want[prompt], atol=2e-4, rtol=0.0)


def test_every_architecture_has_a_file_or_a_reason() -> None:
    converted = {name for name in KNOWN if name in ARCHITECTURES}
    # Text parts of multimodal models are files of the text model; Kimi-K2.5's is a DeepSeek V3.
    inside = {name for name in KNOWN if name.endswith("ForConditionalGeneration")}
    assert set(KNOWN) - converted - inside == {"DeepseekV4ForCausalLM"}
    assert set(READ) - set(ARCHITECTURES.values()) == {"mistral3"}
    assert set(REFUSED) == {"deepseek4"}
