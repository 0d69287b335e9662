"""Hyper-connections: N residual streams per token, mixed around every sublayer by weights made from the streams.

With v = flatten(X) of the streams X [N, hidden], and m = RMSNorm(v) fn^T, without a norm weight, all in fp32:

    pre_i  = sigmoid(m_i * scale_0 + base_i) + eps                       i < N
    post_j = 2 sigmoid(m_(N+j) * scale_1 + base_(N+j))                   j < N
    C      = sinkhorn(softmax over rows of (m_2N.. * scale_2 + base_2N..)[N, N] + eps)
    x      = sum_i pre_i X_i               what the sublayer reads
    X'_j   = post_j y + sum_i C_ij X_i     y is what the sublayer returns

Sinkhorn makes C nearly doubly stochastic: columns first, then rows and columns in turn, eps in every denominator.
Source: Xie et al. 2026 (manifold-constrained hyper-connections); DeepSeek-AI 2026, "DeepSeek-V4", section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.parallel import Placement, Section, parameter
from allotrope.ops.device_kernels import device_kernels
from allotrope.ops.hyper_connection.cpu import stream_functions


@dataclass(frozen=True, kw_only=True)
class HyperConnectionSpec:
    """`streams`: N. `iterations`: of Sinkhorn. `eps`: of the mixing weights. `norm_eps`: of the norm of the streams."""

    streams: int
    hidden: int
    iterations: int
    eps: float
    norm_eps: float


def _whole(shape: tuple[int, ...], build: Build) -> nn.Parameter:
    """An fp32 parameter that every rank holds."""
    return parameter(shape, Placement((Section("", shape[0]),)), torch.float32, build.device)


class HyperConnection(nn.Module):
    """The mixing around one sublayer."""

    def __init__(self, spec: HyperConnectionSpec, build: Build) -> None:
        super().__init__()
        self.spec = spec
        mixes = (2 + spec.streams) * spec.streams
        self.fn = _whole((mixes, spec.streams * spec.hidden), build)
        self.base = _whole((mixes,), build)
        self.scale = _whole((3,), build)
        self.scales: torch.Tensor | None = None
        # Products with these give each element of C its row's or its column's sum.
        exact: dict[str, Any] = {"dtype": torch.float32, "device": build.device}
        eye, ones = torch.eye(spec.streams, **exact), torch.ones(spec.streams, spec.streams, **exact)
        self.row_sums, self.column_sums = torch.kron(eye, ones), torch.kron(ones, eye)
        self.floor = torch.full((1,), spec.eps, **exact)

    def finish_loading(self) -> None:
        """One factor per mix, so that they are applied at once."""
        n = self.spec.streams
        repeats = torch.tensor([n, n, n * n], device=self.scale.device)
        self.scales = self.scale.data.repeat_interleave(repeats)

    def collapse(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the sublayer reads, and how its output goes back.

        `streams`: [T, N, hidden]. Returns x [T, hidden], post [T, N] and C [T, N, N], all in the streams' type.
        """
        assert self.scales is not None
        fused = device_kernels("hyper_connection", streams.device)
        if fused is not None and fused.takes(self.spec.streams):
            return fused.collapse(self.spec, streams, self.fn, self.base, self.scale)
        n, kind, spec = self.spec.streams, streams.dtype, self.spec
        mixes = mix(streams, self.fn, spec.norm_eps)
        compiled = stream_functions(streams.device)
        if compiled is not None:
            pre, post, comb = compiled.mixing(mixes, self.base, self.scales, n, spec.iterations, spec.eps)
            return weigh(pre, streams), post.to(kind), comb.to(kind)
        mixes = torch.addcmul(self.base, mixes, self.scales)
        gates = torch.sigmoid(mixes[:, : 2 * n])
        x = weigh(gates[:, :n] + spec.eps, streams)
        return x, (2 * gates[:, n:]).to(kind), self._sinkhorn(mixes[:, 2 * n :]).to(kind)

    def _sinkhorn(self, mixes: torch.Tensor) -> torch.Tensor:
        """`mixes`: [T, N * N]. Returns [T, N, N]."""
        n = self.spec.streams
        c = (torch.softmax(mixes.unflatten(-1, (n, n)), dim=-1) + self.spec.eps).flatten(1)
        c = c / torch.addmm(self.floor, c, self.column_sums)
        for _ in range(self.spec.iterations - 1):
            c = c.div_(torch.addmm(self.floor, c, self.row_sums))
            c = c.div_(torch.addmm(self.floor, c, self.column_sums))
        return c.unflatten(-1, (n, n))


def expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X'_j = post_j y + sum_i C_ij X_i. `y`: [T, hidden]. `streams`: [T, N, hidden]. Returns the new streams."""
    fused = device_kernels("hyper_connection", streams.device)
    if fused is not None and fused.takes(streams.shape[1]):
        return fused.expand(y, streams, post, comb)
    return torch.baddbmm(post[:, :, None] * y[:, None], comb.transpose(1, 2), streams)


def mix(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """RMSNorm(flatten(streams)) fn^T in fp32; the norm divides after the product. Returns [T, mixes]."""
    flat = streams.flatten(1).float()
    return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def weigh(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """sum_i w_i X_i in fp32, in the streams' type. `weights`: [T, N] fp32. Returns [T, hidden]."""
    return torch.bmm(weights[:, None], streams.float()).squeeze(1).to(streams.dtype)


class HyperHead(nn.Module):
    """The streams as one, after the last layer: x = sum_i (sigmoid(m_i * scale + base_i) + eps) X_i."""

    def __init__(self, spec: HyperConnectionSpec, build: Build) -> None:
        super().__init__()
        self.spec = spec
        self.fn = _whole((spec.streams, spec.streams * spec.hidden), build)
        self.base = _whole((spec.streams,), build)
        self.scale = _whole((1,), build)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """`streams`: [T, N, hidden]. Returns [T, hidden]."""
        mixes = torch.addcmul(self.base, mix(streams, self.fn, self.spec.norm_eps), self.scale)
        return weigh(torch.sigmoid(mixes) + self.spec.eps, streams)
