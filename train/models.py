"""The eight models: `build(name)` makes a model of `configs.CONFIGS`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import nn

from train.configs import CONFIGS, FULL, SLIDING
from train.decoders import Backbone, Config, DeepseekMtp, GemmaLayer, HyperBackbone, HyperLayer, Layer, Model, QwenMtp
from train.layers import (
    BiasedRouter,
    Experts,
    HashRouter,
    Mlp,
    Moe,
    Router,
    Routing,
    clamped_silu,
    clamped_swiglu,
)
from train.mixers import Attention, CompressedAttention, GatedDeltaNet, LatentAttention
from train.rope import Rope, yarn_scale


def _llama_window(c: Config) -> Model:
    dim, eps = c["head_dim"], c["rms_norm_eps"]
    rotated = int(dim * c["partial_rotary_factor"])
    routing = Routing(c["n_routed_experts"], c["num_experts_per_tok"], "sigmoid", corrected=True)

    def layer(i: int) -> Layer:
        near = bool(c["hybrid_layer_pattern"][i])
        mixer = Attention(
            c["hidden_size"],
            c["num_attention_heads"],
            c["swa_num_key_value_heads" if near else "num_key_value_heads"],
            dim,
            Rope(rotated, c["swa_rope_theta"] if near else c["rope_theta"]),
            value_dim=c["v_head_dim"],
            # The release counts the keys before the query's own.
            window=c["sliding_window_size"] + 1 if near else None,
            sinks="attention_sink_bias" if near else "",
            eps=eps,
            value_scale=c["attention_value_scale"],
        )
        mlp: nn.Module = Mlp(c["hidden_size"], c["intermediate_size"])
        if c["moe_layer_freq"][i]:
            experts = Experts(c["n_routed_experts"], c["hidden_size"], c["moe_intermediate_size"])
            mlp = Moe(Router(routing, c["hidden_size"]), experts)
        return Layer(c, mixer, mlp)

    return Model(c, Backbone(c, [layer(i) for i in range(c["num_hidden_layers"])]))


def _gpt_oss(c: Config) -> Model:
    yarn = c["rope_scaling"]
    rope = Rope(c["head_dim"], c["rope_theta"], yarn=tuple(sorted(yarn.items())), factor=yarn_scale(yarn["factor"]))
    routing = Routing(c["num_local_experts"], c["num_experts_per_tok"])

    def layer(kind: str) -> Layer:
        mixer = Attention(
            c["hidden_size"],
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
            rope,
            window=c["sliding_window"] if kind == SLIDING else None,
            sinks="sinks",
            bias=True,
        )
        experts = Experts(
            c["num_local_experts"],
            c["hidden_size"],
            c["intermediate_size"],
            clamped_swiglu(c["swiglu_limit"]),
            interleaved=True,
        )
        return Layer(c, mixer, Moe(BiasedRouter(routing, c["hidden_size"]), experts, router_name="router"))

    return Model(c, Backbone(c, [layer(kind) for kind in c["layer_types"]]))


def _qwen3_moe(c: Config) -> Model:
    routing = Routing(c["num_experts"], c["num_experts_per_tok"], normalize=c["norm_topk_prob"])

    def layer() -> Layer:
        mixer = Attention(
            c["hidden_size"],
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
            Rope(c["head_dim"], c["rope_theta"]),
            norm_offset=0.0,
            eps=c["rms_norm_eps"],
        )
        experts = Experts(c["num_experts"], c["hidden_size"], c["moe_intermediate_size"])
        return Layer(c, mixer, Moe(Router(routing, c["hidden_size"]), experts))

    return Model(c, Backbone(c, [layer() for _ in range(c["num_hidden_layers"])]))


def _qwen3_next(c: Config) -> Model:
    hidden, eps = c["hidden_size"], c["rms_norm_eps"]
    routing = Routing(c["num_experts"], c["num_experts_per_tok"], normalize=c["norm_topk_prob"])
    rope = Rope(int(c["head_dim"] * c["partial_rotary_factor"]), c["rope_theta"])

    def moe() -> Moe:
        experts = Experts(c["num_experts"], hidden, c["moe_intermediate_size"])
        shared = Mlp(hidden, c["shared_expert_intermediate_size"])
        return Moe(Router(routing, hidden), experts, shared, "shared_expert", gate_of_shared=hidden)

    def full() -> Layer:
        heads, groups, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        mixer = Attention(hidden, heads, groups, dim, rope, norm_offset=1.0, eps=eps, gated=True)
        return Layer(c, mixer, moe(), offset=1.0)

    def layer(i: int) -> Layer:
        if (i + 1) % c["full_attention_interval"] == 0:
            return full()
        return Layer(c, GatedDeltaNet(c), moe(), "linear_attn", 1.0)

    layers: list[nn.Module] = [layer(i) for i in range(c["num_hidden_layers"])]
    return Model(c, Backbone(c, layers, 1.0), mtp=QwenMtp(c, full()), mtp_prefix="mtp.")


def _deepseek_moe(c: Config) -> Moe:
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    routing = Routing(
        c["n_routed_experts"],
        c["num_experts_per_tok"],
        "sigmoid",
        corrected=True,
        normalize=c["norm_topk_prob"],
        scale=c["routed_scaling_factor"],
        groups=c["n_group"],
        top_groups=c["topk_group"],
    )
    shared = Mlp(hidden, width * c["n_shared_experts"])
    return Moe(Router(routing, hidden), Experts(c["n_routed_experts"], hidden, width), shared)


def _deepseek(c: Config) -> Model:
    def layer(i: int) -> Layer:
        dense = i < c["first_k_dense_replace"]
        mlp = Mlp(c["hidden_size"], c["intermediate_size"]) if dense else _deepseek_moe(c)
        return Layer(c, LatentAttention(c), mlp)

    count = c["num_hidden_layers"]
    mtp = DeepseekMtp(c, layer(count)) if c["num_nextn_predict_layers"] else None
    backbone = Backbone(c, [layer(i) for i in range(count)])
    return Model(c, backbone, mtp=mtp, mtp_prefix=f"model.layers.{count}.")


def _deepseek_v4(c: Config) -> Model:
    hidden, width, names = c["hidden_size"], c["moe_intermediate_size"], ("w1", "w3", "w2")
    activate = clamped_silu(c["swiglu_limit"])

    def layer(i: int) -> HyperLayer:
        hashed = i < c["num_hash_layers"]
        routing = Routing(
            c["n_routed_experts"],
            c["num_experts_per_tok"],
            "sqrtsoftplus",
            corrected=not hashed,
            normalize=c["norm_topk_prob"],
            scale=c["routed_scaling_factor"],
        )
        router = HashRouter(routing, hidden, c["vocab_size"]) if hashed else Router(routing, hidden, "bias")
        experts = Experts(c["n_routed_experts"], hidden, width, activate, names)
        shared = Mlp(hidden, width * c["n_shared_experts"], activate, names)
        return HyperLayer(c, CompressedAttention(c, c["compress_ratios"][i]), Moe(router, experts, shared))

    return Model(c, HyperBackbone(c, [layer(i) for i in range(c["num_hidden_layers"])]), prefix="")


def _gemma4(wrapper: Config) -> Model:
    c = wrapper["text_config"]
    ropes = c["rope_parameters"]

    def layer(kind: str) -> GemmaLayer:
        wide = kind == FULL
        dim = c["global_head_dim"] if wide else c["head_dim"]
        rotated = int(ropes[FULL]["partial_rotary_factor"] * dim // 2) if wide else None
        mixer = Attention(
            c["hidden_size"],
            c["num_attention_heads"],
            c["num_global_key_value_heads"] if wide else c["num_key_value_heads"],
            dim,
            Rope(dim, ropes[kind]["rope_theta"], rotated=rotated),
            window=None if wide else c["sliding_window"],
            norm_offset=0.0,
            eps=c["rms_norm_eps"],
            from_keys=wide and c["attention_k_eq_v"],
            v_norm=True,
            scale=1.0,
        )
        for norm in (mixer.q_norm, mixer.k_norm):
            # The logits have no scale of their own, so that the norms must bring it.
            nn.init.constant_(norm.weight, dim**-0.25)
        return GemmaLayer(c, mixer)

    backbone = Backbone(c, [layer(kind) for kind in c["layer_types"]], scale=math.sqrt(c["hidden_size"]))
    return Model(wrapper, backbone, prefix="model.language_model.", tied=True, softcap=c["final_logit_softcapping"])


BUILDERS: dict[str, Callable[[Config], Model]] = {
    "llama_window": _llama_window,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "deepseek_v4": _deepseek_v4,
    "gemma4": _gemma4,
    "qwen3_moe": _qwen3_moe,
}


def build(name: str, config: Config | None = None, seed: int = 0) -> Model:
    """A model with random weights. `config`: default: the one of `CONFIGS`."""
    torch.manual_seed(seed)
    model = BUILDERS[name](copy.deepcopy(CONFIGS[name] if config is None else config))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            # Gemma multiplies embeddings by sqrt(hidden).
            nn.init.normal_(module.weight, std=1.0 if name != "gemma4" else module.embedding_dim**-0.5)
    return model
