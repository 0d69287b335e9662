"""MiMo-V2-Flash: full and sliding-window layers with head shapes of their own, sinks in window layers, sigmoid routing.

Sources: Xiaomi 2025 (MiMo-V2-Flash technical report); `modeling_mimo_v2_flash.py` of Transformers.
"""

from __future__ import annotations

from typing import Any

from allotrope.architectures.llama import dense_rules
from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.expert_rules import expert_rules
from allotrope.checkpoint.mtp_rules import DRAFTS_ALONE, mtp_layer_rules, mtp_part_rules
from allotrope.checkpoint.read_config import ConfigReader, agreeing_layers, layer_types, read_rope
from allotrope.checkpoint.weights import Rule, drop
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.mixers.mha import MhaMixerSpec
from allotrope.layers.mlp import MlpSpec
from allotrope.layers.model_spec import FfnSpec, LayerSpec, ModelSpec
from allotrope.layers.moe import MoeSpec
from allotrope.layers.mtp import MtpSpec
from allotrope.layers.router import RouterSpec
from allotrope.ops.rope import RopeSpec

SLIDING, FULL = "sliding_attention", "full_attention"


def read_mimo_v2_flash(config: ConfigReader) -> ModelSpec:
    """Reads MiMo-V2-Flash's config.json."""
    hidden, count = config.get("hidden_size", int), config.get("num_hidden_layers", int)
    config.expect("hidden_act", "silu")
    # The model has no chunked attention, and Transformers ignores this key.
    config.ignore("attention_chunk_size")
    eps = _eps(config)
    mixers = {SLIDING: _mixer(config, SLIDING, eps), FULL: _mixer(config, FULL, eps)}
    ffns: dict[bool, FfnSpec] = {
        False: MlpSpec(hidden=hidden, width=config.get("intermediate_size", int)),
        True: _experts(config, hidden),
    }
    layers = tuple(
        LayerSpec(mixer=mixers[kind], ffn=ffns[sparse])
        for kind, sparse in zip(_kinds(config, count), _sparse(config, count), strict=True)
    )
    return ModelSpec(
        vocab_size=config.get("vocab_size", int),
        hidden=hidden,
        context=config.get("max_position_embeddings", int),
        norm_eps=eps,
        layers=layers,
        tied=config.get("tie_word_embeddings", bool, False),
    )


def _eps(config: ConfigReader) -> float:
    eps = config.get("layernorm_epsilon", float, None) or config.get("rms_norm_eps", float)
    config.expect("rms_norm_eps", eps, None)
    return eps


def _kinds(config: ConfigReader, count: int) -> list[str]:
    pattern = config.get("hybrid_layer_pattern", list, None)
    stated = layer_types(config, count, (SLIDING, FULL))
    if pattern is None and stated is not None:
        return stated
    if pattern is None or len(pattern) != count or set(pattern) - {0, 1}:
        config.refuse(f"config hybrid_layer_pattern={pattern!r} (needs {count} of 0 for full and 1 for windowed)")
        return [FULL] * count
    derived = [SLIDING if windowed else FULL for windowed in pattern]
    return agreeing_layers(config, "hybrid_layer_pattern", stated, derived)


def _sparse(config: ConfigReader, count: int) -> list[bool]:
    """Whether each layer has experts."""
    frequency, kinds = config.get("moe_layer_freq", list, None), config.get("mlp_layer_types", list, None)
    stated = None if kinds is None else [kind == "sparse" for kind in kinds]
    sparse = agreeing_layers(config, "moe_layer_freq", stated, [bool(flag) for flag in frequency or []])
    if len(sparse) != count:
        config.refuse(f"config moe_layer_freq={frequency!r} (needs {count} of 0 for dense and 1 for experts)")
        return [True] * count
    return sparse


def _mixer(config: ConfigReader, kind: str, eps: float) -> MhaMixerSpec:
    windowed = kind == SLIDING
    shape = {
        name: config.get(("swa_" if windowed else "") + name, int, None) or config.get(name, int)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    }
    sinks = (
        config.get("add_swa_attention_sink_bias", bool, True),
        config.get("add_full_attention_sink_bias", bool, False),
    )
    dim = shape["head_dim"]
    config.require("attention_value_scale")
    return MhaMixerSpec(
        hidden=config.get("hidden_size", int),
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=dim,
        v_head_dim=shape["v_head_dim"],
        scale=dim**-0.5,
        rope=_rope(config, dim, kind),
        window=_window(config) if windowed else None,
        sinks=sinks[0] if windowed else sinks[1],
        bias=config.get("attention_bias", bool, False),
        value_scale=config.get("attention_value_scale", float, 1.0),
        norm_eps=eps,
    )


