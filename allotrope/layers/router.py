"""Choosing the experts of each token, and their weights.

Must not know what experts compute. All of it is fp32, and equal on every rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.linear import Linear
from allotrope.layers.parallel import Placement, Section
from allotrope.layers.weights import WeightMatmul
from allotrope.ops.matmul import MATMUL, MatmulSpec
from allotrope.ops.matmul.plain import PLAIN, PlainWeight
from allotrope.ops.matmul.weight import Weight
from allotrope.ops.moe_route import HASH_ROUTE, MOE_ROUTE, RouteSpec, Score

__all__ = ["Router", "RouterSpec", "Score"]


@dataclass(frozen=True, kw_only=True)
class RouterSpec(RouteSpec):
    """A `RouteSpec` whose logits are W x (+ b with `bias`).

    `table`: if not 0, the experts are looked up by token id (of that many), not chosen.
    """

    bias: bool = False
    table: int = 0

    @property
    def route(self) -> RouteSpec:
        """What is computed from the logits."""
        return RouteSpec(**{field.name: getattr(self, field.name) for field in dataclasses.fields(RouteSpec)})


class Router(nn.Module):
    """Chooses experts. Equal on every rank."""

    def __init__(self, spec: RouterSpec, hidden: int, build: Build) -> None:
        super().__init__()
        self.spec = spec
        exact = build.exact()
        section = Section("", spec.experts)
        self.gate = Linear(hidden, (section,), exact, bias=spec.bias)
        self.correction = self.table = None
        if spec.correction:
            self.correction = build.parameter((spec.experts,), Placement((section,)), torch.float32)
        if spec.table:
            placement = Placement((Section("", spec.table),), below=spec.experts)
            self.table = build.parameter((spec.table, spec.topk), placement, torch.int64)
        self._route_spec = spec.route
        self._route = build.chooser.choose(HASH_ROUTE if spec.table else MOE_ROUTE, self._route_spec).run
        # Of a gate whose weight is bf16 without loss; on a GPU that has sums of their products in fp32.
        self.bf16_weight: Weight | None = None
        self.bf16_matmul: WeightMatmul | None = None
        if build.dtype == torch.bfloat16 and build.chooser.chip.vendor == "nvidia":
            spec_of_bf16 = MatmulSpec(PLAIN, torch.bfloat16, spec.experts, hidden)
            self.bf16_matmul = WeightMatmul(MATMUL, spec_of_bf16, build)

    def finish_loading(self) -> None:
        """Let the gate's weight be bf16 where that loses nothing: checkpoints mostly store it so.

        Products of bf16 are exact in fp32, so that logits are as exact, several times as fast for long prompts.
        """
        weight = self.gate.weight
        assert isinstance(weight, torch.Tensor)
        if self.bf16_matmul is None or not self.bf16_matmul.backend.fp32_out:
            return
        rounded = weight.data.to(torch.bfloat16)
        if torch.equal(rounded.float(), weight.data):
            # The gate's own hook comes after this one, and keeps what it finds.
            self.bf16_weight, weight.data = self.bf16_matmul.pack(PlainWeight(rounded)), rounded

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`x`: [T, hidden]. `ids`: [T] token ids. Returns weights [T, topk] fp32 and experts [T, topk]."""
        logits = self._logits(x)
        if self.table is not None:
            weights, experts = self._route(logits, self.table, ids, self._route_spec)
        else:
            weights, experts = self._route(logits, self.correction, self._route_spec)
        return weights, experts

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """[T, experts] fp32."""
        if self.bf16_weight is None:
            return self.gate(x.float())
        assert self.bf16_matmul is not None
        if x.dtype != torch.bfloat16:
            return F.linear(x.float(), self.bf16_weight.dequantize(), self.gate.bias)
        return self.bf16_matmul.in_fp32(x, self.bf16_weight, self.gate.bias)
