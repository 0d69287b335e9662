"""Qwen3, dense: grouped-query attention with a norm on each head of q and k.

Source: Yang et al. 2025 (Qwen3 technical report); `modeling_qwen3.py` of Transformers.
"""

from __future__ import annotations

from typing import Any

from allotrope.architectures.llama import dense_rules, tiny_llama
from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.read_config import ConfigReader, layer_types, read_rope
from allotrope.checkpoint.weights import Rule
from allotrope.layers.mixers.mha import MhaMixerSpec
from allotrope.layers.mlp import MlpSpec
from allotrope.layers.model_spec import LayerSpec, ModelSpec


def read_qwen3(config: ConfigReader) -> ModelSpec:
    """Reads Qwen3's config.json. With `use_sliding_window`, layers from `max_window_layers` on have the window."""
    hidden, count = config.get("hidden_size", int), config.get("num_hidden_layers", int)
    heads = config.get("num_attention_heads", int)
    dim = config.get("head_dim", int, None) or hidden // heads
    config.expect("hidden_act", "silu")
    rope, windows = read_rope(config, dim, default_theta=10000.0), qwen_windows(config, count)
    bias = config.get("attention_bias", bool, False)
    ffn = MlpSpec(hidden=hidden, width=config.get("intermediate_size", int))
    groups, eps = config.get("num_key_value_heads", int, None) or heads, config.get("rms_norm_eps", float)
    layers = tuple(
        LayerSpec(
            mixer=MhaMixerSpec(
                hidden=hidden,
                num_heads=heads,
                num_kv_heads=groups,
                head_dim=dim,
                scale=dim**-0.5,
                rope=rope,
                window=window,
                bias=bias,
                out_bias=bias,
                qk_norm="head",
                norm_eps=eps,
            ),
            ffn=ffn,
        )
        for window in windows
    )
    return ModelSpec(
        vocab_size=config.get("vocab_size", int),
        hidden=hidden,
        context=config.get("max_position_embeddings", int),
        norm_eps=eps,
        layers=layers,
        tied=config.get("tie_word_embeddings", bool, False),
    )


def qwen_windows(config: ConfigReader, count: int) -> list[int | None]:
    """The window of each layer of a Qwen config; None is full attention."""
    size = config.get("sliding_window", int, None)
    first = config.get("max_window_layers", int, count)
    if config.get("use_sliding_window", bool, False):
        config.require("sliding_window")
    else:
        size = None
    kinds = layer_types(config, count, ("full_attention", "sliding_attention"))
    if kinds is not None:
        return [size if kind == "sliding_attention" else None for kind in kinds]
    if size is not None:
        config.require("max_window_layers")
    return [size if i >= first else None for i in range(count)]


def qwen3_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules: Llama's names, and the q and k norms."""
    norms = [
        Rule(f"model.layers.{{i}}.self_attn.{name}.weight", f"layers.{{i}}.mixer.{name}.weight")
        for name in ("q_norm", "k_norm")
    ]
    return [*dense_rules(spec), *norms]


def tiny_qwen3() -> dict[str, Any]:
    """Config of a Qwen3 with 2 layers and tied embeddings."""
    tiny = tiny_llama()
    for key in ("mlp_bias", "rope_scaling"):
        del tiny[key]
    return tiny | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
    }


QWEN3 = Architecture(read_qwen3, qwen3_rules, tiny_qwen3)
