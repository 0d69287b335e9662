"""Modules of hyper-connections: the weights that mix N residual streams. `ops.hyper_connection` has the equations."""

from __future__ import annotations

import torch
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.parallel import Placement, Section
from allotrope.ops.hyper_connection import HC_POST, HC_PRE, HyperConnectionSpec
from allotrope.ops.hyper_connection.reference import mixes, weighted_sum


def _replicated(shape: tuple[int, ...], build: Build) -> nn.Parameter:
    """An fp32 parameter that every rank holds."""
    return build.parameter(shape, Placement((Section("", shape[0]),)), torch.float32)


class HyperConnection(nn.Module):
    """The mixing around one sublayer."""

    def __init__(self, spec: HyperConnectionSpec, build: Build) -> None:
        super().__init__()
        self.spec = spec
        count = (2 + spec.streams) * spec.streams
        self.fn = _replicated((count, spec.streams * spec.hidden), build)
        self.base = _replicated((count,), build)
        self.scale = _replicated((3,), build)
        self._pre = build.chooser.choose(HC_PRE, spec).run
        self._post = build.chooser.choose(HC_POST, spec).run

    def pre(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the sublayer reads, and how its output goes back.

        `streams`: [T, N, hidden]. Returns x [T, hidden], post [T, N] and C [T, N, N], all in the streams' type.
        """
        return self._pre(self.spec, streams, self.fn, self.base, self.scale)

    def post(self, y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """X'_j = post_j y + sum_i C_ij X_i. `y`: [T, hidden]. `streams`: [T, N, hidden]. Returns the new streams."""
        return self._post(y, streams, post, comb)


class HyperHead(nn.Module):
    """The streams as one, after the last layer: x = sum_i (sigmoid(m_i * scale + base_i) + eps) X_i."""

    def __init__(self, spec: HyperConnectionSpec, build: Build) -> None:
        super().__init__()
        self.spec = spec
        self.fn = _replicated((spec.streams, spec.streams * spec.hidden), build)
        self.base = _replicated((spec.streams,), build)
        self.scale = _replicated((1,), build)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """`streams`: [T, N, hidden]. Returns [T, hidden]."""
        m = torch.addcmul(self.base, mixes(streams, self.fn, self.spec.norm_eps), self.scale)
        return weighted_sum(torch.sigmoid(m) + self.spec.eps, streams)
