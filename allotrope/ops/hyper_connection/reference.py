"""Hyper-connections in PyTorch: what kernels are held against. The package's docstring has the equations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from allotrope.ops.hyper_connection.spec import HyperConnectionSpec


def hc_pre(
    spec: HyperConnectionSpec, streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The input of a sublayer, and the weights that mix its output into the streams.

    `streams`: [T, N, hidden]. `fn`: [(2 + N) N, N * hidden] fp32. `base`: [(2 + N) N] fp32. `scale`: [3] fp32, of pre,
    post and C. Returns x [T, hidden], post [T, N] and C [T, N, N], all in the streams' type.
    """
    n = spec.streams
    m = mixes(streams, fn, spec.norm_eps)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + spec.eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    comb = sinkhorn(torch.softmax(logits, dim=-1) + spec.eps, spec.iterations, spec.eps)
    return weighted_sum(pre, streams), post.to(streams.dtype), comb.to(streams.dtype)


def hc_post(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X'_j = post_j y + sum_i C_ij X_i.

    `y`: [T, hidden]. `streams`: [T, N, hidden]. `post`: [T, N]. `comb`: [T, N, N]. Returns the new streams.
    """
    return torch.baddbmm(post[:, :, None] * y[:, None], comb.transpose(1, 2), streams)


def mixes(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """RMSNorm(flatten(streams)) fn^T in fp32; the norm divides after the product. Returns [T, rows of fn]."""
    flat = streams.flatten(1).float()
    return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def weighted_sum(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """sum_i w_i X_i in fp32, in the streams' type. `weights`: [T, N] fp32. Returns [T, hidden]."""
    return torch.bmm(weights[:, None], streams.float()).squeeze(1).to(streams.dtype)


def sinkhorn(c: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """`c`: [T, N, N], positive. Divides columns by their sums, then rows and columns in turn."""
    c = c / (c.sum(dim=1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(dim=2, keepdim=True) + eps)
        c = c / (c.sum(dim=1, keepdim=True) + eps)
    return c
