"""Gemma 3 (text): a norm before and after each sublayer, one full layer after five sliding ones, two rope bases.

Sources: Gemma Team 2025 (Gemma 3 technical report); `modeling_gemma3.py` of Transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.read_config import (
    ConfigReader,
    agreeing_layers,
    layer_types,
    read_rope,
    rope_values,
    wrapper_is_tied,
)
from allotrope.checkpoint.weights import Rule, drop, fuse
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder, DecoderLayer
from allotrope.layers.mixers.mha import MhaMixerSpec
from allotrope.layers.mlp import MlpSpec
from allotrope.layers.model_spec import LayerSpec, ModelSpec
from allotrope.layers.norm import RMSNorm
from allotrope.layers.step import LayerStep
from allotrope.ops.rope import RopeSpec

SLIDING, FULL = "sliding_attention", "full_attention"


class SandwichLayer(DecoderLayer):
    """x += norm(mixer(norm(x))); x += norm(ffn(norm(x)))."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, build: Build) -> None:
        super().__init__(spec, model, build)
        self.mixer_out_norm = RMSNorm(model.hidden, model.norm_eps, build, offset=model.norm_offset)
        self.ffn_out_norm = RMSNorm(model.hidden, model.norm_eps, build, offset=model.norm_offset)

    def forward(
        self, x: torch.Tensor, normed: torch.Tensor, ctx: LayerStep, following: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, normed = self.ffn_norm.add(self.mixer(normed, ctx), x, self.mixer_out_norm)
        return following.add(ctx.shared(self.ffn, normed), x, self.ffn_out_norm)


class Gemma3Decoder(Decoder):
    layer_class = SandwichLayer


def read_gemma3(config: ConfigReader) -> ModelSpec:
    """Reads Gemma 3's config.json. Released configs leave values out; the defaults are those of the 4B text model."""
    hidden, count = config.get("hidden_size", int), config.get("num_hidden_layers", int)
    dim = config.get("head_dim", int, 256)
    config.expect("hidden_activation", "gelu_pytorch_tanh", None)
    config.expect("use_bidirectional_attention", False, None)
    # No release sets it, and Transformers ignores it.
    config.expect("attn_logit_softcapping", None)
    ropes = {FULL: read_rope(config, dim, kind=FULL, default_theta=1_000_000.0), SLIDING: _local_rope(config, dim)}
    window, bias = config.get("sliding_window", int, 4096), config.get("attention_bias", bool, False)
    heads, groups = config.get("num_attention_heads", int, 8), config.get("num_key_value_heads", int, 4)
    scale = config.get("query_pre_attn_scalar", float, 256.0) ** -0.5
    eps = config.get("rms_norm_eps", float, 1e-6)
    ffn = MlpSpec(hidden=hidden, width=config.get("intermediate_size", int), activation="gelu_tanh")
    layers = tuple(
        LayerSpec(
            mixer=MhaMixerSpec(
                hidden=hidden,
                num_heads=heads,
                num_kv_heads=groups,
                head_dim=dim,
                scale=scale,
                rope=ropes[kind],
                window=window if kind == SLIDING else None,
                bias=bias,
                out_bias=bias,
                qk_norm="head",
                norm_eps=eps,
                norm_offset=1.0,
            ),
            ffn=ffn,
        )
        for kind in gemma_kinds(config, count)
    )
    return ModelSpec(
        vocab_size=config.get("vocab_size", int, 262208),
        hidden=hidden,
        context=config.get("max_position_embeddings", int, 131072),
        norm_eps=eps,
        norm_offset=1.0,
        layers=layers,
        tied=config.get("tie_word_embeddings", bool, True),
        embedding_scale=hidden**0.5,
        softcap=config.get("final_logit_softcapping", float, None),
    )


def gemma_kinds(config: ConfigReader, count: int) -> list[str]:
    """The type of each layer. `layer_types` lists them; else every `sliding_window_pattern`-th layer is full."""
    pattern = config.get("sliding_window_pattern", int, None) or config.get("_sliding_window_pattern", int, 6)
    # Transformers saves its default under this name, even if `layer_types` differs.
    config.ignore("_sliding_window_pattern")
    derived = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]
    return agreeing_layers(config, "sliding_window_pattern", layer_types(config, count, (SLIDING, FULL)), derived)


