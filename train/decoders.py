"""The decoders of the eight models, their layers and MTP layers, as trainable modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from train.layers import (
    Mlp,
    Pass,
    RMSNorm,
    embed,
    gelu,
    linear,
)

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
