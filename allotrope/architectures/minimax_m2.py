"""MiniMax-M2: full attention, whose q norm and k norm each span all heads, and sigmoid routing without shared experts.

Source: `modeling_minimax_m2.py` of Transformers.
"""

from __future__ import annotations

from typing import Any

from allotrope.architectures.deepseek_v2 import MtpLayers
from allotrope.architectures.qwen3 import qwen3_rules
from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.expert_rules import expert_rules
from allotrope.checkpoint.mtp_rules import drop_mtp_layers
from allotrope.checkpoint.read_config import ConfigReader, read_rope, rope_values
from allotrope.checkpoint.weights import Rule
from allotrope.layers.mixers.mha import MhaMixerSpec
from allotrope.layers.model_spec import LayerSpec, ModelSpec
from allotrope.layers.moe import MoeSpec
from allotrope.layers.router import RouterSpec
from allotrope.ops.rope import RopeSpec


def read_minimax_m2(config: ConfigReader) -> ModelSpec:
    """Reads MiniMax-M2's config.json. `rotary_dim` is the number of dims of a head that rope rotates."""
    hidden, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    count, eps = config.get("num_hidden_layers", int), config.get("rms_norm_eps", float)
    dim = config.get("head_dim", int, None) or hidden // heads
    _refuse_other_layers(config, count)
    layer = LayerSpec(
        mixer=MhaMixerSpec(
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", int),
            head_dim=dim,
            scale=dim**-0.5,
            rope=_read_rope(config, dim),
            qk_norm="all",
            norm_eps=eps,
        ),
        ffn=MoeSpec(
            hidden=hidden,
            width=config.get("intermediate_size", int),
            router=RouterSpec(
                experts=config.get("num_local_experts", int),
                topk=config.get("num_experts_per_tok", int),
                score="sigmoid",
                correction=True,
            ),
        ),
    )
    mtp_layers = config.get("num_mtp_modules", int, 0)
    config.ignore("use_mtp", "mtp_transformer_layers")
    return ModelSpec(
        vocab_size=config.get("vocab_size", int),
        hidden=hidden,
        context=config.get("max_position_embeddings", int),
        norm_eps=eps,
        layers=(layer,) * count,
        tied=config.get("tie_word_embeddings", bool, False),
        extra=MtpLayers(mtp_layers),
    )


def _read_rope(config: ConfigReader, dim: int) -> RopeSpec:
    """Reads the rope, whose dims are given as `rotary_dim` or as `partial_rotary_factor`."""
    rotated = config.get("rotary_dim", int, None)
    part = rope_values(config).get("partial_rotary_factor") or config.get("partial_rotary_factor", float, None)
    rope = read_rope(config, dim if part or rotated is None else rotated, default_theta=5000000.0)
    if rotated is not None and rotated > dim:
        config.refuse(f"config rotary_dim={rotated} of a head with {dim} dims (needs at most as many)")
    if rotated is not None and rotated != rope.dim:
        config.refuse(f"config rotary_dim={rotated}, but partial_rotary_factor={part} of {dim} dims: give one of them")
    return rope


def _refuse_other_layers(config: ConfigReader, count: int) -> None:
    """Refuse layer types that the config can name and no released M2 has."""
    config.expect("hidden_act", "silu")
    config.expect("scoring_func", "sigmoid", None)
    config.expect("use_routing_bias", True, None)
    config.expect("use_qk_norm", True, None)
    config.expect("qk_norm_type", "per_layer", None)
    config.expect("attn_type_list", [1] * count, None)
    config.expect("shared_intermediate_size", 0, None)
    config.expect("sliding_window", None)


def minimax_m2_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules: Qwen3's names, and those of experts."""
    theirs, ours = "model.layers.{i}.block_sparse_moe.", "layers.{i}.ffn."
    rules = [
        *qwen3_rules(spec),
        Rule(theirs + "gate.weight", ours + "router.gate.weight"),
        Rule(theirs + "e_score_correction_bias", ours + "router.correction"),
        *expert_rules(theirs + "experts.", ours + "experts.", ("w1", "w3", "w2")),
    ]
    if isinstance(spec.extra, MtpLayers):
        rules += drop_mtp_layers("model.", len(spec.layers), spec.extra.layers)
    return rules


def tiny_minimax_m2() -> dict[str, Any]:
    """Config of a MiniMax-M2 with 3 layers."""
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rotary_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 5000000,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "attn_type_list": [1, 1, 1],
    }


MINIMAX_M2 = Architecture(read_minimax_m2, minimax_m2_rules, tiny_minimax_m2)
