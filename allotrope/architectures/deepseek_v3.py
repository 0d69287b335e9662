"""DeepSeek V3, R1 and Kimi-K2: latent attention (MLA), sigmoid routing with a score correction bias.

Source: DeepSeek-AI 2024 (DeepSeek-V3); `modeling_deepseek_v3.py` of Transformers.
"""

from __future__ import annotations

from typing import Any

from allotrope.architectures.deepseek_v2 import (
    latent_draft,
    latent_draft_rules,
    latent_model,
    latent_rules,
    read_latent,
    tiny_deepseek_v2,
)
from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.read_config import ConfigReader
from allotrope.checkpoint.weights import Rule
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.model_spec import ModelSpec
from allotrope.layers.router import RouterSpec


def read_deepseek_v3(config: ConfigReader) -> ModelSpec:
    """Reads V3's config.json. Kimi-K2's has one expert group."""
    return latent_model(
        config, [read_latent(config)] * config.get("num_hidden_layers", int), read_corrected_router(config)
    )


def read_corrected_router(config: ConfigReader) -> RouterSpec:
    """Router with sigmoid scores. A correction bias per expert joins them for the top-k in the best expert groups.

    No value has a default: Transformers has another one for each model.
    """
    config.expect("topk_method", "noaux_tc", None)
    config.expect("scoring_func", "sigmoid", None)
    return RouterSpec(
        experts=config.get("n_routed_experts", int),
        topk=config.get("num_experts_per_tok", int),
        score="sigmoid",
        correction=True,
        groups=config.get("n_group", int),
        top_groups=config.get("topk_group", int),
        normalize=config.get("norm_topk_prob", bool),
        scale=config.get("routed_scaling_factor", float),
    )


def deepseek_v3_draft(config: ConfigReader) -> DraftSpec | None:
    """The multi-token-prediction layer: one more layer of the model. Kimi-K2 has none."""
    return latent_draft(read_deepseek_v3(config))


def deepseek_v3_draft_rules(spec: ModelSpec, draft: DraftSpec) -> list[Rule]:
    """Weight rules of the multi-token-prediction layer."""
    return latent_draft_rules(latent_rules(spec), draft)


def tiny_deepseek_v3() -> dict[str, Any]:
    """Config of a V3 with 3 layers."""
    return tiny_deepseek_v2() | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_shared_experts": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
    }


DEEPSEEK_V3 = Architecture(
    read_deepseek_v3,
    latent_rules,
    tiny_deepseek_v3,
    draft=deepseek_v3_draft,
    draft_rules=deepseek_v3_draft_rules,
    tiny_draft=lambda: tiny_deepseek_v3() | {"num_nextn_predict_layers": 1},
)
