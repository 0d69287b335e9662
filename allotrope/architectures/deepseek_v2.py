"""DeepSeek V2 and V2-Lite: latent attention (MLA), group-limited softmax routing, shared experts.

Source: DeepSeek-AI 2024 (DeepSeek-V2); `modeling_deepseek_v2.py` of Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.expert_rules import expert_rules, mlp_rules
from allotrope.checkpoint.mtp_rules import drop_mtp_layers, mtp_layer_rules, mtp_part_rules
from allotrope.checkpoint.read_config import ConfigReader, agreeing_layers, read_rope, rope_values, yarn_scale
from allotrope.checkpoint.weights import Rule, drop
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.mixers.dsa import DsaMixerSpec
from allotrope.layers.mixers.mixer import MixerSpec
from allotrope.layers.mixers.mla import MlaMixerSpec
from allotrope.layers.mlp import MlpSpec
from allotrope.layers.model_spec import LayerSpec, ModelSpec
from allotrope.layers.moe import MoeSpec
from allotrope.layers.mtp import MtpSpec
from allotrope.layers.router import RouterSpec

# The norms inside attention have this eps; the config's rms_norm_eps holds for the others.
LATENT_NORM_EPS = 1e-6

# Names of the parts around a multi-token-prediction layer -> ours.
MTP_PARTS = {
    "enorm.weight": "embedding_norm.weight",
    "hnorm.weight": "hidden_norm.weight",
    "eh_proj.weight": "projection.weight",
    "shared_head.norm.weight": "norm.weight",
}
MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True)
class MtpLayers:
    """Multi-token-prediction layers after the model's own, which the model does not run. `layers`: their number."""

    layers: int


def read_deepseek_v2(config: ConfigReader) -> ModelSpec:
    """Reads V2's config.json. If `q_lora_rank` is null (V2-Lite), one projection maps x to queries."""
    config.expect("topk_method", "greedy", "group_limited_greedy")
    config.expect("scoring_func", "softmax", None)
    config.expect("norm_topk_prob", False, None)
    limited = config.values.get("topk_method") == "group_limited_greedy"
    router = RouterSpec(
        experts=config.get("n_routed_experts", int),
        topk=config.get("num_experts_per_tok", int),
        groups=(config.get("n_group", int, None) or 1) if limited else 1,
        top_groups=(config.get("topk_group", int, None) or 1) if limited else 1,
        group_best=1,
        normalize=False,
        scale=config.get("routed_scaling_factor", float, 1.0),
    )
    config.ignore("n_group", "topk_group")
    return latent_model(config, [read_latent(config)] * config.get("num_hidden_layers", int), router)


def latent_model(config: ConfigReader, mixers: Sequence[MixerSpec], router: RouterSpec) -> ModelSpec:
    """The spec of a DeepSeek model with these mixers: dense layers first, then MoE layers with shared experts."""
    hidden, width = config.get("hidden_size", int), config.get("moe_intermediate_size", int)
    config.expect("hidden_act", "silu")
    config.expect("mlp_bias", False, None)
    shared = config.get("n_shared_experts", int, None) or 0
    dense = MlpSpec(hidden=hidden, width=config.get("intermediate_size", int))
    moe = MoeSpec(
        hidden=hidden,
        width=width,
        router=router,
        shared=MlpSpec(hidden=hidden, width=width * shared) if shared else None,
    )
    mtp_layers = config.get("num_nextn_predict_layers", int, 0)
    return ModelSpec(
        vocab_size=config.get("vocab_size", int),
        hidden=hidden,
        context=config.get("max_position_embeddings", int),
        norm_eps=config.get("rms_norm_eps", float),
        layers=tuple(
            LayerSpec(mixer=mixer, ffn=moe if sparse else dense)
            for mixer, sparse in zip(mixers, sparse_layers(config, len(mixers)), strict=True)
        ),
        tied=config.get("tie_word_embeddings", bool, False),
        extra=MtpLayers(mtp_layers),
    )


def sparse_layers(config: ConfigReader, count: int) -> list[bool]:
    """Whether each layer has experts. `mlp_layer_types` lists them; without it, the first layers are dense."""
    first = config.get("first_k_dense_replace", int, 0)
    config.expect("moe_layer_freq", 1, None)
    stated = config.get("mlp_layer_types", list, None)
    derived = [i >= first for i in range(count)]
    if stated is None:
        return derived
    if len(stated) != count or not set(stated) <= {"dense", "sparse"}:
        config.refuse(f"config mlp_layer_types={stated!r} (needs {count} entries, each 'dense' or 'sparse')")
        return [False] * count
    return agreeing_layers(config, "first_k_dense_replace", [kind == "sparse" for kind in stated], derived)


def read_latent(config: ConfigReader) -> MlaMixerSpec:
    """Reads latent attention. Its softmax scale includes YaRN's mscale."""
    rope_dim, nope_dim = config.get("qk_rope_head_dim", int), config.get("qk_nope_head_dim", int)
    config.expect("attention_bias", False, None)
    config.expect("qk_head_dim", rope_dim + nope_dim, None)
    # MLA has no KV heads, and "head_dim" repeats one of the sizes above.
    config.ignore("num_key_value_heads", "head_dim")
    return MlaMixerSpec(
        hidden=config.get("hidden_size", int),
        num_heads=config.get("num_attention_heads", int),
        latent_dim=config.get("kv_lora_rank", int),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        v_head_dim=config.get("v_head_dim", int),
        scale=(nope_dim + rope_dim) ** -0.5 * _yarn_mscale(config),
        rope=read_rope(config, rope_dim, default_theta=10000.0, interleaved=config.get("rope_interleave", bool, True)),
        q_rank=config.get("q_lora_rank", int, None),
        norm_eps=LATENT_NORM_EPS,
    )


