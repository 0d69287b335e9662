"""Qwen3, mixture of experts: the dense model's attention, softmax routing without shared experts.

Source: Yang et al. 2025 (Qwen3 technical report); `modeling_qwen3_moe.py` of Transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from allotrope.architectures.qwen3 import qwen3_rules, read_qwen3, tiny_qwen3
from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.expert_rules import expert_rules
from allotrope.checkpoint.read_config import ConfigReader
from allotrope.checkpoint.weights import Rule
from allotrope.layers.model_spec import ModelSpec
from allotrope.layers.moe import MoeSpec
from allotrope.layers.router import RouterSpec


def read_qwen3_moe(config: ConfigReader) -> ModelSpec:
    """Reads Qwen3-MoE's config.json.

    Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`.
    """
    # No release has a window, and Transformers would give it to every layer.
    config.expect("use_sliding_window", False, None)
    dense = read_qwen3(config)
    count_key = "num_experts" if config.has("num_experts") else "num_local_experts"
    moe = MoeSpec(
        hidden=dense.hidden,
        width=config.get("moe_intermediate_size", int),
        router=RouterSpec(
            experts=config.get(count_key, int),
            topk=config.get("num_experts_per_tok", int),
            normalize=config.get("norm_topk_prob", bool, False),
        ),
    )
    step, mlp_only = config.get("decoder_sparse_step", int, 1), config.get("mlp_only_layers", list, [])
    layers = tuple(
        layer if i in mlp_only or (i + 1) % step else dataclasses.replace(layer, ffn=moe)
        for i, layer in enumerate(dense.layers)
    )
    return dataclasses.replace(dense, layers=layers)


def qwen3_moe_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules: Qwen3's names, and those of experts."""
    theirs, ours = "model.layers.{i}.mlp.", "layers.{i}.ffn."
    return [
        *qwen3_rules(spec),
        Rule(theirs + "gate.weight", ours + "router.gate.weight"),
        *expert_rules(theirs + "experts.", ours + "experts."),
    ]


def tiny_qwen3_moe() -> dict[str, Any]:
    """Config of a Qwen3-MoE with 3 layers; the second is dense."""
    return tiny_qwen3() | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "max_window_layers": 3,
        "tie_word_embeddings": False,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    }


QWEN3_MOE = Architecture(read_qwen3_moe, qwen3_moe_rules, tiny_qwen3_moe)
