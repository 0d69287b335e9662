"""The gated feed-forward block: y = W_down (act(W_gate x) * (W_up x))."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.linear import Linear, RowLinear
from allotrope.layers.parallel import Section
from allotrope.layers.step import LayerStep
from allotrope.ops.gated_activation import GATED_ACTIVATION, Activation, GatedActivation, GatedActivationSpec


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """`width`: inner size. `bias`: on all three projections. `limit`: as in `GatedActivation`."""

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
        self.activation = GatedActivation(activation=spec.activation, limit=spec.limit)
        self._activate = build.chooser.choose(GATED_ACTIVATION, GatedActivationSpec(self.activation, build.dtype)).run
        sections = (Section("gate", spec.width, 1), Section("up", spec.width, 1))
        build.parallel.shard("intermediate_size", spec.width)
        self.gate_up = Linear(spec.hidden, sections, build.at("gate_up"), bias=spec.bias)
        self.down = RowLinear(Section("", spec.width, 1), spec.hidden, build.at("down"), bias=spec.bias)

    def forward(self, x: torch.Tensor, ctx: LayerStep) -> torch.Tensor:
        """`x`: [T, hidden]. Returns the same shape, this rank's part of the sum over the ranks."""
        return self.down(self._activate(self.gate_up(x), self.activation))
