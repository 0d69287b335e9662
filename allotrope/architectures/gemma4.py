"""Gemma 4 (text): two head sizes, values from keys in full layers, and a scalar per layer.

One model has experts in parallel with the dense MLP. The small models have per-layer embeddings, and layers that share
the KV cache of an earlier layer.

Source: `modeling_gemma4.py` of Transformers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allotrope.architectures.gemma3 import FULL, SLIDING, SandwichLayer, gemma_kinds, gemma_rules, tiny_gemma3
from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.expert_rules import expert_rules
from allotrope.checkpoint.read_config import ConfigReader, read_rope, wrapper_is_tied
from allotrope.checkpoint.weights import Rule, drop
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.embedding import Embedding
from allotrope.layers.linear import Linear
from allotrope.layers.mixers.mha import MhaMixerSpec
from allotrope.layers.mlp import MlpSpec
from allotrope.layers.model_spec import LayerSpec, ModelSpec
from allotrope.layers.moe import Experts
from allotrope.layers.norm import RMSNorm
from allotrope.layers.parallel import Placement, Section
from allotrope.layers.router import Router, RouterSpec
from allotrope.layers.step import LayerStep, Step
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.gated_activation.reference import activate
from allotrope.ops.rope import RopeSpec


@dataclass(frozen=True)
class PerLayerInputs:
    """Per-layer embeddings: a second embedding of `vocab_size` ids gives each layer `width` values per token."""

    vocab_size: int
    width: int
    layers: int


@dataclass(frozen=True)
class ParallelExpertsSpec:
    """Experts in parallel with the dense MLP. `width`: intermediate size of each."""

    router: RouterSpec
    width: int


@dataclass(frozen=True)
class Gemma4Extra:
    """`index`: index of the layer. `per_layer`: width of the per-layer embedding, or 0. `experts`: or None."""

    index: int
    per_layer: int
    experts: ParallelExpertsSpec | None


def _replicated(inputs: int, outputs: int, build: Build) -> Linear:
    return Linear(inputs, (Section("", outputs),), build)


class ParallelExperts(nn.Module):
    """norm(dense) + norm(experts(norm(x))): the experts read the input of the dense MLP's norm.

    The router reads rms(x) * scale / sqrt(hidden), and multiplies each routing weight by the expert's scale.
    """

    def __init__(self, spec: ParallelExpertsSpec, model: ModelSpec, build: Build) -> None:
        super().__init__()
        hidden, eps, count, self.parallel = model.hidden, model.norm_eps, spec.router.experts, build.parallel
        self.dense_norm, self.in_norm, self.out_norm = (RMSNorm(hidden, eps, build) for _ in range(3))
        self.router_norm = RMSNorm(hidden, eps, build, weighted=False)
        self.root = hidden**-0.5
        self.router_scale = build.parameter((hidden,), Placement((Section("", hidden),)))
        self.router = Router(spec.router, hidden, build)
        self.expert_scale = build.parameter((count,), Placement((Section("", count),)), torch.float32)
        gating = GatedActivation(activation="gelu_tanh")
        self.experts = Experts(count, hidden, spec.width, gating, build.at_stage("experts"), bias=False)

    def forward(self, x: torch.Tensor, dense: torch.Tensor, ctx: LayerStep) -> torch.Tensor:
        """`x`: [T, hidden] residual stream. `dense`: [T, hidden] this rank's part of the dense MLP's output. Returns
        [T, hidden], whole on every rank."""
        dense, routed = self.parallel.all_reduce_each(dense, ctx.shared(self._routed, x))
        return self.dense_norm(dense) + self.out_norm(routed)

    def _routed(self, x: torch.Tensor, ctx: LayerStep) -> torch.Tensor:
        weights, experts = self.router(self.router_norm(x) * self.router_scale * self.root, ctx.step.ids)
        self.experts.record_load(experts, ctx)
        routed: torch.Tensor = self.experts(self.in_norm(x), weights * self.expert_scale[experts], experts)
        return routed


class Gemma4Layer(SandwichLayer):
    """A sandwich layer, with parallel experts if the model has them.

    With per-layer embeddings, x += norm(up(gelu(down(x)) * embedding)) follows. The output is x * scalar.
    """

    def __init__(self, spec: LayerSpec, model: ModelSpec, build: Build) -> None:
        super().__init__(spec, model, build)
        extra = spec.extra
        assert isinstance(extra, Gemma4Extra)
        # Within the stage: a later one has no inputs of the layers before it.
        self.index = extra.index - (0 if build.stage is None else build.stage.first)
        self.per_layer, self.parallel = extra.per_layer, build.parallel
        self.scalar = build.parameter((1,), Placement((Section("", 1),)))
        self.parallel_experts = (
            ParallelExperts(extra.experts, model, build.at("parallel_experts")) if extra.experts is not None else None
        )
        if extra.per_layer:
            self.per_layer_gate = _replicated(model.hidden, extra.per_layer, build.at("per_layer_gate"))
            self.per_layer_out = _replicated(extra.per_layer, model.hidden, build.at("per_layer_out"))
            self.per_layer_norm = RMSNorm(model.hidden, model.norm_eps, build)

    def forward(
        self, x: torch.Tensor, normed: torch.Tensor, ctx: LayerStep, following: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, normed = self.ffn_norm.add(self.mixer(normed, ctx), x, self.mixer_out_norm)
        y, out_norm = ctx.shared(self.ffn, normed), self.ffn_out_norm
        if self.parallel_experts is None and not self.per_layer:
            return following.add(y, x, out_norm, self.scalar)
        y = self.parallel.all_reduce(y) if self.parallel_experts is None else self.parallel_experts(x, y, ctx)
        if self.per_layer:
            x = x + out_norm(y)
            per_layer_inputs = ctx.step.per_layer_inputs
            assert per_layer_inputs is not None, "the decoder sets them before its layers"
            own = per_layer_inputs[:, self.index]
            y = self.per_layer_out(activate(self.per_layer_gate(x), "gelu_tanh") * own)
            out_norm = self.per_layer_norm
        return following.add_replicated(y, x, out_norm, self.scalar)


class PerLayerEmbedding(nn.Module):
    """(norm(project(x) / sqrt(hidden)) + sqrt(width) * embed(id)) / sqrt(2), for all layers at once."""

    def __init__(self, spec: PerLayerInputs, model: ModelSpec, build: Build) -> None:
        super().__init__()
        self.layers = spec.layers
        width = spec.layers * spec.width
        self.embedding = Embedding(spec.vocab_size, width, build.at("embedding"), scale=spec.width**0.5)
        self.projection = _replicated(model.hidden, spec.layers * spec.width, build.at("projection"))
        self.scale = model.hidden**-0.5
        self.norm = RMSNorm(spec.width, model.norm_eps, build)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`ids`: [T] token ids. `x`: [T, hidden] their scaled embeddings. Returns [T, layers, width]."""
        projected = self.norm((self.projection(x) * self.scale).unflatten(-1, (self.layers, -1)))
        return (projected + self.embedding(ids).unflatten(-1, (self.layers, -1))) * 2.0**-0.5


