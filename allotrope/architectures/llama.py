"""Llama 2 and 3.x, and Mistral: dense decoders with grouped-query attention; Mistral has a sliding window.

Sources: Touvron et al. 2023; Jiang et al. 2023; `modeling_llama.py` and `modeling_mistral.py` of Transformers.
"""

from __future__ import annotations

from typing import Any

from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.read_config import ConfigReader, read_rope
from allotrope.checkpoint.weights import Rule, drop, fuse
from allotrope.layers.mixers.mha import MhaMixerSpec
from allotrope.layers.mlp import MlpSpec
from allotrope.layers.model_spec import LayerSpec, ModelSpec


def _read_dense(config: ConfigReader, window: int | None, attention_bias: bool) -> ModelSpec:
    hidden = config.get("hidden_size", int)
    heads = config.get("num_attention_heads", int)
    dim = config.get("head_dim", int, None) or hidden // heads
    mlp_bias = config.get("mlp_bias", bool, False)
    config.expect("hidden_act", "silu")
    layer = LayerSpec(
        mixer=MhaMixerSpec(
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", int, None) or heads,
            head_dim=dim,
            scale=dim**-0.5,
            rope=read_rope(config, dim, default_theta=10000.0),
            window=window,
            bias=attention_bias,
            out_bias=attention_bias,
        ),
        ffn=MlpSpec(hidden=hidden, width=config.get("intermediate_size", int), bias=mlp_bias),
    )
    return ModelSpec(
        vocab_size=config.get("vocab_size", int),
        hidden=hidden,
        context=config.get("max_position_embeddings", int),
        norm_eps=config.get("rms_norm_eps", float),
        layers=(layer,) * config.get("num_hidden_layers", int),
        tied=config.get("tie_word_embeddings", bool, False),
    )


def read_llama(config: ConfigReader) -> ModelSpec:
    """Reads Llama's config.json, and that of SmolLM2, which says that it is one."""
    config.ignore("is_llama_config")
    config.expect("rope_interleaved", False, None)
    return _read_dense(config, None, config.get("attention_bias", bool, False))


def read_mistral(config: ConfigReader) -> ModelSpec:
    """Reads Mistral's config.json. If `sliding_window` is null, attention is full; left out, it may be either."""
    config.require("sliding_window")
    return _read_dense(config, config.get("sliding_window", int, None), False)


def dense_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules that all decoders with Llama's names share."""
    layer, ours = "model.layers.{i}.", "layers.{i}."
    attention = layer + "self_attn."
    rules = [
        Rule("model.embed_tokens.weight", "embedding.weight"),
        Rule("model.norm.weight", "norm.weight"),
        Rule(layer + "input_layernorm.weight", ours + "mixer_norm.weight"),
        Rule(layer + "post_attention_layernorm.weight", ours + "ffn_norm.weight"),
        drop(layer + "self_attn.rotary_emb.inv_freq", "computed from the config"),
    ]
    for kind in ("weight", "bias"):
        rules += fuse(attention + "{}." + kind, ours + "mixer.qkv." + kind, ("q_proj", "k_proj", "v_proj"))
        rules += fuse(layer + "mlp.{}." + kind, ours + "ffn.gate_up." + kind, ("gate_proj", "up_proj"))
        rules.append(Rule(attention + "o_proj." + kind, ours + "mixer.out." + kind))
        rules.append(Rule(layer + "mlp.down_proj." + kind, ours + "ffn.down." + kind))
    if spec.tied:
        rules.append(drop("lm_head.weight", "tied to the embedding"))
    else:
        rules.append(Rule("lm_head.weight", "head.weight"))
    return rules


def tiny_llama() -> dict[str, Any]:
    """Config of a Llama with 2 layers and llama3 rope scaling."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }


def tiny_mistral() -> dict[str, Any]:
    """Config of a Mistral with 2 layers and a window of 32."""
    tiny = tiny_llama()
    for key in ("attention_bias", "mlp_bias", "rope_scaling"):
        del tiny[key]
    return tiny | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}


LLAMA = Architecture(read_llama, dense_rules, tiny_llama)
MISTRAL = Architecture(read_mistral, dense_rules, tiny_mistral)
