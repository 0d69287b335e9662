"""Kimi-Linear: Kimi delta attention (KDA, a decay per channel), MLA without rope, and DeepSeek V3's routing.

Source: Kimi Team 2025 (Kimi Linear); `modeling_kimi_linear.py` of Transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from allotrope.architectures.deepseek_v2 import MtpLayers, latent_attention_rules, read_latent, sparse_layers
from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.expert_rules import expert_rules, mlp_rules
from allotrope.checkpoint.mtp_rules import drop_mtp_layers
from allotrope.checkpoint.read_config import ConfigReader, layer_types
from allotrope.checkpoint.weights import Rule
from allotrope.layers.mixers.kda import KdaMixerSpec
from allotrope.layers.mixers.mixer import MixerSpec
from allotrope.layers.mixers.mla import MlaMixerSpec
from allotrope.layers.mlp import MlpSpec
from allotrope.layers.model_spec import LayerSpec, ModelSpec
from allotrope.layers.moe import MoeSpec
from allotrope.layers.router import RouterSpec

LINEAR, FULL = "linear_attention", "full_attention"


def read_kimi_linear(config: ConfigReader) -> ModelSpec:
    """Reads Kimi-Linear's config.json, with the released `linear_attn_config` or Transformers' `layer_types`."""
    hidden, count = config.get("hidden_size", int), config.get("num_hidden_layers", int)
    config.expect("hidden_act", "silu")
    config.expect("tie_word_embeddings", False, None)
    mixers: dict[str, MixerSpec] = {LINEAR: _linear(config), FULL: _full(config)}
    dense = MlpSpec(hidden=hidden, width=config.get("intermediate_size", int))
    sparse = _experts(config, hidden)
    return ModelSpec(
        vocab_size=config.get("vocab_size", int),
        hidden=hidden,
        context=config.get("model_max_length", int),
        norm_eps=config.get("rms_norm_eps", float),
        layers=tuple(
            LayerSpec(mixer=mixers[kind], ffn=sparse if has_experts else dense)
            for kind, has_experts in zip(_kinds(config, count), sparse_layers(config, count), strict=True)
        ),
        extra=MtpLayers(config.get("num_nextn_predict_layers", int, 0)),
    )


def _linear(config: ConfigReader) -> KdaMixerSpec:
    """Reads KDA. q, k and v have the same heads. The rank of both low-rank projections is the head size."""
    stated = config.has("linear_attn_config")
    inner = config.section("linear_attn_config") if stated else config
    prefix = "" if stated else "linear_"
    heads, dim = inner.get(prefix + "num_heads", int), inner.get(prefix + "head_dim", int)
    width = inner.get("short_conv_kernel_size" if stated else "linear_conv_kernel_dim", int)
    if stated:
        inner.ignore("full_attn_layers", "kda_layers")
        inner.refuse_unread("config linear_attn_config")
        for name, value in (("num_heads", heads), ("head_dim", dim), ("conv_kernel_dim", width)):
            config.expect("linear_" + name, value, None)
    return KdaMixerSpec(
        hidden=config.get("hidden_size", int),
        num_k_heads=heads,
        num_v_heads=heads,
        k_head_dim=dim,
        v_head_dim=dim,
        conv_width=width,
        rank=dim,
        norm_eps=config.get("rms_norm_eps", float),
    )


def _full(config: ConfigReader) -> MlaMixerSpec:
    """Reads MLA without rope. A config with rope parameters is refused."""
    config.expect("mla_use_nope", True, None)
    config.expect("rope_scaling", None)
    config.expect("rope_parameters", None)
    return dataclasses.replace(read_latent(config), rope=None)


def _kinds(config: ConfigReader, count: int) -> list[str]:
    """The type of each layer, from the lists in `linear_attn_config` (counted from 1) or from `layer_types`.

    A config in which the two differ is refused.
    """
    stated = layer_types(config, count, (LINEAR, FULL))
    if not config.has("linear_attn_config"):
        if stated is None:
            config.refuse("config has neither 'linear_attn_config' nor a valid 'layer_types' to say what layers are")
        return stated or [LINEAR] * count
    lists = config.section("linear_attn_config")
    full, linear = lists.get("full_attn_layers", list), lists.get("kda_layers", list)
    numbered = [FULL if i in full else LINEAR for i in range(1, count + 1)]
    if len(full) + len(linear) != count or any(full.count(i) + linear.count(i) != 1 for i in range(1, count + 1)):
        config.refuse(
            f"config linear_attn_config full_attn_layers={full!r} and kda_layers={linear!r} "
            f"(together they need each of the layers 1 to {count} once)"
        )
    elif stated is not None and stated != numbered:
        config.refuse(f"config layer_types={stated!r} but linear_attn_config says {numbered!r}")
    return numbered


def _experts(config: ConfigReader, hidden: int) -> MoeSpec:
    config.expect("moe_router_activation_func", "sigmoid", None)
    config.expect("use_grouped_topk", True, None)
    width, shared = config.get("moe_intermediate_size", int), config.get("num_shared_experts", int, None) or 0
    router = RouterSpec(
        experts=config.get("num_experts", int),
        topk=config.get("num_experts_per_token", int),
        score="sigmoid",
        correction=True,
        groups=config.get("num_expert_group", int, 1),
        top_groups=config.get("topk_group", int, 1),
        normalize=config.get("moe_renormalize", bool, True),
        scale=config.get("routed_scaling_factor", float),
    )
    block = MlpSpec(hidden=hidden, width=width * shared) if shared else None
    return MoeSpec(hidden=hidden, width=width, router=router, shared=block)


def kimi_linear_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules of the released names and of Transformers', which give a dense MLP the experts' name."""
    layer, ours = "model.layers.{i}.", "layers.{i}."
    sparse = layer + "block_sparse_moe."
    rules = [
        Rule("model.embed_tokens.weight", "embedding.weight"),
        Rule("model.norm.weight", "norm.weight"),
        Rule("lm_head.weight", "head.weight"),
        Rule(layer + "input_layernorm.weight", ours + "mixer_norm.weight"),
        Rule(layer + "post_attention_layernorm.weight", ours + "ffn_norm.weight"),
        Rule(sparse + "gate.weight", ours + "ffn.router.gate.weight"),
        Rule(sparse + "gate.e_score_correction_bias", ours + "ffn.router.correction"),
        *mlp_rules(layer + "mlp.", ours + "ffn."),
        *mlp_rules(sparse, ours + "ffn."),
        *mlp_rules(sparse + "shared_experts.", ours + "ffn.shared."),
        *expert_rules(sparse + "experts.", ours + "ffn.experts.", ("w1", "w3", "w2")),
    ]
    # Each layer has rules of its own, because both layer types have a q_proj.
    for i, layer_spec in enumerate(spec.layers):
        theirs, target = f"model.layers.{i}.self_attn.", f"layers.{i}.mixer."
        if isinstance(layer_spec.mixer, MlaMixerSpec):
            rules += latent_attention_rules(layer_spec.mixer, theirs, target)
        else:
            rules += _linear_rules(theirs, target)
    if isinstance(spec.extra, MtpLayers):
        rules += drop_mtp_layers("model.", len(spec.layers), spec.extra.layers)
    return rules


