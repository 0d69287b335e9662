"""The gated feed-forward block: y = W_down (act(W_gate x) * (W_up x))."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.linear import Linear, RowLinear
from allotrope.layers.parallel import Section
from allotrope.layers.step import LayerStep
from allotrope.ops.device_kernels import device_kernels
from allotrope.ops.gated_activation import cpu
from allotrope.ops.gated_activation.c_struct import CompiledGating

Activation = Literal["silu", "gelu_tanh"]


def activate(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """The named activation, elementwise."""
    return F.silu(x) if kind == "silu" else F.gelu(x, approximate="tanh")


@dataclass(frozen=True, kw_only=True)
class Gating:
    """act(gate) * (up + offset), with gate at most `limit` and up within +-`limit`.

    `slope`: of silu, x * sigmoid(slope * x).
    """

    activation: Activation = "silu"
    slope: float = 1.0
    limit: float | None = None
    offset: float = 0.0

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gate_up`: [T, 2 * width], gate first. Returns [T, width]."""
        fused = device_kernels("gated_activation", gate_up.device)
        if fused is not None:
            return fused.gated(gate_up, self.activation, self.slope, self.limit, self.offset)
        result = cpu.gated_activation(gate_up, self.compiled)
        if result is not None:
            return result
        gate, up = gate_up.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.offset:
            up = up + self.offset
        if self.slope != 1.0:
            return gate * torch.sigmoid(self.slope * gate) * up
        return activate(gate, self.activation).mul_(up)

    @functools.cached_property
    def compiled(self) -> CompiledGating:
        """The same for compiled functions."""
        gelu = self.activation == "gelu_tanh" and self.slope == 1.0
        return CompiledGating(gelu, self.slope, math.inf if self.limit is None else self.limit, self.offset)


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """`width`: inner size. `bias`: on all three projections. `limit`: as in `Gating`."""

    hidden: int
    width: int
    activation: Activation = "silu"
    bias: bool = False
    limit: float | None = None

    def build(self, build: Build) -> Mlp:
        return Mlp(self, build)


class Mlp(nn.Module):
    def __init__(self, spec: MlpSpec, build: Build) -> None:
        super().__init__()
        self.gating = Gating(activation=spec.activation, limit=spec.limit)
        sections = (Section("gate", spec.width, 1), Section("up", spec.width, 1))
        build.parallel.shard("intermediate_size", spec.width)
        self.gate_up = Linear(spec.hidden, sections, build.at("gate_up"), bias=spec.bias)
        self.down = RowLinear(Section("", spec.width, 1), spec.hidden, build.at("down"), bias=spec.bias)

    def forward(self, x: torch.Tensor, here: LayerStep) -> torch.Tensor:
        """`x`: [T, hidden]. Returns the same shape."""
        return self.down(self.gating(self.gate_up(x)))
