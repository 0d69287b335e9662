"""DeepSeek V4 (Flash and Pro): compressed sparse attention, hyper-connections, hash routing in the first layers.

Sources: DeepSeek-AI 2026 (DeepSeek-V4 technical report); `modeling_deepseek_v4.py` of Transformers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.expert_rules import expert_rules, mlp_rules
from allotrope.checkpoint.mtp_rules import DRAFTS_ALONE, mtp_layer_rules, mtp_part_rules
from allotrope.checkpoint.read_config import ConfigReader, layer_types, read_rope, refuse_impossible, rope_values
from allotrope.checkpoint.weights import Rule, drop
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.hyper_connection import HyperConnection, HyperHead
from allotrope.layers.mixers.csa import CsaMixerSpec, IndexerSpec
from allotrope.layers.mlp import MlpSpec
from allotrope.layers.model_spec import LayerSpec, ModelSpec
from allotrope.layers.moe import MoeSpec
from allotrope.layers.norm import RMSNorm
from allotrope.layers.router import RouterSpec, Score
from allotrope.layers.step import LayerStep, Step
from allotrope.layers.stream_mtp import StreamMtpSpec
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.hyper_connection import HyperConnectionSpec
from allotrope.ops.rope import RopeSpec

# Layer types of Transformers, and their default compression ratios (tokens per compressed KV entry).
WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {CSA: 4, HCA: 128}
SCORES: dict[str, Score] = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}


@dataclass(frozen=True)
class Shared:
    """Settings that all layers share. `hyper`: the hyper-connections."""

    hyper: HyperConnectionSpec


class DeepseekV4Layer(nn.Module):
    """Mixer and FFN with hyper-connections: x, post, C = pre(X); X = post * sublayer(norm(x)) + C^T X."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, build: Build) -> None:
        super().__init__()
        assert isinstance(model.extra, Shared)
        self.parallel = build.parallel
        self.mixer_streams = HyperConnection(model.extra.hyper, build)
        self.mixer_norm = RMSNorm(model.hidden, model.norm_eps, build)
        self.mixer = spec.mixer.build(build.at("mixer"))
        self.ffn_streams = HyperConnection(model.extra.hyper, build)
        self.ffn_norm = RMSNorm(model.hidden, model.norm_eps, build)
        self.ffn = spec.ffn.build(build.at_stage("ffn"))

    def forward(self, streams: torch.Tensor, ctx: LayerStep) -> torch.Tensor:
        """`streams`: [T, N, hidden]. Returns the same shape."""
        x, post, comb = self.mixer_streams.pre(streams)
        y = self.parallel.all_reduce(self.mixer(self.mixer_norm(x), ctx))
        streams = self.mixer_streams.post(y, streams, post, comb)
        x, post, comb = self.ffn_streams.pre(streams)
        y = self.parallel.all_reduce(ctx.shared(self.ffn, self.ffn_norm(x)))
        return self.ffn_streams.post(y, streams, post, comb)