def _local_rope(config: ConfigReader, dim: int) -> RopeSpec:
    """The rope of sliding layers: its own base, without scaling."""
    theta = config.get("rope_local_base_freq", float, 10000.0)
    if SLIDING not in rope_values(config):
        return RopeSpec(dim=dim, theta=theta)
    return read_rope(config, dim, kind=SLIDING, theta_key="rope_local_base_freq")


def read_gemma3_wrapper(config: ConfigReader) -> ModelSpec:
    """Reads the text part of the multimodal model's config."""
    text = config.section("text_config")
    config.ignore("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
    spec = read_gemma3(text)
    text.refuse_unread("config text_config")
    return dataclasses.replace(spec, tied=wrapper_is_tied(config, text, spec.tied))


def gemma_rules(spec: ModelSpec, prefix: str = "model.") -> list[Rule]:
    """Weight rules of the language model. `prefix`: name of the decoder."""
    layer, ours = prefix + "layers.{i}.", "layers.{i}."
    renamed = {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "mixer_out_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "ffn_out_norm",
        "self_attn.q_norm": "mixer.q_norm",
        "self_attn.o_proj": "mixer.out",
        "mlp.down_proj": "ffn.down",
    }
    rules = [Rule(layer + theirs + ".weight", ours + name + ".weight") for theirs, name in renamed.items()]
    for kind in ("weight", "bias"):
        rules.append(Rule(layer + "self_attn.q_proj." + kind, ours + "mixer.qkv." + kind, "q"))
    rules += _kv_rules(spec, prefix)
    rules.append(Rule(layer + "self_attn.o_proj.bias", ours + "mixer.out.bias"))
    rules += fuse(layer + "mlp.{}.weight", ours + "ffn.gate_up.weight", ("gate_proj", "up_proj"))
    rules += [Rule(prefix + "embed_tokens.weight", "embedding.weight"), Rule(prefix + "norm.weight", "norm.weight")]
    for head in ("lm_head.weight", "language_model.lm_head.weight"):
        rules.append(drop(head, "tied to the embedding") if spec.tied else Rule(head, "head.weight"))
    return rules


def _kv_rules(spec: ModelSpec, prefix: str) -> list[Rule]:
    """Weight rules of keys and values. A layer that shares another's KV cache has none, though files may hold some."""
    rules = []
    for i, layer in enumerate(spec.layers):
        theirs, ours = f"{prefix}layers.{i}.self_attn.", f"layers.{i}.mixer."
        if layer.mixer.shares_cache_of is not None:
            reason = f"the layer shares the KV cache of layer {layer.mixer.shares_cache_of}"
            rules += [drop(theirs + name + ".*", reason) for name in ("k_proj", "v_proj", "k_norm")]
            continue
        rules.append(Rule(theirs + "k_norm.weight", ours + "k_norm.weight"))
        for kind in ("weight", "bias"):
            rules += fuse(theirs + "{}." + kind, ours + "qkv." + kind, ("k_proj", "v_proj"))
    return rules


def wrapper_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules of the language model inside the multimodal model, by its old name and its new one."""
    rules = [*gemma_rules(spec, "language_model.model."), *gemma_rules(spec, "model.language_model.")]
    for part in ("vision_tower", "multi_modal_projector"):
        rules += [drop(f"{outer}{part}.*", "images are not supported") for outer in ("", "model.")]
    return rules


def tiny_gemma3() -> dict[str, Any]:
    """Config of a Gemma 3 with 4 layers and a window of 32."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 24,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 32,
        "sliding_window_pattern": 3,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
    }


def tiny_gemma3_wrapper() -> dict[str, Any]:
    """`tiny_gemma3` inside the config of the multimodal model."""
    text = tiny_gemma3()
    names = text.pop("architectures")
    assert names == ["Gemma3ForCausalLM"]
    return {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}


GEMMA3 = Architecture(read_gemma3, gemma_rules, tiny_gemma3, Gemma3Decoder)
GEMMA3_WRAPPER = Architecture(read_gemma3_wrapper, wrapper_rules, tiny_gemma3_wrapper, Gemma3Decoder)