def _rope(config: ConfigReader, dim: int, kind: str) -> RopeSpec:
    theta = config.get("swa_rope_theta", float, 10000.0)
    key = "swa_rope_theta" if kind == SLIDING else "rope_theta"
    return read_rope(config, dim, kind=kind, theta_key=key, default_theta=theta if kind == SLIDING else 5000000.0)


def _window(config: ConfigReader) -> int:
    """The number of keys that a query sees: `sliding_window_size` earlier ones and its own."""
    before, stated = config.get("sliding_window_size", int, None), config.get("sliding_window", int, None)
    if before is None and stated is None:
        config.refuse("config has neither 'sliding_window_size' nor 'sliding_window' (needs int)")
    if before is None:
        return stated or 1
    # Released configs hold the same number twice. In Transformers, `sliding_window` counts the query's own key.
    config.expect("sliding_window", before, before + 1, None)
    return before + 1


def _experts(config: ConfigReader, hidden: int) -> MoeSpec:
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc", None)
    config.expect("n_shared_experts", None, 0)
    router = RouterSpec(
        experts=config.get("n_routed_experts", int),
        topk=config.get("num_experts_per_tok", int),
        score="sigmoid",
        correction=True,
        groups=config.get("n_group", int, 1),
        top_groups=config.get("topk_group", int, 1),
        normalize=config.get("norm_topk_prob", bool, True),
        scale=config.get("routed_scaling_factor", float, None) or 1.0,
    )
    return MoeSpec(hidden=hidden, width=config.get("moe_intermediate_size", int), router=router)


def mimo_v2_flash_draft(config: ConfigReader) -> DraftSpec:
    """The first of three multi-token-prediction layers, which makes all drafts: a window layer with a dense MLP.

    The config does not count them, and every release has them.
    """
    ffn = MlpSpec(hidden=config.get("hidden_size", int), width=config.get("intermediate_size", int))
    layer = LayerSpec(mixer=_mixer(config, SLIDING, _eps(config)), ffn=ffn)
    return MtpSpec(layers=(layer,), prefix="model.mtp.layers.0.")


def mimo_v2_flash_draft_rules(spec: ModelSpec, draft: DraftSpec) -> list[Rule]:
    """Weight rules of the first multi-token-prediction layer."""
    parts = {
        "enorm.weight": "embedding_norm.weight",
        "hnorm.weight": "hidden_norm.weight",
        "eh_proj.weight": "projection.weight",
        "pre_mlp_layernorm.weight": "layers.0.ffn_norm.weight",
        "final_layernorm.weight": "norm.weight",
    }
    of_layer = mtp_layer_rules(mimo_v2_flash_rules(spec), "model.layers.{i}.", draft.prefix)
    return [*of_layer, *mtp_part_rules(draft.prefix, parts)]


def mimo_v2_flash_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules: Llama's names, sinks, and one tensor per expert."""
    theirs, ours = "model.layers.{i}.mlp.", "layers.{i}.ffn."
    rules = [
        Rule("model.layers.{i}.self_attn.attention_sink_bias", "layers.{i}.mixer.sinks"),
        Rule(theirs + "gate.weight", ours + "router.gate.weight"),
        Rule(theirs + "gate.e_score_correction_bias", ours + "router.correction"),
        drop("model.mtp.*", DRAFTS_ALONE),
    ]
    return [*dense_rules(spec), *rules, *expert_rules(theirs + "experts.", ours + "experts.")]


def tiny_mimo_v2_flash() -> dict[str, Any]:
    """Config of 6 layers: window layers between two full ones; the first layer is dense."""
    return {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "v_head_dim": 32,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 48,
        "swa_v_head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "layernorm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_value_scale": 0.707,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1],
        "sliding_window": 16,
        "sliding_window_size": 16,
        "attention_chunk_size": 16,
        "rope_theta": 5000000,
        "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": None,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": None,
    }


MIMO_V2_FLASH = Architecture(
    read_mimo_v2_flash,
    mimo_v2_flash_rules,
    tiny_mimo_v2_flash,
    draft=mimo_v2_flash_draft,
    draft_rules=mimo_v2_flash_draft_rules,
    # The config does not say so.
    tiny_draft=tiny_mimo_v2_flash,
)
