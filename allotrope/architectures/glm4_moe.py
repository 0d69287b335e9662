"""GLM-4.5 to 4.7: grouped-query attention with rope on half of each head, routing and shared experts of DeepSeek V3.

Source: Zeng et al. 2025 (GLM-4.5); `modeling_glm4_moe.py` of Transformers.
"""

from __future__ import annotations

from typing import Any

from allotrope.architectures.deepseek_v2 import MtpLayers, latent_draft, latent_draft_rules, latent_model
from allotrope.architectures.deepseek_v3 import read_corrected_router
from allotrope.architectures.llama import dense_rules
from allotrope.architectures.qwen3 import qwen3_rules
from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.expert_rules import expert_rules, mlp_rules
from allotrope.checkpoint.mtp_rules import drop_mtp_layers
from allotrope.checkpoint.read_config import ConfigReader, read_rope
from allotrope.checkpoint.weights import Rule
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.mixers.mha import MhaMixerSpec
from allotrope.layers.model_spec import ModelSpec


def read_glm4_moe(config: ConfigReader) -> ModelSpec:
    """Reads GLM-4.5's config.json. The Air model has no q and k norm."""
    hidden, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    dim = config.get("head_dim", int, None) or hidden // heads
    mixer = MhaMixerSpec(
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", int),
        head_dim=dim,
        scale=dim**-0.5,
        rope=read_rope(config, dim, default_theta=10000.0, default_part=0.5),
        bias=config.get("attention_bias", bool, False),
        qk_norm="head" if config.get("use_qk_norm", bool, False) else None,
        norm_eps=config.get("rms_norm_eps", float),
    )
    return latent_model(config, [mixer] * config.get("num_hidden_layers", int), read_corrected_router(config))


def glm4_moe_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules: Llama's names, and those of experts."""
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, MhaMixerSpec)
    theirs, ours = "model.layers.{i}.mlp.", "layers.{i}.ffn."
    rules = [
        *(qwen3_rules(spec) if mixer.qk_norm else dense_rules(spec)),
        Rule(theirs + "gate.weight", ours + "router.gate.weight"),
        Rule(theirs + "gate.e_score_correction_bias", ours + "router.correction"),
        *mlp_rules(theirs + "shared_experts.", ours + "shared."),
        *expert_rules(theirs + "experts.", ours + "experts."),
    ]
    if isinstance(spec.extra, MtpLayers):
        rules += drop_mtp_layers("model.", len(spec.layers), spec.extra.layers)
    return rules


def glm4_moe_draft(config: ConfigReader) -> DraftSpec | None:
    """The multi-token-prediction layer: one more layer of the model, in DeepSeek's layout."""
    return latent_draft(read_glm4_moe(config))


def glm4_moe_draft_rules(spec: ModelSpec, draft: DraftSpec) -> list[Rule]:
    """Weight rules of the multi-token-prediction layer."""
    return latent_draft_rules(glm4_moe_rules(spec), draft)


def tiny_glm4_moe() -> dict[str, Any]:
    """Config of a GLM-4.5 with 3 layers; the first is dense."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    }


GLM4_MOE = Architecture(
    read_glm4_moe,
    glm4_moe_rules,
    tiny_glm4_moe,
    draft=glm4_moe_draft,
    draft_rules=glm4_moe_draft_rules,
    tiny_draft=lambda: tiny_glm4_moe() | {"num_nextn_predict_layers": 1},
)