class Gemma4Decoder(Decoder):
    layer_class = Gemma4Layer
    first_parts = ("embedding", "head", "per_layer")

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__(spec, build)
        extra = spec.extra
        self.per_layer_width = extra.width if isinstance(extra, PerLayerInputs) else 0
        self.per_layer = None
        if isinstance(extra, PerLayerInputs) and self.stage.is_first:
            self.per_layer = PerLayerEmbedding(extra, spec, build.at("per_layer"))

    def begin(self, step: Step) -> torch.Tensor:
        x = self.embedded(step)
        if self.per_layer is not None:
            step.per_layer_inputs = self.per_layer(step.ids, x)
        return x

    def reads_ids(self) -> bool:
        return self.per_layer is not None

    def resume(self, received: torch.Tensor, step: Step) -> torch.Tensor:
        if not self.per_layer_width:
            return received
        x, inputs = received.split([self.spec.hidden, received.shape[1] - self.spec.hidden], dim=1)
        step.per_layer_inputs = inputs.unflatten(1, (-1, self.per_layer_width))
        return x.contiguous()

    def hand_on(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The residual stream, and the inputs of the layers behind."""
        if step.per_layer_inputs is None:
            return x
        return torch.cat([x, step.per_layer_inputs[:, len(self.stage) :].flatten(1)], dim=1)

    def border_width(self, layer: int) -> int:
        return self.spec.hidden + (self.stage.count - layer) * self.per_layer_width


def read_gemma4(config: ConfigReader) -> ModelSpec:
    """Reads Gemma 4's text config."""
    hidden, count = config.get("hidden_size", int), config.get("num_hidden_layers", int)
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    config.expect("use_bidirectional_attention", None, "vision")
    kinds = gemma_kinds(config, count)
    if kinds:
        kinds[-1] = FULL
    owners = _cache_owners(config, kinds)
    width, wide = config.get("intermediate_size", int), config.get("use_double_wide_mlp", bool, False)
    per_layer = config.get("hidden_size_per_layer_input", int, 0)
    mixers, experts = _mixers(config, kinds, owners), _experts(config)
    layers = tuple(
        LayerSpec(
            mixer=mixer,
            ffn=MlpSpec(hidden=hidden, width=width * (2 if wide and owner is not None else 1), activation="gelu_tanh"),
            extra=Gemma4Extra(i, per_layer, experts),
        )
        for i, (mixer, owner) in enumerate(zip(mixers, owners, strict=True))
    )
    vocab_size = config.get("vocab_size", int)
    second_vocabulary = config.get("vocab_size_per_layer_input", int, vocab_size)
    if per_layer and second_vocabulary < vocab_size:
        config.refuse(f"config vocab_size_per_layer_input={second_vocabulary} (needs vocab_size={vocab_size} or more)")
    return ModelSpec(
        vocab_size=vocab_size,
        hidden=hidden,
        context=config.get("max_position_embeddings", int),
        norm_eps=config.get("rms_norm_eps", float),
        layers=layers,
        tied=config.get("tie_word_embeddings", bool, True),
        embedding_scale=hidden**0.5,
        softcap=config.get("final_logit_softcapping", float, None),
        extra=PerLayerInputs(second_vocabulary, per_layer, count) if per_layer else None,
    )


def _experts(config: ConfigReader) -> ParallelExpertsSpec | None:
    if not config.get("enable_moe_block", bool, False):
        config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    router = RouterSpec(experts=config.get("num_experts", int), topk=config.get("top_k_experts", int))
    return ParallelExpertsSpec(router, config.get("moe_intermediate_size", int))


def _cache_owners(config: ConfigReader, kinds: list[str]) -> list[int | None]:
    """The earlier layer whose KV cache each layer reads, or None.

    Each of the last `num_kv_shared_layers` layers reads the last layer of its type that has a cache.
    """
    first = len(kinds) - config.get("num_kv_shared_layers", int, 0)
    owners: list[int | None] = []
    for i, kind in enumerate(kinds):
        own = [j for j in range(min(i, first)) if kinds[j] == kind]
        owners.append(None if i < first or not own else own[-1])
        if i >= first and not own:
            config.refuse(f"config num_kv_shared_layers={len(kinds) - first} leaves layer {i} no {kind} to read from")
    return owners


def _mixers(config: ConfigReader, kinds: list[str], owners: list[int | None]) -> list[MhaMixerSpec]:
    hidden, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    window, bias = config.get("sliding_window", int), config.get("attention_bias", bool, False)
    eps = config.get("rms_norm_eps", float)
    values_from_keys = config.get("attention_k_eq_v", bool, False)
    shapes = _head_shapes(config, kinds, values_from_keys)
    ropes: dict[tuple[str, int], RopeSpec] = {}
    for kind, (dim, _) in zip(kinds, shapes, strict=True):
        if (kind, dim) not in ropes:
            ropes[kind, dim] = read_rope(config, dim, kind=kind)
    return [
        MhaMixerSpec(
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=groups,
            head_dim=dim,
            scale=1.0,
            rope=ropes[kind, dim],
            window=window if kind == SLIDING else None,
            bias=bias,
            out_bias=bias,
            qk_norm="head",
            norm_eps=eps,
            values_from_keys=values_from_keys and kind == FULL,
            v_norm=True,
            shares_cache_of=owner,
        )
        for kind, (dim, groups), owner in zip(kinds, shapes, owners, strict=True)
    ]


def _head_shapes(config: ConfigReader, kinds: list[str], values_from_keys: bool) -> list[tuple[int, int]]:
    """Head size and number of KV heads of each layer, from the released keys or from `per_layer_config`."""
    dim, groups = config.get("head_dim", int), config.get("num_key_value_heads", int)
    stated: dict[str, dict[str, int]] | None = config.get("per_layer_config", dict, None)
    if stated is None:
        full = (
            config.get("global_head_dim", int),
            (config.get("num_global_key_value_heads", int, None) if values_from_keys else None) or groups,
        )
        config.ignore("num_global_key_value_heads")
        return [full if kind == FULL else (dim, groups) for kind in kinds]
    shapes = []
    for i in range(len(kinds)):
        layer = ConfigReader(stated.get(str(i), {}), config.subject)
        shapes.append((layer.get("head_dim", int, dim), layer.get("num_key_value_heads", int, groups)))
        layer.refuse_unread(f"config per_layer_config.{i}")
        config.reasons.extend(layer.reasons)
    return shapes


def read_gemma4_wrapper(config: ConfigReader) -> ModelSpec:
    """Reads the text part of the multimodal model's config."""
    text = config.section("text_config")
    config.ignore("vision_config", "audio_config", "vision_soft_tokens_per_image")
    config.ignore(*(key for key in config.values if key.endswith(("_token_id", "_token_index"))))
    spec = read_gemma4(text)
    text.refuse_unread("config text_config")
    return dataclasses.replace(spec, tied=wrapper_is_tied(config, text, spec.tied))


def gemma4_rules(spec: ModelSpec, prefix: str = "model.") -> list[Rule]:
    """Weight rules: Gemma 3's, and those of the new parts."""
    layer, ours = prefix + "layers.{i}.", "layers.{i}."
    renamed = {
        layer + "layer_scalar": ours + "scalar",
        layer + "per_layer_input_gate.weight": ours + "per_layer_gate.weight",
        layer + "per_layer_projection.weight": ours + "per_layer_out.weight",
        layer + "post_per_layer_input_norm.weight": ours + "per_layer_norm.weight",
        prefix + "embed_tokens_per_layer.weight": "per_layer.embedding.weight",
        prefix + "per_layer_model_projection.weight": "per_layer.projection.weight",
        prefix + "per_layer_projection_norm.weight": "per_layer.norm.weight",
    }
    parallel_experts = ours + "parallel_experts."
    renamed |= {
        layer + "post_feedforward_layernorm_1.weight": parallel_experts + "dense_norm.weight",
        layer + "pre_feedforward_layernorm_2.weight": parallel_experts + "in_norm.weight",
        layer + "post_feedforward_layernorm_2.weight": parallel_experts + "out_norm.weight",
        layer + "router.scale": parallel_experts + "router_scale",
        layer + "router.proj.weight": parallel_experts + "router.gate.weight",
        layer + "router.per_expert_scale": parallel_experts + "expert_scale",
    }
    experts = expert_rules(layer + "experts.", parallel_experts + "experts.")
    return [*gemma_rules(spec, prefix), *experts, *(Rule(theirs, name) for theirs, name in renamed.items())]


def gemma4_wrapper_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules of the language model inside the multimodal model."""
    rules = gemma4_rules(spec, "model.language_model.")
    for part in ("vision_tower", "embed_vision"):
        rules.append(drop(f"model.{part}.*", "images are not supported"))
    for part in ("audio_tower", "embed_audio"):
        rules.append(drop(f"model.{part}.*", "sound is not supported"))
    return rules


def tiny_gemma4() -> dict[str, Any]:
    """Config of a Gemma 4 with 5 layers, head sizes 16 and 32, and values from keys in full layers."""
    tiny = tiny_gemma3()
    for key in (
        "query_pre_attn_scalar",
        "rope_theta",
        "rope_local_base_freq",
        "rope_scaling",
        "sliding_window_pattern",
    ):
        del tiny[key]
    return tiny | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "num_hidden_layers": 5,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 320,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def tiny_gemma4_wrapper() -> dict[str, Any]:
    """Config of a small multimodal Gemma 4, with per-layer embeddings and layers that share a KV cache."""
    text = tiny_gemma4() | {
        "num_hidden_layers": 8,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL],
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
    }
    del text["architectures"]
    return {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}


GEMMA4 = Architecture(read_gemma4, gemma4_rules, tiny_gemma4, Gemma4Decoder)
GEMMA4_WRAPPER = Architecture(read_gemma4_wrapper, gemma4_wrapper_rules, tiny_gemma4_wrapper, Gemma4Decoder)
