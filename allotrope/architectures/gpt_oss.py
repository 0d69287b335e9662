"""gpt-oss (20b and 120b): experts with a clamped SwiGLU, a sink per head, a sliding window in every other layer.

Sources: OpenAI 2025 (gpt-oss model card); `modeling_gpt_oss.py` of Transformers.
"""

from __future__ import annotations

from typing import Any

import torch

from allotrope.architectures.llama import dense_rules
from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.expert_rules import unfused_expert_rules
from allotrope.checkpoint.read_config import ConfigReader, layer_types, read_rope
from allotrope.checkpoint.weights import Rule
from allotrope.layers.mixers.mha import MhaMixerSpec
from allotrope.layers.model_spec import LayerSpec, ModelSpec
from allotrope.layers.moe import MoeSpec
from allotrope.layers.router import RouterSpec
from allotrope.ops.gated_activation import GatedActivation

SLIDING, FULL = "sliding_attention", "full_attention"


def read_gpt_oss(config: ConfigReader) -> ModelSpec:
    """Reads gpt-oss's config.json. Without `layer_types`, layers of even index have the window."""
    hidden, count = config.get("hidden_size", int), config.get("num_hidden_layers", int)
    dim, bias = config.get("head_dim", int), config.get("attention_bias", bool, True)
    heads, groups = config.get("num_attention_heads", int), config.get("num_key_value_heads", int)
    config.expect("hidden_act", "silu")
    rope, window = read_rope(config, dim, default_theta=150000.0), config.get("sliding_window", int)
    # Each of these keys repeats another value.
    config.expect("experts_per_token", config.get("num_experts_per_tok", int), None)
    if rope.scaling.original_length:
        config.expect("initial_context_length", rope.scaling.original_length, None)
    else:
        config.ignore("initial_context_length")
    kinds = layer_types(config, count, (SLIDING, FULL)) or [FULL if i % 2 else SLIDING for i in range(count)]
    ffn = MoeSpec(
        hidden=hidden,
        width=config.get("intermediate_size", int),
        # gpt-oss applies the softmax to the top-k logits. This equals the normalized top-k of a softmax over all.
        router=RouterSpec(
            experts=config.get("num_local_experts", int), topk=config.get("num_experts_per_tok", int), bias=True
        ),
        gating=GatedActivation(
            slope=config.get("swiglu_alpha", float, 1.702), limit=config.get("swiglu_limit", float, 7.0), offset=1.0
        ),
        bias=True,
    )
    layers = tuple(
        LayerSpec(
            mixer=MhaMixerSpec(
                hidden=hidden,
                num_heads=heads,
                num_kv_heads=groups,
                head_dim=dim,
                scale=dim**-0.5,
                rope=rope,
                window=window if kind == SLIDING else None,
                sinks=True,
                bias=bias,
                out_bias=bias,
            ),
            ffn=ffn,
        )
        for kind in kinds
    )
    return ModelSpec(
        vocab_size=config.get("vocab_size", int),
        hidden=hidden,
        context=config.get("max_position_embeddings", int),
        norm_eps=config.get("rms_norm_eps", float),
        layers=layers,
        tied=config.get("tie_word_embeddings", bool, False),
    )


def gpt_oss_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules: Llama's names, and experts stacked as [E, in, out] with interleaved gate and up outputs.

    GGUF files have the experts as other models do.
    """
    theirs, ours = "model.layers.{i}.mlp.", "layers.{i}.ffn."
    rules = [Rule("model.layers.{i}.self_attn.sinks", "layers.{i}.mixer.sinks")]
    for kind in ("weight", "bias"):
        rules.append(Rule(f"{theirs}router.{kind}", f"{ours}router.gate.{kind}"))
    for part, weight, bias in (("gate", _even_outputs, _even), ("up", _odd_outputs, _odd)):
        rules.append(Rule(theirs + "experts.gate_up_proj", ours + "experts.gate_up", part, transform=weight))
        rules.append(Rule(theirs + "experts.gate_up_proj_bias", ours + "experts.gate_up_bias", part, transform=bias))
    rules.append(Rule(theirs + "experts.down_proj", ours + "experts.down", transform=_outputs_first))
    rules.append(Rule(theirs + "experts.down_proj_bias", ours + "experts.down_bias"))
    for part in ("gate", "up"):
        rules.append(Rule(f"{theirs}experts.{{e}}.{part}_proj.bias", ours + "experts.gate_up_bias", part, expert="e"))
    rules.append(Rule(theirs + "experts.{e}.down_proj.bias", ours + "experts.down_bias", expert="e"))
    return [*dense_rules(spec), *rules, *unfused_expert_rules(theirs + "experts.", ours + "experts.")]


def _outputs_first(weight: torch.Tensor) -> torch.Tensor:
    """[E, in, out] to [E, out, in]."""
    return weight.transpose(1, 2)


def _even_outputs(weight: torch.Tensor) -> torch.Tensor:
    return weight.transpose(1, 2)[:, ::2]


def _odd_outputs(weight: torch.Tensor) -> torch.Tensor:
    return weight.transpose(1, 2)[:, 1::2]


def _even(bias: torch.Tensor) -> torch.Tensor:
    return bias[:, ::2]


def _odd(bias: torch.Tensor) -> torch.Tensor:
    return bias[:, 1::2]


def tiny_gpt_oss() -> dict[str, Any]:
    """Config of a gpt-oss with 4 layers; two have a window of 32."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "attention_bias": True,
        "max_position_embeddings": 512,
        "initial_context_length": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "sliding_window": 32,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "swiglu_limit": 7.0,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    }


GPT_OSS = Architecture(read_gpt_oss, gpt_oss_rules, tiny_gpt_oss)
