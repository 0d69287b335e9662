"""Qwen3-Next: one gated full-attention layer after every three layers of gated delta rule, experts in every layer.

Source: Qwen Team 2025 (Qwen3-Next); `modeling_qwen3_next.py` of Transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.interleaved import Part, parts
from allotrope.checkpoint.mtp_rules import DRAFTS_ALONE, mtp_layer_rules, mtp_part_rules
from allotrope.checkpoint.read_config import ConfigReader, agreeing_layers, layer_types, read_rope
from allotrope.checkpoint.weights import Rule, Transform, drop, fuse
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.mixers.gdn import GdnMixerSpec
from allotrope.layers.mixers.mha import MhaMixerSpec
from allotrope.layers.mixers.mixer import MixerSpec
from allotrope.layers.mlp import MlpSpec
from allotrope.layers.model_spec import FfnSpec, LayerSpec, ModelSpec
from allotrope.layers.moe import MoeSpec
from allotrope.layers.mtp import MtpSpec
from allotrope.layers.router import RouterSpec

LINEAR, FULL = "linear_attention", "full_attention"


def read_qwen3_next(config: ConfigReader) -> ModelSpec:
    """Reads Qwen3-Next's config.json.

    Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`.
    """
    # `qwen3_next_draft` reads it.
    config.ignore("num_nextn_predict_layers")
    mixers = read_mixers(config)
    hidden, step = config.get("hidden_size", int), config.get("decoder_sparse_step", int, 1)
    mlp_only = set(config.get("mlp_only_layers", list, []))
    width = config.get("intermediate_size", int)
    sparse = _sparse(config)
    dense = MlpSpec(hidden=hidden, width=width)
    ffns = [dense if i in mlp_only or (i + 1) % step else sparse for i in range(len(mixers))]
    return hybrid(config, mixers, ffns)


def _sparse(config: ConfigReader) -> MoeSpec:
    hidden = config.get("hidden_size", int)
    return read_moe(config, hidden, normalize=config.get("norm_topk_prob", bool, True))


def hybrid(config: ConfigReader, mixers: Sequence[MixerSpec], ffns: Sequence[FfnSpec]) -> ModelSpec:
    """The spec of a hybrid Qwen with these layers. Its norms multiply by 1 + weight."""
    config.expect("hidden_act", "silu")
    return ModelSpec(
        vocab_size=config.get("vocab_size", int),
        hidden=config.get("hidden_size", int),
        context=config.get("max_position_embeddings", int),
        norm_eps=config.get("rms_norm_eps", float),
        norm_offset=1.0,
        layers=tuple(LayerSpec(mixer=mixer, ffn=ffn) for mixer, ffn in zip(mixers, ffns, strict=True)),
        tied=config.get("tie_word_embeddings", bool, False),
    )


def read_mixers(config: ConfigReader) -> list[MixerSpec]:
    """The mixer of each layer. `layer_types` lists them; without it, every `full_attention_interval`-th one is full."""
    count, interval = config.get("num_hidden_layers", int), config.get("full_attention_interval", int, 4)
    derived = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(count)]
    stated = layer_types(config, count, (LINEAR, FULL))
    kinds = agreeing_layers(config, "full_attention_interval", stated, derived)
    by_kind: dict[str, MixerSpec] = {FULL: _full(config), LINEAR: _linear(config)}
    return [by_kind[kind] for kind in kinds]


def _full(config: ConfigReader) -> MhaMixerSpec:
    heads, dim = config.get("num_attention_heads", int), config.get("head_dim", int, 256)
    bias = config.get("attention_bias", bool, False)
    return MhaMixerSpec(
        hidden=config.get("hidden_size", int),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", int, None) or heads,
        head_dim=dim,
        scale=dim**-0.5,
        rope=read_rope(config, dim, default_theta=10000.0, default_part=0.25),
        bias=bias,
        out_bias=bias,
        qk_norm="head",
        norm_eps=config.get("rms_norm_eps", float),
        norm_offset=1.0,
        output_gate=True,
    )


def _linear(config: ConfigReader) -> GdnMixerSpec:
    return GdnMixerSpec(
        hidden=config.get("hidden_size", int),
        num_k_heads=config.get("linear_num_key_heads", int),
        num_v_heads=config.get("linear_num_value_heads", int),
        k_head_dim=config.get("linear_key_head_dim", int),
        v_head_dim=config.get("linear_value_head_dim", int),
        conv_width=config.get("linear_conv_kernel_dim", int),
        norm_eps=config.get("rms_norm_eps", float),
    )


def read_moe(config: ConfigReader, hidden: int, *, normalize: bool) -> MoeSpec:
    """Experts with softmax routing, and a shared expert with a gate."""
    return MoeSpec(
        hidden=hidden,
        width=config.get("moe_intermediate_size", int),
        router=RouterSpec(
            experts=config.get("num_experts", int), topk=config.get("num_experts_per_tok", int), normalize=normalize
        ),
        shared=MlpSpec(hidden=hidden, width=config.get("shared_expert_intermediate_size", int)),
        shared_gate=True,
    )


def qwen3_next_draft(config: ConfigReader) -> DraftSpec | None:
    """The multi-token-prediction layer. Releases have one, and configs need not say so."""
    return hybrid_draft(config, config.get("num_nextn_predict_layers", int, 1), _sparse(config))


def hybrid_draft(config: ConfigReader, count: int, ffn: FfnSpec) -> DraftSpec | None:
    """A multi-token-prediction layer with full attention. `count`: number of them in the config."""
    if count == 0:
        return None
    if count > 1:
        config.refuse(f"config names {count} multi-token-prediction layers; drafts are made by one")
    return MtpSpec(layers=(LayerSpec(mixer=_full(config), ffn=ffn),), prefix="mtp.")


def qwen3_next_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules. The delta rule's projections interleave each key head: [q | k | v.. | z..] and [b.. | a..].

    GGUF files have z apart, and heads of q, k and v behind one another.
    """
    rules = hybrid_rules(spec, "model.")
    mixer = next((layer.mixer for layer in spec.layers if isinstance(layer.mixer, GdnMixerSpec)), None)
    if mixer is None:
        return rules
    groups, repeat = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
    values = repeat * mixer.v_head_dim
    theirs, target = "model.layers.{i}.linear_attn.", "layers.{i}.mixer.inputs.weight"
    qkvz = parts(groups, (mixer.k_head_dim, mixer.k_head_dim, values, values))
    rules += _section_rules(theirs + "in_proj_qkvz.weight", target, "qkvz", qkvz)
    rules += separate_projection_rules(mixer, theirs)
    return rules + _section_rules(theirs + "in_proj_ba.weight", target, "ba", parts(groups, (repeat, repeat)))


def separate_projection_rules(mixer: GdnMixerSpec, theirs: str) -> list[Rule]:
    """Weight rules of the delta rule's projections where q, k and v are one tensor, and z, b and a one each."""
    target = "layers.{i}.mixer.inputs.weight"
    rows = tuple(section.size for section in mixer.inner_sections)
    rules = _section_rules(theirs + "in_proj_qkv.weight", target, "qkv", parts(1, rows))
    return rules + [Rule(f"{theirs}in_proj_{name}.weight", target, name) for name in "zba"]


def _section_rules(source: str, target: str, names: str, sections: tuple[Part, ...]) -> list[Rule]:
    """One rule for each section of a fused tensor. `names`: one letter per section."""
    return [Rule(source, target, name, transform=part) for name, part in zip(names, sections, strict=True)]


def hybrid_rules(spec: ModelSpec, prefix: str) -> list[Rule]:
    """Weight rules that all hybrid Qwens share: all but the delta rule's input projections. `prefix`: the decoder's."""
    layer, ours = prefix + "layers.{i}.", "layers.{i}."
    rules = [
        Rule(prefix + "embed_tokens.weight", "embedding.weight"),
        Rule(prefix + "norm.weight", "norm.weight"),
        Rule(layer + "input_layernorm.weight", ours + "mixer_norm.weight"),
        Rule(layer + "post_attention_layernorm.weight", ours + "ffn_norm.weight"),
        drop("mtp.*", DRAFTS_ALONE),
        drop("lm_head.weight", "tied to the embedding") if spec.tied else Rule("lm_head.weight", "head.weight"),
    ]
    for mixer in {layer.mixer for layer in spec.layers}:
        if isinstance(mixer, GdnMixerSpec):
            rules += _linear_rules(mixer, layer + "linear_attn.", ours + "mixer.")
        elif isinstance(mixer, MhaMixerSpec):
            rules += _full_rules(mixer, layer + "self_attn.", ours + "mixer.")
    return [*rules, *_ffn_rules(layer + "mlp.", ours + "ffn.")]


def hybrid_draft_rules(spec: ModelSpec, draft: DraftSpec) -> list[Rule]:
    """Weight rules of the multi-token-prediction layer: the model's, below another name."""
    layer, parts = "layers.{i}.", {"norm.weight": "norm.weight", "fc.weight": "projection.weight"}
    for name in ("embedding", "hidden"):
        parts[f"pre_fc_norm_{name}.weight"] = f"{name}_norm.weight"
    of_layer = hybrid_rules(dataclasses.replace(spec, layers=draft.layers), "")
    return [
        *mtp_layer_rules(of_layer, layer, draft.prefix + "layers.0."),
        *mtp_part_rules(draft.prefix, parts),
    ]


def _linear_rules(mixer: GdnMixerSpec, theirs: str, ours: str) -> list[Rule]:
    renamed = {"A_log": "A_log", "dt_bias": "dt_bias", "norm.weight": "norm", "out_proj.weight": "out.weight"}
    rules = [Rule(theirs + name, ours + target) for name, target in renamed.items()]
    rows = tuple(section.size for section in mixer.inner_sections)
    for section, take in zip(mixer.inner_sections, parts(1, rows), strict=True):
        rules.append(Rule(theirs + "conv1d.weight", ours + "conv_weight", section.name, transform=_taps(take)))
    return rules


def _taps(take: Part) -> Transform:
    """[channels, 1, width] of a depthwise convolution to the [channels, width] of one section."""
    return lambda weight: take(weight.squeeze(1))


def _full_rules(mixer: MhaMixerSpec, theirs: str, ours: str) -> list[Rule]:
    """Weight rules of gated attention. The query projection interleaves [q | gate] in each head."""
    rules = [Rule(f"{theirs}{name}.weight", f"{ours}{name}.weight") for name in ("q_norm", "k_norm")]
    gated = parts(mixer.num_heads, (mixer.head_dim, mixer.head_dim))
    for kind in ("weight", "bias"):
        target = f"{ours}qkv.{kind}"
        for section, take in zip(("q", "gate"), gated, strict=True):
            rules.append(Rule(f"{theirs}q_proj.{kind}", target, section, transform=take))
        rules += fuse(f"{theirs}{{}}.{kind}", target, ("k_proj", "v_proj"))
        rules.append(Rule(f"{theirs}o_proj.{kind}", f"{ours}out.{kind}"))
    return rules


def _ffn_rules(theirs: str, ours: str) -> list[Rule]:
    """Weight rules of experts (one tensor each, or stacked), the shared expert, and the MLP of dense layers."""
    rules = [
        Rule(theirs + "gate.weight", ours + "router.gate.weight"),
        Rule(theirs + "shared_expert_gate.weight", ours + "shared_gate.weight"),
        Rule(theirs + "shared_expert.down_proj.weight", ours + "shared.down.weight"),
        Rule(theirs + "down_proj.weight", ours + "down.weight"),
        Rule(theirs + "experts.{e}.down_proj.weight", ours + "experts.down", expert="e"),
        Rule(theirs + "experts.down_proj", ours + "experts.down"),
    ]
    for half, section in enumerate(("gate", "up")):
        name, stacked = f"{section}_proj.weight", ours + "experts.gate_up"
        rules += [
            Rule(theirs + name, ours + "gate_up.weight", section),
            Rule(theirs + "shared_expert." + name, ours + "shared.gate_up.weight", section),
            Rule(theirs + "experts.{e}." + name, stacked, section, expert="e"),
            Rule(theirs + "experts.gate_up_proj", stacked, section, transform=_half(half)),
        ]
    return rules


def _half(index: int) -> Transform:
    """The first (0) or second (1) half of each expert's rows."""
    return lambda stacked: stacked.chunk(2, dim=1)[index]


def tiny_qwen3_next() -> dict[str, Any]:
    """Config of 5 layers: the fourth has full attention, the third has no experts."""
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_theta": 10000000,
        "rope_scaling": None,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [2],
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }


QWEN3_NEXT = Architecture(
    read_qwen3_next,
    qwen3_next_rules,
    tiny_qwen3_next,
    draft=qwen3_next_draft,
    draft_rules=hybrid_draft_rules,
    # The head is there unless a config denies it.
    tiny_draft=tiny_qwen3_next,
)