class DeepseekV4Decoder(Decoder):
    layer_class = DeepseekV4Layer
    one_stream = False
    last_parts = ("norm", "join")

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__(spec, build)
        assert isinstance(spec.extra, Shared)
        self.hyper = spec.extra.hyper
        if self.stage.is_last:
            self.join = HyperHead(self.hyper, build)
        # Drafts read the streams. Without drafts, nobody keeps them until the step is over.
        self.keeps_streams = build.max_drafts > 0

    def begin(self, step: Step) -> torch.Tensor:
        """Every stream starts as the embedding."""
        return self.embedded(step)[:, None].repeat(1, self.hyper.streams, 1)

    def reads_ids(self) -> bool:
        layers: Any = self.layers
        return any(layer.ffn.router.table is not None for layer in layers)

    def resume(self, received: torch.Tensor, step: Step) -> torch.Tensor:
        return received.unflatten(1, (self.hyper.streams, -1))

    def hand_on(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return x.flatten(1)

    def border_width(self, layer: int) -> int:
        return self.hyper.streams * self.spec.hidden

    def through_layers(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        streams = x
        for layer, ctx in zip(self.layers, step.layers, strict=True):
            streams = layer(streams, ctx)
        if not self.stage.is_last:
            return self.hand_on(streams, step)
        if self.keeps_streams:
            step.features = streams.flatten(1)
        return self.norm(self.join(streams))


def read_deepseek_v4(config: ConfigReader) -> ModelSpec:
    """Reads DeepSeek V4's config.json. Layer types come from the config, never from layer indices."""
    hidden, count = config.get("hidden_size", int), config.get("num_hidden_layers", int)
    eps = config.get("rms_norm_eps", float)
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False, None)
    config.expect("mlp_bias", False, None)
    config.expect("num_key_value_heads", 1)
    # `deepseek_v4_draft` reads the number of drafting layers, `checkpoint.weight_formats` reads expert_dtype.
    config.ignore("num_nextn_predict_layers", "expert_dtype")
    mixers, ffns = _mixers(config, count), _ffns(config, count)
    return ModelSpec(
        vocab_size=config.get("vocab_size", int),
        hidden=hidden,
        context=config.get("max_position_embeddings", int),
        norm_eps=eps,
        layers=tuple(LayerSpec(mixer=mixer, ffn=ffn) for mixer, ffn in zip(mixers, ffns, strict=True)),
        tied=config.get("tie_word_embeddings", bool, False),
        extra=Shared(_hyper(config)),
    )


def _hyper(config: ConfigReader) -> HyperConnectionSpec:
    return HyperConnectionSpec(
        streams=config.get("hc_mult", int),
        hidden=config.get("hidden_size", int),
        iterations=config.get("hc_sinkhorn_iters", int),
        eps=config.get("hc_eps", float),
        norm_eps=config.get("rms_norm_eps", float),
    )


def deepseek_v4_draft(config: ConfigReader) -> DraftSpec | None:
    """The first multi-token-prediction layer, which makes all drafts. It has a window alone, and routes by score."""
    if not config.get("num_nextn_predict_layers", int, 0):
        return None
    count, ratios = config.get("num_hidden_layers", int), config.get("compress_ratios", list, None) or []
    if any(ratios[count : count + 1]):
        config.refuse(f"config compress_ratios has {ratios[count]} for the layer that drafts (allowed: 0)")
    layer = LayerSpec(mixer=_window_mixer(config), ffn=_experts(config))
    return StreamMtpSpec(layers=(layer,), prefix="mtp.0.", hyper=_hyper(config))


def deepseek_v4_draft_rules(spec: ModelSpec, draft: DraftSpec) -> list[Rule]:
    """Weight rules of the first multi-token-prediction layer. Base releases have copies of embedding and head."""
    parts = {f"hc_head_{part}": f"join.{part}" for part in ("fn", "base", "scale")} | {
        "enorm.weight": "embedding_norm.weight",
        "hnorm.weight": "hidden_norm.weight",
        "e_proj.weight": "embedding_projection.weight",
        "h_proj.weight": "hidden_projection.weight",
        "norm.weight": "norm.weight",
    }
    of_layer = mtp_layer_rules(deepseek_v4_rules(spec), "layers.{i}.", draft.prefix)
    return [*of_layer, *mtp_part_rules(draft.prefix, parts, ("emb.tok_emb.weight", "head.weight"))]


def _window_mixer(config: ConfigReader) -> CsaMixerSpec:
    dim, heads, groups = (config.get(key, int) for key in ("head_dim", "num_attention_heads", "o_groups"))
    rope, _ = _ropes(config, dim)
    if groups < 1 or heads % groups:
        config.refuse(f"config o_groups={groups} of num_attention_heads={heads} (needs a divisor)")
    return CsaMixerSpec(
        hidden=config.get("hidden_size", int),
        num_heads=heads,
        head_dim=dim,
        q_rank=config.get("q_lora_rank", int),
        out_groups=groups,
        out_rank=config.get("o_lora_rank", int),
        window=config.get("sliding_window", int),
        rope=rope,
        norm_eps=config.get("rms_norm_eps", float),
    )


def _mixers(config: ConfigReader, count: int) -> list[CsaMixerSpec]:
    base = _window_mixer(config)
    indexer = IndexerSpec(
        num_heads=config.get("index_n_heads", int),
        head_dim=config.get("index_head_dim", int),
        topk=config.get("index_topk", int),
    )
    by_type = {WINDOW: base}
    _, rope = _ropes(config, base.head_dim)
    compressed = dataclasses.replace(base, rope=rope)
    types = _layer_types(config, count)
    for layer_type, ratio in types:
        if layer_type == CSA:
            by_type[layer_type] = dataclasses.replace(compressed, ratio=ratio, overlap=True, indexer=indexer)
        elif layer_type == HCA:
            by_type[layer_type] = dataclasses.replace(compressed, ratio=ratio)
    return [by_type[layer_type] for layer_type, _ in types]


def _layer_types(config: ConfigReader, count: int) -> list[tuple[str, int]]:
    """Type and compression ratio of each layer, from `compress_ratios` or `layer_types`."""
    rates = RATES | dict(config.get("compress_rates", dict, None) or {})
    ratios = config.get("compress_ratios", list, None)
    if ratios is None:
        kinds = layer_types(config, count, (WINDOW, *RATES))
        if kinds is None:
            config.refuse("config has neither 'compress_ratios' nor usable 'layer_types'")
        return [(kind, rates.get(kind, 0)) for kind in kinds or [WINDOW] * count]
    known = {0: WINDOW} | {rate: kind for kind, rate in rates.items()}
    unknown = sorted({str(ratio) for ratio in ratios if ratio not in known})
    if unknown or len(ratios) < count:
        config.refuse(
            f"config compress_ratios has {len(ratios)} entries (needs {count} or more), unknown ones {unknown} "
            f"(allowed: {', '.join(map(str, sorted(known)))})"
        )
        return [(WINDOW, 0)] * count
    return [(known[ratio], ratio) for ratio in ratios[:count]]


def _ropes(config: ConfigReader, dim: int) -> tuple[RopeSpec, RopeSpec]:
    """The ropes of window layers and of compressed layers. The latter has YaRN with an attention factor of 1."""
    values = rope_values(config)
    rotated = config.get("qk_rope_head_dim", int, None)
    plain_theta, theta = config.get("rope_theta", float, 10000.0), config.get("compress_rope_theta", float, 160000.0)
    key, part = "compress_rope_theta", config.get("partial_rotary_factor", float, None)
    if "compress" in values:
        plain = read_rope(config, dim, kind="main", default_theta=plain_theta, interleaved=True)
        stretched = read_rope(config, dim, kind="compress", theta_key=key, default_theta=theta, interleaved=True)
        values, part = values["compress"], plain.dim / dim
    else:
        if rotated is None:
            config.refuse("config has no 'qk_rope_head_dim' (needs int)")
        plain = RopeSpec(dim=dim if rotated is None else rotated, theta=plain_theta, interleaved=True)
        stretched = read_rope(config, dim, theta_key=key, default_theta=theta, interleaved=True)
        stretched = dataclasses.replace(stretched, dim=dim if rotated is None else rotated)
    refuse_impossible(config, plain)
    if plain.dim > dim:
        config.refuse(f"config qk_rope_head_dim={plain.dim} of head_dim={dim} (needs at most as many)")
    if rotated is not None and part is not None and rotated != round(dim * part):
        config.refuse(f"config qk_rope_head_dim={rotated}, but {part} of head_dim={dim} are rotated: give one of them")
    if "attention_factor" not in values:
        scaling = dataclasses.replace(stretched.scaling, attention_factor=1.0)
        stretched = dataclasses.replace(stretched, scaling=scaling)
    return plain, stretched


def _experts(config: ConfigReader) -> MoeSpec:
    """Experts that are routed to by score."""
    hidden, width = config.get("hidden_size", int), config.get("moe_intermediate_size", int)
    limit, shared = config.get("swiglu_limit", float), config.get("n_shared_experts", int, 0)
    config.expect("topk_method", "noaux_tc", None)
    score = config.get("scoring_func", str)
    if score not in SCORES:
        config.refuse(f"config scoring_func={score!r} (allowed: {', '.join(SCORES)})")
    router = RouterSpec(
        experts=config.get("n_routed_experts", int),
        topk=config.get("num_experts_per_tok", int),
        score=SCORES.get(score, "sqrt_softplus"),
        correction=True,
        normalize=config.get("norm_topk_prob", bool, True),
        scale=config.get("routed_scaling_factor", float),
    )
    return MoeSpec(
        hidden=hidden,
        width=width,
        router=router,
        gating=GatedActivation(limit=limit),
        shared=MlpSpec(hidden=hidden, width=width * shared, limit=limit) if shared else None,
    )


def _ffns(config: ConfigReader, count: int) -> list[MoeSpec]:
    """Experts of each layer: the first layers have hash routing, the others route by score."""
    layer, vocab_size = _experts(config), config.get("vocab_size", int)
    hash_router = dataclasses.replace(layer.router, correction=False, table=vocab_size)
    first = config.get("num_hash_layers", int, None)
    stated = config.get("mlp_layer_types", list, None)
    if stated is None and first is None:
        config.refuse("config has neither 'num_hash_layers' nor 'mlp_layer_types'")
    hashed = [kind == "hash_moe" for kind in stated or []] or [i < (first or 0) for i in range(count)]
    unknown = sorted(set(stated or []) - {"hash_moe", "moe"})
    if unknown or len(hashed) != count:
        config.refuse(f"config mlp_layer_types has {len(hashed)} entries (needs {count}), unknown kinds {unknown}")
        hashed = [False] * count
    return [dataclasses.replace(layer, router=hash_router) if is_hashed else layer for is_hashed in hashed]


def deepseek_v4_rules(spec: ModelSpec) -> list[Rule]:
    """Weight rules of the released names."""
    theirs, ours = "layers.{i}.attn.", "layers.{i}.mixer."
    renamed = {
        "embed.weight": "embedding.weight",
        "norm.weight": "norm.weight",
        "layers.{i}.attn_norm.weight": "layers.{i}.mixer_norm.weight",
        "layers.{i}.ffn_norm.weight": "layers.{i}.ffn_norm.weight",
        theirs + "q_norm.weight": ours + "q_a_norm.weight",
        theirs + "kv_norm.weight": ours + "kv_norm.weight",
        theirs + "wo_a.weight": ours + "grouped.weight",
        theirs + "wo_b.weight": ours + "out.weight",
        theirs + "attn_sink": ours + "sinks",
    }
    for part in ("fn", "base", "scale"):
        renamed[f"hc_head_{part}"] = f"join.{part}"
        renamed[f"layers.{{i}}.hc_attn_{part}"] = f"layers.{{i}}.mixer_streams.{part}"
        renamed[f"layers.{{i}}.hc_ffn_{part}"] = f"layers.{{i}}.ffn_streams.{part}"
    rules = [Rule(name, target) for name, target in renamed.items()]
    fused = {
        "wq_a": ("inputs", "q_a"),
        "wkv": ("inputs", "kv"),
        "indexer.weights_proj": ("inputs", "index_weights"),
        "wq_b": ("queries", "q"),
        "indexer.wq_b": ("queries", "index_q"),
    }
    rules += [Rule(f"{theirs}{name}.weight", f"{ours}{to}.weight", part) for name, (to, part) in fused.items()]
    for name, prefix in (("compressor.", ""), ("indexer.compressor.", "index_")):
        projection = ours + "compressor.projection.weight"
        rules += [
            Rule(theirs + name + "wkv.weight", projection, prefix + "kv"),
            Rule(theirs + name + "wgate.weight", projection, prefix + "score"),
            Rule(theirs + name + "ape", ours + "compressor." + prefix + "position_bias"),
            Rule(theirs + name + "norm.weight", ours + "compressor." + prefix + "norm"),
        ]
    head = drop("head.weight", "tied to the embedding") if spec.tied else Rule("head.weight", "head.weight")
    return [*rules, *_ffn_rules(), head, drop("mtp.*", DRAFTS_ALONE)]


def _ffn_rules() -> list[Rule]:
    theirs, ours, names = "layers.{i}.ffn.", "layers.{i}.ffn.", ("w1", "w3", "w2")
    return [
        Rule(theirs + "gate.weight", ours + "router.gate.weight"),
        Rule(theirs + "gate.bias", ours + "router.correction"),
        Rule(theirs + "gate.tid2eid", ours + "router.table"),
        *expert_rules(theirs + "experts.", ours + "experts.", names),
        *mlp_rules(theirs + "shared_experts.", ours + "shared.", names),
    ]


def tiny_deepseek_v4() -> dict[str, Any]:
    """Config of 4 layers: each type once and CSA twice; the first layer has hash routing."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "sliding_window": 16,
        "compress_ratios": [0, 4, 128, 4, 0],
        "compress_rope_theta": 160000,
        "index_head_dim": 32,
        "index_n_heads": 32,
        "index_topk": 8,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "num_hash_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_nextn_predict_layers": 1,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }


DEEPSEEK_V4 = Architecture(
    read_deepseek_v4,
    deepseek_v4_rules,
    tiny_deepseek_v4,
    DeepseekV4Decoder,
    draft=deepseek_v4_draft,
    draft_rules=deepseek_v4_draft_rules,
    tiny_draft=tiny_deepseek_v4,
)
