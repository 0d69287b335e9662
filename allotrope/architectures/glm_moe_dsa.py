"""GLM-5: sparse attention (DSA) of DeepSeek V3.2. In later releases some layers reuse the top-k indices of others.

Source: `modeling_glm_moe_dsa.py` of Transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from allotrope.architectures.deepseek_v2 import latent_draft
from allotrope.architectures.deepseek_v32 import (
    FULL,
    SHARED,
    read_sparse,
    sparse_draft_rules,
    sparse_rules,
    tiny_deepseek_v32,
)
from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.read_config import ConfigReader, agreeing_layers
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.model_spec import ModelSpec


def read_glm_moe_dsa(config: ConfigReader) -> ModelSpec:
    """Reads GLM-5's config.json. The indexer's rope is interleaved by default, as the main rope is."""
    kinds = _indexer_kinds(config, config.get("num_hidden_layers", int))
    # The draft's.
    config.ignore("index_share_for_mtp_iteration")
    return read_sparse(config, kinds, interleaved=config.get("indexer_rope_interleave", bool, True))


def glm_moe_dsa_draft(config: ConfigReader) -> DraftSpec | None:
    """The multi-token-prediction layer, which has an indexer of its own. The checkpoint has no copy of the head.

    Later drafts of a step attend to the tokens that the indexer selected for the first, where the config says so.
    """
    draft = latent_draft(read_glm_moe_dsa(config))
    if draft is None or not config.get("index_share_for_mtp_iteration", bool, False):
        return draft
    return dataclasses.replace(draft, shared_topk=config.get("index_topk", int))


def _indexer_kinds(config: ConfigReader, count: int) -> list[str]:
    """Per layer, "full" (with an indexer) or "shared".

    `indexer_types` lists them, or `index_topk_pattern` spells them as F and S. Else the first layers and every
    `index_topk_freq`-th later one are full.
    """
    stated = config.get("indexer_types", list, None)
    pattern = config.values.get("index_topk_pattern")
    period, offset = config.get("index_topk_freq", int, 1), config.get("index_skip_topk_offset", int, 2)
    config.ignore("index_topk_pattern")
    if pattern is not None:
        spelled = [{"F": FULL, "S": SHARED}.get(kind, kind) for kind in pattern]
        stated = agreeing_layers(config, "index_topk_pattern", stated, spelled)
    if stated is None:
        return [FULL if max(i - offset + 1, 0) % max(period, 1) == 0 else SHARED for i in range(count)]
    kinds = [str(kind) for kind in stated]
    if len(kinds) != count or not set(kinds) <= {FULL, SHARED} or kinds[:1] != [FULL]:
        config.refuse(f"config indexer_types={kinds} (needs {count} entries, each full or shared, the first full)")
        return [FULL] * count
    return kinds


def tiny_glm_moe_dsa() -> dict[str, Any]:
    """Config of a GLM-5 with 5 layers; the third and the fifth reuse top-k indices."""
    tiny = tiny_deepseek_v32()
    for key in ("rope_scaling", "rope_theta"):
        del tiny[key]
    return tiny | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 5,
        "qk_nope_head_dim": 24,
        "qk_head_dim": 40,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "index_topk_freq": 2,
        "index_skip_topk_offset": 2,
        "indexer_types": [FULL, FULL, SHARED, FULL, SHARED],
    }


GLM_MOE_DSA = Architecture(
    read_glm_moe_dsa,
    sparse_rules,
    tiny_glm_moe_dsa,
    draft=glm_moe_dsa_draft,
    draft_rules=sparse_draft_rules,
    tiny_draft=lambda: tiny_glm_moe_dsa() | {"num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True},
)
