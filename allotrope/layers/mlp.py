"""The gated feed-forward block: y = W_down (act(W_gate x) * (W_up x))."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.linear import Linear, RowLinear, quantizing
from allotrope.layers.step import LayerStep
from allotrope.layers.weights import inner_section
from allotrope.ops.gated_activation import GATED_ACTIVATION, Activation, GatedActivation, GatedActivationSpec
from allotrope.ops.matmul.plain import PLAIN


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
        first, second = build.at("gate_up"), build.at("down")
        formats = [first.format("weight", "gate"), first.format("weight", "up"), second.format("weight", "")]
        section = inner_section("intermediate_size", spec.width, [one or PLAIN for one in formats], build)
        sections = tuple(replace(section, name=name) for name in ("gate", "up"))
        self.gate_up = Linear(spec.hidden, sections, first, bias=spec.bias)
        self.quantized_from = self.gate_up.quantized_from
        self.down = RowLinear(section, spec.hidden, second, bias=spec.bias)
        activate = build.chooser.choose(GATED_ACTIVATION, GatedActivationSpec(self.activation, build.dtype))
        self._activate = quantizing(activate, self.down.quantized_from)

    def forward(self, x: torch.Tensor, ctx: LayerStep) -> torch.Tensor:
        """`x`: [T, hidden]. Returns the same shape, this rank's part of the sum over the ranks."""
        return self.down(self._activate(self.gate_up(x), self.activation))
