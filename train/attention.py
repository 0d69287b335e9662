"""Differentiable attention over whole sequences: full, in a sliding window, and over few selected keys.

Queries, keys and values are [B, H, T, D], already rotated; keys and values have as many heads as queries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Without cuDNN's, which PyTorch 2.11 prefers on sm_90: its gradient under a mask is NaN at some lengths.
# Source: https://github.com/pytorch/pytorch/issues/196678
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, visible: torch.Tensor | None
) -> torch.Tensor:
    """Attention to the keys of `visible`, or causal attention. Values may be narrower than keys."""
    value = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - value))
    with sdpa_kernel(_BACKENDS):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale)
    return out[..., :value]


def full(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention. `sinks`: [H] logits that take weight and have no value. Returns [B, H, T, Dv].

    A sink becomes a key before the first one: an extra dim of 1 in queries multiplies its logit.
    """
    width = q.shape[-1]
    if sinks is not None:
        batch, heads, _, _ = q.shape
        q = F.pad(q, (0, 8, 1, 0))
        q[..., width] = 1
        key = q.new_zeros(batch, heads, 1, width + 8)
        key[..., width] = (sinks / scale).to(q.dtype)[None, :, None]
        k = torch.cat((key, F.pad(k, (0, 8))), dim=2)
        v = F.pad(v, (0, 0, 1, 0))
    out = _attend(q, k, v, scale, None)
    return out if sinks is None else out[:, :, 1:]


def _blocks(x: torch.Tensor, window: int) -> torch.Tensor:
    """[B, H, T, D] to [B, H, n, 2 * window, D]: each block of keys after the block before it."""
    padded = F.pad(x, (0, 0, window, 0)).unflatten(2, (-1, window))
    return torch.cat((padded[:, :, :-1], padded[:, :, 1:]), dim=3)


class Window:
    """Logits and sums over the `window` latest keys, in blocks of as many queries."""

    def __init__(self, window: int, length: int, device: torch.device) -> None:
        self.window, self.length = window, length
        self.spare = -length % window
        query = torch.arange(window, device=device)[:, None] + window
        key = torch.arange(2 * window, device=device)
        near = (key <= query) & (key > query - window)
        first = torch.arange((length + self.spare) // window, device=device) == 0
        # The first block has no block before it.
        self.hidden = ~near | (first[:, None, None] & (key < window))

    def logits(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        """[B, H, T, 2 * window] fp32, -inf for keys outside of a query's window."""
        q, k = (F.pad(x, (0, 0, 0, self.spare)) for x in (q, k))
        logits = q.unflatten(2, (-1, self.window)) @ _blocks(k, self.window).transpose(-1, -2)
        logits = (logits.float() * scale).masked_fill(self.hidden, -torch.inf)
        return logits.flatten(2, 3)[:, :, : self.length]

    def sum(self, weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[B, H, T, Dv]. `weights`: as `logits`."""
        weights = F.pad(weights, (0, 0, 0, self.spare)).unflatten(2, (-1, self.window))
        v = _blocks(F.pad(v, (0, 0, 0, self.spare)), self.window)
        return (weights.to(v.dtype) @ v).flatten(2, 3)[:, :, : self.length]


def softmax(logits: list[torch.Tensor], sinks: torch.Tensor | None) -> list[torch.Tensor]:
    """One softmax over the last dims of several logits [B, H, T, n], and the sinks [H]. Returns weights of each."""
    sizes, parts = [part.shape[-1] for part in logits], list(logits)
    if sinks is not None:
        parts.append(sinks.float()[:, None, None].expand(*logits[0].shape[:3], 1))
    weights = torch.softmax(torch.cat(parts, dim=-1), dim=-1)
    return list(weights[..., : sum(sizes)].split(sizes, dim=-1))


def sliding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention to the latest `window` keys, the query's own included. Returns [B, H, T, Dv]."""
    near = Window(window, q.shape[2], q.device)
    (weights,) = softmax([near.logits(q, k, scale)], sinks)
    return near.sum(weights, v)


def selected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, visible: torch.Tensor) -> torch.Tensor:
    """Attention to the keys of `visible` [B, 1, T, T] bool. Returns [B, H, T, Dv]."""
    return _attend(q, k, v, scale, visible)


def topk_mask(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Where `scores` [..., n] are among the `topk` highest of the row and not -inf."""
    indices = scores.topk(min(topk, scores.shape[-1]), dim=-1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, True) & (scores > -torch.inf)


def indexer_loss(scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """KL(p || softmax(scores)), p the attention of all heads, normed to a sum of 1 over the same keys (V3.2, eq. 3).

    `scores`: [B, Q, n], -inf where a query does not see a key. `weights`: [B, H, Q, n] of attention; no gradient goes
    through them. Queries without a key count as 0.
    """
    visible = scores > -torch.inf
    target = weights.detach().sum(1) * visible
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    floor = torch.finfo(scores.dtype).min / 2
    logs = torch.log_softmax(scores.masked_fill(~visible, floor), dim=-1)
    return (torch.xlogy(target, target) - target * logs.masked_fill(~visible, 0)).sum(-1).mean()
