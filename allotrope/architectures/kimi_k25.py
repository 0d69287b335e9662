"""Kimi-K2.5 (text): a DeepSeek V3 inside a multimodal model.

Source: `modeling_kimi_k25.py` of Transformers.
"""

from __future__ import annotations

from typing import Any

from allotrope.architectures.deepseek_v2 import latent_draft, latent_draft_rules, latent_rules
from allotrope.architectures.deepseek_v3 import read_deepseek_v3, tiny_deepseek_v3
from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.read_config import ConfigReader
from allotrope.checkpoint.weights import Rule, drop
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.model_spec import ModelSpec

# What the names of the language model's decoder begin with.
DECODER = "language_model.model."


def read_kimi_k25(config: ConfigReader) -> ModelSpec:
    """Reads the text part of the multimodal model's config.json."""
    text = config.section("text_config")
    config.ignore("vision_config", "projection_hidden_size", "ignore_index", "media_placeholder_token_id")
    config.ignore("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config.ignore("use_unified_vision_chunk", "video_placeholder", "projection_layer_norm_eps")
    # The text part's value holds: Transformers saves its own default here, and the checkpoint has an output head.
    config.ignore("tie_word_embeddings")
    spec = read_deepseek_v3(text)
    text.refuse_unread("config text_config")
    return spec


def kimi_k25_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules of the language model inside the multimodal model."""
    return [
        *latent_rules(spec, DECODER, "language_model.lm_head.weight"),
        drop("vision_tower.*", "images are not supported"),
        drop("mm_projector.*", "images are not supported"),
    ]


def kimi_k25_draft(config: ConfigReader) -> DraftSpec | None:
    """The multi-token-prediction layer of a DeepSeek V3; released configs say that there is none."""
    return latent_draft(read_kimi_k25(config), DECODER)


def kimi_k25_draft_rules(spec: ModelSpec, draft: DraftSpec) -> list[Rule]:
    """Weight rules of the multi-token-prediction layer."""
    return latent_draft_rules(kimi_k25_rules(spec), draft, DECODER)


def tiny_kimi_k25() -> dict[str, Any]:
    """Config of a Kimi-K2.5 with 3 layers and one expert group."""
    text = tiny_deepseek_v3() | {
        "model_type": "kimi_k2",
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "patch_size": 14,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "merge_kernel_size": [2, 2],
        },
    }


def tiny_kimi_k25_draft() -> dict[str, Any]:
    """`tiny_kimi_k25` with a multi-token-prediction layer."""
    tiny = tiny_kimi_k25()
    return tiny | {"text_config": tiny["text_config"] | {"num_nextn_predict_layers": 1}}


KIMI_K25 = Architecture(
    read_kimi_k25,
    kimi_k25_rules,
    tiny_kimi_k25,
    draft=kimi_k25_draft,
    draft_rules=kimi_k25_draft_rules,
    tiny_draft=tiny_kimi_k25_draft,
)
