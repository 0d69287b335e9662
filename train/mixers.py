"""Token mixers with the released parameter names: softmax attention, latent attention, delta rule, compressed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from train import attention
from train.delta_rule import gated_delta_rule
from train.layers import Pass, RMSNorm, linear
from train.rope import Rope, yarn_scale


class Attention(nn.Module):
    """Grouped-query attention of every model that has it.

    `sinks`: released name of the sinks, or "". `norm_offset`: of q_norm and k_norm, or None without them. `gated`: the
    query projection has a gate beside each head. `from_keys`: values are the keys before their norm. `v_norm`: values
    are normed without a weight.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        dim: int,
        rope: Rope,
        *,
        value_dim: int = 0,
        window: int | None = None,
        sinks: str = "",
        bias: bool = False,
        norm_offset: float | None = None,
        eps: float = 1e-6,
        gated: bool = False,
        from_keys: bool = False,
        v_norm: bool = False,
        scale: float | None = None,
        value_scale: float = 1.0,
    ) -> None:
        super().__init__()
        value_dim = value_dim or dim
        self.heads, self.kv_heads, self.rope, self.window = heads, kv_heads, rope, window
        self.gated, self.from_keys, self.sinks_name, self.value_scale = gated, from_keys, sinks, value_scale
        self.scale = dim**-0.5 if scale is None else scale
        self.q_proj = linear(hidden, heads * dim * (2 if gated else 1), bias)
        self.k_proj = linear(hidden, kv_heads * dim, bias)
        self.v_proj = None if from_keys else linear(hidden, kv_heads * value_dim, bias)
        self.o_proj = linear(heads * value_dim, hidden, bias)
        self.q_norm = self.k_norm = None
        if norm_offset is not None:
            self.q_norm, self.k_norm = RMSNorm(dim, eps, norm_offset), RMSNorm(dim, eps, norm_offset)
        self.v_norm = RMSNorm(value_dim, eps, weighted=False) if v_norm else None
        if sinks:
            self.register_parameter(sinks, nn.Parameter(torch.zeros(heads)))

    def forward(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)), None
        if self.gated:
            q, gate = q.chunk(2, dim=-1)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1))
        v = k if self.v_proj is None else self.v_proj(x).unflatten(-1, (self.kv_heads, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.v_norm is not None:
            v = self.v_norm(v)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        q, k = self.rope(q, step.positions), self.rope(k, step.positions)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        sinks = getattr(self, self.sinks_name) if self.sinks_name else None
        if self.window is None:
            y = attention.full(q, k, v, self.scale, sinks)
        else:
            y = attention.sliding(q, k, v, self.scale, self.window, sinks)
        y = y.transpose(1, 2)
        if gate is not None:
            y = y * torch.sigmoid(gate)
        return self.o_proj(y.flatten(2) * self.value_scale)


class Indexer(nn.Module):
    """V3.2's lightning indexer. It learns from what the attention does; no gradient leaves it."""

    def __init__(self, config: dict[str, Any], rope: Rope) -> None:
        super().__init__()
        self.heads, self.dim, self.rope = config["index_n_heads"], config["index_head_dim"], rope
        self.wq_b = linear(config["q_lora_rank"], self.heads * self.dim)
        self.wk = linear(config["hidden_size"], self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = linear(config["hidden_size"], self.heads)

    def scores(
        self, x: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """[B, Q, T] fp32 scores of the queries at `rows` [Q], -inf for tokens after them."""
        x, latent = x.detach(), latent.detach()
        k = self.rope(self.k_norm(self.wk(x).float()), positions)
        q = self.wq_b(latent[:, rows]).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
        q = self.rope(q.float(), positions[rows])
        weights = self.weights_proj(x[:, rows]).float() * self.heads**-0.5
        scores = x.new_zeros(len(x), len(rows), x.shape[1], dtype=torch.float32)
        for head in range(self.heads):
            hits = torch.relu(q[:, head] @ k.transpose(1, 2) * self.dim**-0.5)
            scores = scores + weights[..., head, None] * hits
        return scores.masked_fill(positions > positions[rows, None], -torch.inf)


class LatentAttention(nn.Module):
    """MLA of DeepSeek V3; with an indexer, that of V3.2."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.nope, self.rope_dim = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.value, self.latent = config["v_head_dim"], config["kv_lora_rank"]
        yarn = config["rope_scaling"]
        # Its two mscales are equal, so that cos and sin are not scaled; the logits are.
        stretched = tuple(sorted(yarn.items()))
        self.rope = Rope(self.rope_dim, config["rope_theta"], interleaved=True, yarn=stretched)
        self.scale = (self.nope + self.rope_dim) ** -0.5 * yarn_scale(yarn["factor"]) ** 2
        self.q_a_proj = linear(hidden, config["q_lora_rank"])
        self.q_a_layernorm = RMSNorm(config["q_lora_rank"], 1e-6)
        self.q_b_proj = linear(config["q_lora_rank"], self.heads * (self.nope + self.rope_dim))
        self.kv_a_proj_with_mqa = linear(hidden, self.latent + self.rope_dim)
        self.kv_a_layernorm = RMSNorm(self.latent, 1e-6)
        self.kv_b_proj = linear(self.latent, self.heads * (self.nope + self.value))
        self.o_proj = linear(self.heads * self.value, hidden)
        self.topk = config.get("index_topk", 0)
        half_split = Rope(self.rope_dim, config["rope_theta"], yarn=stretched)
        self.indexer = Indexer(config, half_split) if self.topk else None

    def forward(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        c, k_pe = self.kv_a_proj_with_mqa(x).split((self.latent, self.rope_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(c)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = kv.split((self.nope, self.value), dim=-1)
        q_nope, q_pe = q.split((self.nope, self.rope_dim), dim=-1)
        q = torch.cat((q_nope, self.rope(q_pe, step.positions)), dim=-1)
        k_pe = self.rope(k_pe[:, None], step.positions).expand(-1, self.heads, -1, -1)
        k = torch.cat((k, k_pe), dim=-1)
        y = self._attend(x, q_latent, q, k, v, step)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _attend(
        self,
        x: torch.Tensor,
        q_latent: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        step: Pass,
    ) -> torch.Tensor:
        if self.indexer is None:
            return attention.full(q, k, v, self.scale)
        if step.rows is not None:
            self._teach(self.indexer, x, q_latent, q, k, step, step.rows)
        if not step.sparse or x.shape[1] <= self.topk:
            return attention.full(q, k, v, self.scale)
        with torch.no_grad():
            scores = self.indexer.scores(x, q_latent, step.positions, step.positions)
            visible = attention.topk_mask(scores, self.topk)[:, None]
        return attention.selected(q, k, v, self.scale, visible)

    def _teach(
        self,
        indexer: Indexer,
        x: torch.Tensor,
        q_latent: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        step: Pass,
        rows: torch.Tensor,
    ) -> None:
        """Adds the indexer's loss at `rows`: over all keys first, over the selected ones once attention is sparse."""
        scores = indexer.scores(x, q_latent, step.positions, rows)
        if step.sparse:
            scores = scores.masked_fill(~attention.topk_mask(scores.detach(), self.topk), -torch.inf)
        with torch.no_grad():
            logits = (q[:, :, rows] @ k.transpose(-1, -2)).float() * self.scale
            weights = torch.softmax(logits.masked_fill((scores == -torch.inf)[:, None], -torch.inf), dim=-1)
        step.add("indexer", attention.indexer_loss(scores, weights))


class GatedDeltaNet(nn.Module):
    """Qwen3-Next's linear attention. Both input projections are interleaved by key head, as released."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.k_heads, self.v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.k_dim, self.v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        hidden, self.width = config["hidden_size"], config["linear_conv_kernel_dim"]
        keys, values = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        self.in_proj_qkvz = linear(hidden, 2 * keys + 2 * values)
        self.in_proj_ba = linear(hidden, 2 * self.v_heads)
        self.conv1d = nn.Conv1d(2 * keys + values, 2 * keys + values, self.width, groups=2 * keys + values, bias=False)
        self.dt_bias = nn.Parameter(torch.linspace(-4, 0, self.v_heads))
        self.A_log = nn.Parameter(torch.linspace(-2, 1, self.v_heads))
        self.norm = RMSNorm(self.v_dim, config["rms_norm_eps"])
        self.out_proj = linear(values, hidden)

    def forward(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        repeat = self.v_heads // self.k_heads
        sizes = (self.k_dim, self.k_dim, repeat * self.v_dim, repeat * self.v_dim)
        parts = self.in_proj_qkvz(x).unflatten(-1, (self.k_heads, -1)).split(sizes, dim=-1)
        q, k, v, z = (part.flatten(2) for part in parts)
        b, a = (part.flatten(2) for part in self.in_proj_ba(x).unflatten(-1, (self.k_heads, -1)).chunk(2, dim=-1))
        with torch.autocast(x.device.type, enabled=False):
            y = self._mix(torch.cat((q, k, v), dim=-1).float(), b.float(), a.float())
            y = self.norm(y) * F.silu(z.float().unflatten(-1, (self.v_heads, -1)))
        return self.out_proj(y.flatten(2).to(x.dtype))

    def _mix(self, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """[B, T, Hv, Dv] fp32."""
        # Four shifted products: a depthwise convolution has no fast gradient.
        padded, taps = F.pad(qkv, (0, 0, self.width - 1, 0)), self.conv1d.weight[:, 0].float()
        mixed = sum(padded[:, i : i + qkv.shape[1]] * taps[:, i] for i in range(self.width))
        assert isinstance(mixed, torch.Tensor)
        keys = self.k_heads * self.k_dim
        q, k, v = F.silu(mixed).split((keys, keys, self.v_heads * self.v_dim), dim=-1)
        q, k = (y.unflatten(-1, (self.k_heads, -1)).transpose(1, 2) for y in (q, k))
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q, k = (y.repeat_interleave(self.v_heads // self.k_heads, dim=1) for y in (q, k))
        v = v.unflatten(-1, (self.v_heads, -1)).transpose(1, 2)
        g = -self.A_log.float().exp() * F.softplus(a + self.dt_bias.float())
        y = gated_delta_rule(q * self.k_dim**-0.5, k, v, g.transpose(1, 2), torch.sigmoid(b).transpose(1, 2))
        return y.transpose(1, 2)


class Compressor(nn.Module):
    """Compressed keys of V4: blocks of `ratio` tokens are pooled; with `overlap`, of twice as many."""

    def __init__(self, hidden: int, dim: int, ratio: int, overlap: bool, rope: Rope, eps: float) -> None:
        super().__init__()
        self.dim, self.ratio, self.overlap, self.rope = dim, ratio, overlap, rope
        streams = 2 if overlap else 1
        self.wkv, self.wgate = linear(hidden, streams * dim), linear(hidden, streams * dim)
        self.ape = nn.Parameter(torch.randn(ratio, streams * dim) * 0.02)
        self.norm = RMSNorm(dim, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [B, T, hidden]. Returns [B, T // ratio, dim] fp32, rotated."""
        entries = x.shape[1] // self.ratio
        x = x[:, : entries * self.ratio].float()
        with torch.autocast(x.device.type, enabled=False):
            kv, score = (layer(x).unflatten(1, (entries, self.ratio)) for layer in (self.wkv, self.wgate))
            score = score + self.ape
            if self.overlap:
                kv, score = self._with_the_block_before(kv, 0.0), self._with_the_block_before(score, -torch.inf)
            pooled = (torch.softmax(score, dim=2) * kv).sum(2)
            positions = self.ratio * torch.arange(entries, device=x.device)
            return self.rope(self.norm(pooled), positions)

    def _with_the_block_before(self, x: torch.Tensor, value: float) -> torch.Tensor:
        before = F.pad(x[..., : self.dim], (0, 0, 0, 0, 1, 0), value=value)[:, :-1]
        return torch.cat((before, x[..., self.dim :]), dim=2)


class CompressedIndexer(nn.Module):
    """V4's indexer: scores of compressed entries, whose index keys a compressor of its own makes."""

    def __init__(self, config: dict[str, Any], ratio: int, rope: Rope) -> None:
        super().__init__()
        hidden, self.heads, self.dim = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
        self.ratio, self.rope = ratio, rope
        self.wq_b = linear(config["q_lora_rank"], self.heads * self.dim)
        self.weights_proj = linear(hidden, self.heads)
        self.compressor = Compressor(hidden, self.dim, ratio, True, rope, config["rms_norm_eps"])

    def scores(
        self, x: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """[B, Q, T // ratio] fp32 scores of the queries at `rows`, -inf for entries that are not closed there."""
        x, latent = x.detach(), latent.detach()
        k = self.compressor(x)
        q = self.wq_b(latent[:, rows]).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
        q = self.rope(q.float(), positions[rows])
        weights = self.weights_proj(x[:, rows]).float() * (self.heads * self.dim) ** -0.5
        scores = x.new_zeros(len(x), len(rows), k.shape[1], dtype=torch.float32)
        for head in range(self.heads):
            scores = scores + weights[..., head, None] * torch.relu(q[:, head] @ k.transpose(1, 2))
        closed = (positions[rows, None] + 1) // self.ratio
        return scores.masked_fill(torch.arange(k.shape[1], device=x.device) >= closed, -torch.inf)


class CompressedAttention(nn.Module):
    """V4's attention of one layer. `ratio` 0: the window alone; 4: with overlap and an indexer; 128: all entries."""

    def __init__(self, config: dict[str, Any], ratio: int) -> None:
        super().__init__()
        hidden, dim, eps = config["hidden_size"], config["head_dim"], config["rms_norm_eps"]
        self.heads, self.ratio, self.window = config["num_attention_heads"], ratio, config["sliding_window"]
        self.scale, self.groups = dim**-0.5, config["o_groups"]
        rotated, rank = config["qk_rope_head_dim"], config["q_lora_rank"]
        self.rope = Rope(rotated, config["rope_theta"], interleaved=True, last=True)
        if ratio:
            yarn, theta = tuple(sorted(config["rope_scaling"].items())), config["compress_rope_theta"]
            self.rope = Rope(rotated, theta, interleaved=True, last=True, yarn=yarn)
        self.wq_a, self.q_norm = linear(hidden, rank), RMSNorm(rank, eps)
        self.wq_b = linear(rank, self.heads * dim)
        self.head_norm = RMSNorm(dim, eps, weighted=False)
        self.wkv, self.kv_norm = linear(hidden, dim), RMSNorm(dim, eps)
        self.wo_a = linear(self.heads * dim // self.groups, self.groups * config["o_lora_rank"])
        self.wo_b = linear(self.groups * config["o_lora_rank"], hidden)
        self.attn_sink = nn.Parameter(torch.zeros(self.heads))
        self.compressor = Compressor(hidden, dim, ratio, ratio == 4, self.rope, eps) if ratio else None
        self.indexer = CompressedIndexer(config, ratio, self.rope) if ratio == 4 else None
        self.topk = config["index_topk"]

    def forward(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        q_latent = self.q_norm(self.wq_a(x))
        q = self.head_norm(self.wq_b(q_latent).unflatten(-1, (self.heads, -1))).transpose(1, 2)
        q = self.rope(q, step.positions)
        kv = self.rope(self.kv_norm(self.wkv(x))[:, None], step.positions)
        near = attention.Window(self.window, x.shape[1], x.device)
        logits = [near.logits(q, kv, self.scale)]
        entries = None
        if self.compressor is not None and x.shape[1] >= self.ratio:
            entries = self.compressor(x)[:, None].to(q.dtype)
            far = (q @ entries.transpose(-1, -2)).float() * self.scale
            closed = (step.positions[:, None] + 1) // self.ratio
            far = far.masked_fill(torch.arange(far.shape[-1], device=x.device) >= closed, -torch.inf)
            logits.append(self._select(x, q_latent, far, step))
        weights = attention.softmax(logits, self.attn_sink)
        y = near.sum(weights[0], kv.expand(-1, self.heads, -1, -1))
        if entries is not None:
            y = y + weights[1].to(entries.dtype) @ entries
        y = self.rope(y, step.positions, inverse=True).transpose(1, 2).flatten(2)
        grouped = self.wo_a.weight.unflatten(0, (self.groups, -1))
        y = torch.einsum("btgi,goi->btgo", y.unflatten(-1, (self.groups, -1)), grouped.to(y.dtype))
        return self.wo_b(y.flatten(2))

    def _select(self, x: torch.Tensor, q_latent: torch.Tensor, far: torch.Tensor, step: Pass) -> torch.Tensor:
        """`far`: [B, H, T, n] logits of entries. Hides those that the indexer does not select."""
        if self.indexer is None:
            return far
        if step.rows is not None:
            self._teach(self.indexer, x, q_latent, far, step, step.rows)
        if not step.sparse or far.shape[-1] <= self.topk:
            return far
        with torch.no_grad():
            scores = self.indexer.scores(x, q_latent, step.positions, step.positions)
            hidden = ~attention.topk_mask(scores, self.topk)[:, None]
        return far.masked_fill(hidden, -torch.inf)

    def _teach(
        self,
        indexer: CompressedIndexer,
        x: torch.Tensor,
        q_latent: torch.Tensor,
        far: torch.Tensor,
        step: Pass,
        rows: torch.Tensor,
    ) -> None:
        """Adds the indexer's loss at `rows`, against attention among the entries alone."""
        scores = indexer.scores(x, q_latent, step.positions, rows)
        if step.sparse:
            scores = scores.masked_fill(~attention.topk_mask(scores.detach(), self.topk), -torch.inf)
        hidden = (scores == -torch.inf)[:, None]
        with torch.no_grad():
            # Queries before the first entry have no entry at all.
            weights = torch.softmax(far[:, :, rows].masked_fill(hidden, -1e9), dim=-1).masked_fill(hidden, 0)
        step.add("indexer", attention.indexer_loss(scores, weights))
