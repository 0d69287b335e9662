"""DeepSeek V3.2: V3 with sparse attention (DSA); an indexer chooses the top-k cache entries of each query.

Source: DeepSeek-AI 2025 (DeepSeek-V3.2); `modeling_deepseek_v32.py` of Transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from allotrope.architectures.deepseek_v2 import (
    latent_draft,
    latent_draft_rules,
    latent_model,
    latent_rules,
    read_latent,
)
from allotrope.architectures.deepseek_v3 import read_corrected_router, tiny_deepseek_v3
from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.read_config import ConfigReader, layer_types
from allotrope.checkpoint.weights import Rule
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.mixers.dsa import DsaMixerSpec, IndexerSpec
from allotrope.layers.model_spec import ModelSpec

FULL, SHARED = "full", "shared"


def read_deepseek_v32(config: ConfigReader) -> ModelSpec:
    """Reads V3.2's config.json. Every layer has an indexer, whose rope is half-split by default."""
    count = config.get("num_hidden_layers", int)
    return read_sparse(config, [FULL] * count, interleaved=config.get("indexer_rope_interleave", bool, False))


def read_sparse(config: ConfigReader, kinds: Sequence[str], *, interleaved: bool) -> ModelSpec:
    """The spec of a sparse MLA model.

    `kinds`: per layer, "full" (it has an indexer) or "shared" (it reuses the top-k indices of the layer before).
    `interleaved`: whether the indexer's rope pairs neighbouring dims.
    """
    mla = read_latent(config)
    layer_types(config, len(kinds), ("indexed_attention",))
    indexer = IndexerSpec(num_heads=config.get("index_n_heads", int), head_dim=config.get("index_head_dim", int))
    full = DsaMixerSpec(
        mla=mla,
        topk=config.get("index_topk", int),
        indexer=indexer,
        index_rope=dataclasses.replace(mla.rope, interleaved=interleaved) if mla.rope is not None else None,
    )
    mixers = {FULL: full, SHARED: dataclasses.replace(full, indexer=None)}
    return latent_model(config, [mixers[kind] for kind in kinds], read_corrected_router(config))


def sparse_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules: V3's, and the indexer's."""
    theirs, ours = "model.layers.{i}.self_attn.indexer.", "layers.{i}.mixer."
    return [
        *latent_rules(spec),
        Rule(theirs + "wq_b.weight", ours + "latent.queries.weight", "index_q"),
        Rule(theirs + "wk.weight", ours + "latent.inputs.weight", "index_k"),
        Rule(theirs + "weights_proj.weight", ours + "latent.inputs.weight", "index_weights"),
        Rule(theirs + "k_norm.weight", ours + "indexer.k_norm_weight"),
        Rule(theirs + "k_norm.bias", ours + "indexer.k_norm_bias"),
    ]


def deepseek_v32_draft(config: ConfigReader) -> DraftSpec | None:
    """The multi-token-prediction layer, which has an indexer of its own."""
    return latent_draft(read_deepseek_v32(config))


def sparse_draft_rules(spec: ModelSpec, draft: DraftSpec) -> list[Rule]:
    """Weight rules of the multi-token-prediction layer."""
    return latent_draft_rules(sparse_rules(spec), draft)


def tiny_deepseek_v32() -> dict[str, Any]:
    """Config of a V3.2 with 3 layers and top-k 32."""
    return tiny_deepseek_v3() | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_n_heads": 32,
        "index_head_dim": 32,
        "index_topk": 32,
    }


DEEPSEEK_V32 = Architecture(
    read_deepseek_v32,
    sparse_rules,
    tiny_deepseek_v32,
    draft=deepseek_v32_draft,
    draft_rules=sparse_draft_rules,
    tiny_draft=lambda: tiny_deepseek_v32() | {"num_nextn_predict_layers": 1},
)
