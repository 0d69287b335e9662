"""Qwen3.5, dense and MoE: Qwen3-Next with separate projections of the delta rule, inside a multimodal model.

Only the text part is served.

Source: Qwen Team 2026 (Qwen3.5); `modeling_qwen3_5.py` and `modeling_qwen3_5_moe.py` of Transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from allotrope.architectures.qwen3_next import (
    hybrid,
    hybrid_draft,
    hybrid_draft_rules,
    hybrid_rules,
    read_mixers,
    read_moe,
    separate_projection_rules,
    tiny_qwen3_next,
)
from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.read_config import ConfigReader, wrapper_is_tied
from allotrope.checkpoint.weights import Rule, drop
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.mixers.gdn import GdnMixerSpec
from allotrope.layers.mlp import MlpSpec
from allotrope.layers.model_spec import FfnSpec, ModelSpec


def read_qwen3_5(config: ConfigReader) -> ModelSpec:
    """Reads the text config. Layers have experts if it has `num_experts`."""
    config.expect("attn_output_gate", True, None)
    # Released configs ask for a recurrent state in fp32, which is also the engine's default.
    config.expect("mamba_ssm_dtype", "float32", None)
    # `qwen3_5_draft` reads them.
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    mixers = read_mixers(config)
    return hybrid(config, mixers, [_ffn(config)] * len(mixers))


def _ffn(config: ConfigReader) -> FfnSpec:
    hidden = config.get("hidden_size", int)
    if config.has("num_experts"):
        return read_moe(config, hidden, normalize=True)
    return MlpSpec(hidden=hidden, width=config.get("intermediate_size", int))


def qwen3_5_draft(config: ConfigReader) -> DraftSpec | None:
    """The multi-token-prediction layer of the text config, which shares embedding and head."""
    config.expect("mtp_use_dedicated_embeddings", False, None)
    return hybrid_draft(config, config.get("mtp_num_hidden_layers", int, 0), _ffn(config))


def wrapper_draft(config: ConfigReader) -> DraftSpec | None:
    """The same of the multimodal model, whose tensors have the same names."""
    return qwen3_5_draft(config.section("text_config"))


def read_wrapper(config: ConfigReader) -> ModelSpec:
    """Reads the text part of the multimodal model's config."""
    text = config.section("text_config")
    config.ignore("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    spec = read_qwen3_5(text)
    text.refuse_unread("config text_config")
    return dataclasses.replace(spec, tied=wrapper_is_tied(config, text, spec.tied))


def qwen3_5_rules(spec: ModelSpec, prefix: str = "model.") -> list[Rule]:
    """Weight rules of the language model. q, k and v are one tensor; z, b and a are one each."""
    rules = hybrid_rules(spec, prefix)
    mixer = next((layer.mixer for layer in spec.layers if isinstance(layer.mixer, GdnMixerSpec)), None)
    if mixer is None:
        return rules
    return rules + separate_projection_rules(mixer, prefix + "layers.{i}.linear_attn.")


def wrapper_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules of the language model inside the multimodal model. The vision part is dropped."""
    return [*qwen3_5_rules(spec, "model.language_model."), drop("model.visual.*", "images are not supported")]


def tiny_qwen3_5() -> dict[str, Any]:
    """Config of 5 layers; the fourth has full attention."""
    tiny = tiny_qwen3_next()
    for key in list(tiny):
        if "expert" in key or key in ("moe_intermediate_size", "norm_topk_prob", "mlp_only_layers", "rope_theta"):
            del tiny[key]
    for key in ("decoder_sparse_step", "rope_scaling", "partial_rotary_factor"):
        del tiny[key]
    rope = {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    }
    return tiny | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"],
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 0,
        "rope_parameters": rope,
    }


def tiny_qwen3_5_moe() -> dict[str, Any]:
    """`tiny_qwen3_5` with experts in every layer."""
    tiny = tiny_qwen3_5()
    del tiny["intermediate_size"]
    return tiny | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    }


def _wrapped(text: dict[str, Any], name: str, kind: str) -> dict[str, Any]:
    """The text config inside a multimodal config, with a small vision part."""
    vision = {
        "model_type": kind,
        "depth": 1,
        "hidden_size": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 64,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    }
    return {
        "architectures": [name],
        "model_type": kind,
        "tie_word_embeddings": False,
        "image_token_id": 320,
        "video_token_id": 321,
        "vision_start_token_id": 322,
        "vision_end_token_id": 323,
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": vision,
    }


def tiny_wrapper() -> dict[str, Any]:
    """Config of the dense multimodal model."""
    return _wrapped(tiny_qwen3_5(), "Qwen3_5ForConditionalGeneration", "qwen3_5")


def tiny_moe_wrapper() -> dict[str, Any]:
    """Config of the multimodal model with experts."""
    return _wrapped(tiny_qwen3_5_moe(), "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")


def _with_mtp(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}


QWEN3_5 = Architecture(
    read_qwen3_5,
    qwen3_5_rules,
    tiny_qwen3_5,
    draft=qwen3_5_draft,
    draft_rules=hybrid_draft_rules,
    tiny_draft=lambda: _with_mtp(tiny_qwen3_5()),
)
QWEN3_5_MOE = dataclasses.replace(QWEN3_5, tiny=tiny_qwen3_5_moe, tiny_draft=lambda: _with_mtp(tiny_qwen3_5_moe()))
QWEN3_5_WRAPPER = Architecture(
    read_wrapper,
    wrapper_rules,
    tiny_wrapper,
    draft=wrapper_draft,
    draft_rules=hybrid_draft_rules,
    tiny_draft=lambda: _wrapped(_with_mtp(tiny_qwen3_5()), "Qwen3_5ForConditionalGeneration", "qwen3_5"),
)
QWEN3_5_MOE_WRAPPER = dataclasses.replace(
    QWEN3_5_WRAPPER,
    tiny=tiny_moe_wrapper,
    tiny_draft=lambda: _wrapped(_with_mtp(tiny_qwen3_5_moe()), "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
)
