"""Tiny models in every shape of which there are GGUF files, and their files in blocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_twins import ARCHITECTURES, write_gguf_twin
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_tiny

from allotrope.architectures.gemma4 import tiny_gemma4, tiny_gemma4_wrapper
from allotrope.architectures.registry import find_architecture
from allotrope.gguf_file import GgufFile


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


def write_blocks(config: dict[str, Any], folder: Path, write_gguf: Callable[..., str], *, named: str = "") -> str:
    """A GGUF file of a tiny model, whose matrices are blocks of Q8_0. `named`: another `general.architecture`."""
    plain = GgufFile(write_gguf_twin(write_checkpoint(config, folder / "model"), folder / "plain.gguf"))
    tensors = {one.name: np.array(one.data) for one in gguf.GGUFReader(plain.path).tensors}
    # As llama.cpp does it: routers and convolutions stay as they are.
    kinds = {
        name: "Q8_0"
        for name, one in tensors.items()
        if one.ndim > 1 and one.shape[-1] % 32 == 0 and "gate_inp" not in name and "conv" not in name
    }
    own = plain.metadata.pop("general.architecture")
    metadata = {re.sub(rf"^{own}\.", f"{named or own}.", key): value for key, value in plain.metadata.items()}
    return write_gguf(folder / "blocks.gguf", named or own, metadata, tensors, kinds)