def _yarn_mscale(config: ConfigReader) -> float:
    """(0.1 m ln(factor) + 1)^2 for a scaled rope with m = `mscale_all_dim`; else 1."""
    rope = rope_values(config)
    factor, all_dims = rope.get("factor", 1.0), rope.get("mscale_all_dim")
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not all_dims:
        return 1.0
    if not isinstance(factor, int | float) or not isinstance(all_dims, int | float):
        # Refused where the rope is read.
        return 1.0
    return yarn_scale(float(factor), float(all_dims)) ** 2


def latent_rules(spec: ModelSpec, prefix: str = "model.", head: str = "lm_head.weight") -> list[Rule]:
    """Weight rules of DeepSeek models. `prefix`: name of the decoder. `head`: name of the output head."""
    layer, ours = prefix + "layers.{i}.", "layers.{i}."
    rules = [
        Rule(prefix + "embed_tokens.weight", "embedding.weight"),
        Rule(prefix + "norm.weight", "norm.weight"),
        drop(head, "tied to the embedding") if spec.tied else Rule(head, "head.weight"),
        Rule(layer + "input_layernorm.weight", ours + "mixer_norm.weight"),
        Rule(layer + "post_attention_layernorm.weight", ours + "ffn_norm.weight"),
        drop(layer + "self_attn.rotary_emb.inv_freq", "computed from the config"),
        Rule(layer + "mlp.gate.weight", ours + "ffn.router.gate.weight"),
        Rule(layer + "mlp.gate.e_score_correction_bias", ours + "ffn.router.correction"),
    ]
    rules += mlp_rules(layer + "mlp.", ours + "ffn.")
    rules += mlp_rules(layer + "mlp.shared_experts.", ours + "ffn.shared.")
    rules += expert_rules(layer + "mlp.experts.", ours + "ffn.experts.")
    mixer = spec.layers[0].mixer
    mla = mixer.mla if isinstance(mixer, DsaMixerSpec) else mixer
    assert isinstance(mla, MlaMixerSpec)
    rules += latent_attention_rules(mla, layer + "self_attn.", ours + "mixer.")
    if isinstance(spec.extra, MtpLayers):
        rules += drop_mtp_layers(prefix, len(spec.layers), spec.extra.layers)
    return rules


def latent_attention_rules(mla: MlaMixerSpec, theirs: str, ours: str) -> list[Rule]:
    """Weight rules of latent attention. `theirs`, `ours`: prefixes of the projections' names, with the last dot."""
    heads, keys = mla.num_heads, mla.nope_dim
    latent = ours + "latent."
    return [
        Rule(theirs + "q_proj.weight", latent + "inputs.weight", "q"),
        Rule(theirs + "q_a_proj.weight", latent + "inputs.weight", "q_a"),
        Rule(theirs + "q_a_layernorm.weight", latent + "q_a_norm.weight"),
        Rule(theirs + "q_b_proj.weight", latent + "queries.weight", "q"),
        Rule(theirs + "kv_a_proj_with_mqa.weight", latent + "inputs.weight", "kv_a"),
        Rule(theirs + "kv_a_layernorm.weight", latent + "kv_a_norm.weight"),
        Rule(theirs + "kv_b_proj.weight", latent + "w_uk", transform=rows_of_heads(heads, slice(0, keys))),
        Rule(theirs + "kv_b_proj.weight", latent + "w_uv", transform=rows_of_heads(heads, slice(keys, None))),
        Rule(theirs + "o_proj.weight", ours + "out.weight"),
    ]


def rows_of_heads(heads: int, rows: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    """[heads * n, C] to [heads, len(rows), C]: selects `rows` of each head."""
    return lambda weight: weight.unflatten(0, (heads, -1))[:, rows]


def latent_draft(spec: ModelSpec, prefix: str = "model.") -> MtpSpec | None:
    """The first multi-token-prediction layer behind the layers of a DeepSeek model: it makes all drafts.

    Its mixer is that of the first layer, which has an indexer where any has one, and its FFN that of the last layer.
    """
    if not isinstance(spec.extra, MtpLayers) or not spec.extra.layers:
        return None
    layer = LayerSpec(mixer=spec.layers[0].mixer, ffn=spec.layers[-1].ffn)
    return MtpSpec(layers=(layer,), prefix=f"{prefix}layers.{len(spec.layers)}.")


def latent_draft_rules(rules: Sequence[Rule], draft: DraftSpec, prefix: str = "model.") -> list[Rule]:
    """Weight rules of a multi-token-prediction layer in DeepSeek's layout, from the `rules` of the model.

    Embedding and head are in the checkpoint once more. By definition they are the model's own (DeepSeek-V3's
    README_WEIGHTS: they share parameters).
    """
    return [
        *mtp_layer_rules(rules, prefix + "layers.{i}.", draft.prefix),
        *mtp_part_rules(draft.prefix, MTP_PARTS, MTP_COPIES),
    ]


def tiny_deepseek_v2() -> dict[str, Any]:
    """Config of a V2 with 3 layers: the first is dense, the others route to 2 of 4 expert groups."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 4.0,
        "scoring_func": "softmax",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 64,
        },
    }


DEEPSEEK_V2 = Architecture(read_deepseek_v2, latent_rules, tiny_deepseek_v2)
