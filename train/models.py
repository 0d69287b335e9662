"""The eight models as trainable modules, and their checkpoints in the released layout.

`build(name)` makes a model of `configs.CONFIGS`; `released(model)` gives its tensors by their released names, and
`load_released` reads them back.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from train.configs import CONFIGS, FULL, SLIDING
from train.layers import (
    BiasedRouter,
    Experts,
    HashRouter,
    Mlp,
    Moe,
    Pass,
    RMSNorm,
    Router,
    Routing,
    clamped_silu,
    clamped_swiglu,
    embed,
    gelu,
    linear,
)
from train.mixers import Attention, CompressedAttention, GatedDeltaNet, LatentAttention
from train.rope import Rope, yarn_scale

Config = dict[str, Any]


class Layer(nn.Module):
    """x += mixer(norm(x)); x += mlp(norm(x)). `mixer_name`: released name of the mixer."""

    def __init__(
        self, config: Config, mixer: nn.Module, mlp: nn.Module, mixer_name: str = "self_attn", offset: float = 0.0
    ) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.mixer_name = mixer_name
        self.input_layernorm = RMSNorm(hidden, eps, offset)
        self.add_module(mixer_name, mixer)
        self.post_attention_layernorm = RMSNorm(hidden, eps, offset)
        self.mlp = mlp

    def forward(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        x = x + self.get_submodule(self.mixer_name)(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x), step)


class GemmaLayer(nn.Module):
    """x += norm(attn(norm(x))); x += norm(mlp(norm(x))); x *= scalar."""

    def __init__(self, config: Config, mixer: nn.Module) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.self_attn = RMSNorm(hidden, eps), mixer
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.mlp = Mlp(hidden, config["intermediate_size"], gelu)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), step))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class HyperLayer(nn.Module):
    """V4's layer: N residual streams, mixed before and after each sublayer (hyper-connections)."""

    def __init__(self, config: Config, mixer: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        hidden, eps, n = config["hidden_size"], config["rms_norm_eps"], config["hc_mult"]
        self.n, self.eps, self.norm_eps, self.iterations = n, config["hc_eps"], eps, config["hc_sinkhorn_iters"]
        self.attn_norm, self.attn = RMSNorm(hidden, eps), mixer
        self.ffn_norm, self.ffn = RMSNorm(hidden, eps), mlp
        for part in ("attn", "ffn"):
            base = torch.cat((torch.full((2 * n,), -1.0), (4 * torch.eye(n)).flatten()))
            self.register_parameter(f"hc_{part}_fn", nn.Parameter(torch.randn(len(base), n * hidden) * 0.02))
            self.register_parameter(f"hc_{part}_base", nn.Parameter(base))
            self.register_parameter(f"hc_{part}_scale", nn.Parameter(torch.full((3,), 0.1)))

    def forward(self, streams: torch.Tensor, step: Pass) -> torch.Tensor:
        """`streams`: [B, T, N, hidden]. Returns the same shape."""
        x, post, comb = self._pre("attn", streams)
        streams = _post(self.attn(self.attn_norm(x), step), streams, post, comb)
        x, post, comb = self._pre("ffn", streams)
        return _post(self.ffn(self.ffn_norm(x), step), streams, post, comb)

    def _pre(self, part: str, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n, fn, base, scale = self.n, *(getattr(self, f"hc_{part}_{name}") for name in ("fn", "base", "scale"))
        m = mixes(streams, fn, self.norm_eps)
        pre = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + self.eps
        post = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
        c = torch.softmax((m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), dim=-1) + self.eps
        c = c / (c.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.iterations - 1):
            c = c / (c.sum(-1, keepdim=True) + self.eps)
            c = c / (c.sum(-2, keepdim=True) + self.eps)
        return joined(pre, streams), post, c


def mixes(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm(flatten(streams)) fn^T in fp32."""
    flat = streams.flatten(-2).float()
    with torch.autocast(flat.device.type, enabled=False):
        return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def joined(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """sum_i w_i X_i, in the streams' type."""
    return (weights[..., None] * streams.float()).sum(-2).to(streams.dtype)


def _post(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X'_j = post_j y + sum_i C_ij X_i."""
    kept = (comb[..., None] * streams.float()[..., None, :]).sum(-3)
    return (post[..., None] * y.float()[..., None, :] + kept).to(streams.dtype)


class Backbone(nn.Module):
    """Embedding, layers and final norm, by the names of most releases."""

    def __init__(self, config: Config, layers: list[nn.Module], offset: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"], offset)

    def forward(self, step: Pass) -> torch.Tensor:
        x = embed(self.embed_tokens, step.ids) * self.scale
        for layer in self.layers:
            x = layer(x, step)
        return self.norm(x)


class Model(nn.Module):
    """A decoder with its head. `mtp`: predicts the token after the next one, or None.

    `prefix`: released name of the backbone. `mtp_prefix`: of the MTP layer's tensors.
    """

    def __init__(
        self,
        config: Config,
        backbone: nn.Module,
        *,
        prefix: str = "model.",
        tied: bool = False,
        softcap: float | None = None,
        mtp: nn.Module | None = None,
        mtp_prefix: str = "",
    ) -> None:
        super().__init__()
        self.config, self.prefix, self.mtp_prefix, self.softcap = config, prefix, mtp_prefix, softcap
        self.backbone, self.mtp = backbone, mtp
        sizes = config.get("text_config", config)
        self.head = None if tied else linear(sizes["hidden_size"], sizes["vocab_size"])

    def hidden(self, step: Pass) -> torch.Tensor:
        """[B, T, hidden] after the final norm."""
        return self.backbone(step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, vocabulary] fp32."""
        weight = self.backbone.embed_tokens.weight if self.head is None else self.head.weight
        logits = F.linear(hidden, weight.to(hidden.dtype)).float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def mtp_logits(self, hidden: torch.Tensor, step: Pass) -> torch.Tensor:
        """[B, T - 1, vocabulary] fp32: after tokens t and t + 1, the logits of token t + 2."""
        assert self.mtp is not None
        step = Pass(step.ids[:, 1:], step.positions[1:], step.sparse, None, step.losses)
        return self.mtp(self, hidden[:, :-1], step)


class DeepseekMtp(nn.Module):
    """V3's MTP layer, with embedding and head of its own as released: they are copies of the model's."""

    def __init__(self, config: Config, layer: Layer) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.eh_proj = linear(2 * hidden, hidden)
        self.layer, self.norm = layer, RMSNorm(hidden, eps)

    def forward(self, model: Model, hidden: torch.Tensor, step: Pass) -> torch.Tensor:
        embedded = embed(model.backbone.embed_tokens, step.ids)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return model.logits(self.norm(self.layer(x, step)))

    def rename(self, name: str) -> str:
        """The released name of a parameter or buffer."""
        return "shared_head.norm.weight" if name == "norm.weight" else name.removeprefix("layer.")


class QwenMtp(nn.Module):
    """Qwen3-Next's MTP layer; it shares embedding and head."""

    def __init__(self, config: Config, layer: Layer) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = RMSNorm(hidden, eps, 1.0), RMSNorm(hidden, eps, 1.0)
        self.fc = linear(2 * hidden, hidden)
        self.layers, self.norm = nn.ModuleList([layer]), RMSNorm(hidden, eps, 1.0)

    def forward(self, model: Model, hidden: torch.Tensor, step: Pass) -> torch.Tensor:
        embedded = self.pre_fc_norm_embedding(embed(model.backbone.embed_tokens, step.ids))
        x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(hidden)), dim=-1))
        return model.logits(self.norm(self.layers[0](x, step)))

    def rename(self, name: str) -> str:
        return name


class HyperBackbone(nn.Module):
    """V4's decoder: every stream starts as the embedding, and a head joins them."""

    def __init__(self, config: Config, layers: list[nn.Module]) -> None:
        super().__init__()
        hidden, n = config["hidden_size"], config["hc_mult"]
        self.n, self.eps, self.norm_eps = n, config["hc_eps"], config["rms_norm_eps"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(hidden, self.norm_eps)
        self.hc_head_fn = nn.Parameter(torch.randn(n, n * hidden) * 0.02)
        self.hc_head_base = nn.Parameter(torch.full((n,), -1.0))
        self.hc_head_scale = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, step: Pass) -> torch.Tensor:
        streams = embed(self.embed_tokens, step.ids)[:, :, None].expand(-1, -1, self.n, -1)
        for layer in self.layers:
            streams = layer(streams, step)
        m = mixes(streams, self.hc_head_fn, self.norm_eps) * self.hc_head_scale + self.hc_head_base
        return self.norm(joined(torch.sigmoid(m) + self.eps, streams))


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


def _released_names(model: Model, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames `state_dict`'s keys, but for experts."""
    v4 = isinstance(model.backbone, HyperBackbone)
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("backbone."):
            name = model.prefix + name.removeprefix("backbone.")
        elif name.startswith("mtp.") and isinstance(model.mtp, DeepseekMtp | QwenMtp):
            name = model.mtp_prefix + model.mtp.rename(name.removeprefix("mtp."))
        elif name == "head.weight" and not v4:
            name = "lm_head.weight"
        if v4:
            name = name.replace("embed_tokens.", "embed.")
        renamed[name] = tensor
    return renamed


def released(model: Model) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, in their released names, layouts and types (bf16, and fp32 or int64 where released)."""
    tensors: dict[str, torch.Tensor] = dict(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            for name, _ in module.named_parameters():
                del tensors[f"{path}.{name}"]
            tensors |= {f"{path}.{name}": tensor for name, tensor in module.released().items()}
    tensors = _released_names(model, tensors)
    if isinstance(model.mtp, DeepseekMtp):
        tensors[model.mtp_prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[model.mtp_prefix + "shared_head.head.weight"] = tensors["lm_head.weight"]
    return {name: _stored(name, tensor.detach()) for name, tensor in tensors.items()}


# Parts of the names of tensors that releases keep in fp32.
FP32 = (".e_score_correction_bias", "hc_", ".attn_sink", ".ape", ".ffn.gate.bias", "indexer.k_norm")


def _stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.cpu().contiguous()
    dtype = torch.float32 if any(part in name for part in FP32) else torch.bfloat16
    return tensor.to("cpu", dtype, copy=True).contiguous()


@torch.no_grad()
def load_released(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    """Reads a checkpoint's tensors. Raises KeyError for one that is missing."""
    own = dict(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            for name, _ in module.named_parameters():
                del own[f"{path}.{name}"]
            prefix = next(iter(_released_names(model, {path + ".": torch.empty(0)})))
            module.load_released(
                {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            )
    for name, tensor in _released_names(model, own).items():
        tensor.copy_(tensors[name])


def round_to_released(model: Model) -> None:
    """Gives the module the values that its checkpoint has."""
    load_released(model, released(model))


def parameter_count(model: Model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