def _linear_rules(theirs: str, ours: str) -> list[Rule]:
    sections = {"q": "q", "k": "k", "v": "v", "b": "b", "f_a": "decay", "g_a": "gate"}
    renamed = {"f_b_proj.weight": "decay.weight", "g_b_proj.weight": "gate.weight", "dt_bias": "dt_bias"}
    renamed |= {"o_norm.weight": "norm", "o_proj.weight": "out.weight"}
    return [
        *(Rule(f"{theirs}{name}_proj.weight", ours + "inputs.weight", to) for name, to in sections.items()),
        *(Rule(f"{theirs}{name}_conv1d.weight", ours + "conv_weight", name, transform=_taps) for name in "qkv"),
        *(Rule(theirs + name, ours + to) for name, to in renamed.items()),
        Rule(theirs + "A_log", ours + "A_log", transform=torch.flatten),
    ]


def _taps(weight: torch.Tensor) -> torch.Tensor:
    """[channels, 1, width] of a depthwise convolution to [channels, width]."""
    return weight.squeeze(1)


def tiny_kimi_linear() -> dict[str, Any]:
    """Config of 5 layers: the fourth has MLA, the first has no experts."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": 320,
        "pad_token_id": 0,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "hidden_act": "silu",
        "model_max_length": 2048,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 32,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3, 5],
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    }


KIMI_LINEAR = Architecture(read_kimi_linear, kimi_linear_rules, tiny_kimi_linear)
