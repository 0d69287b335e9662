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
from allotrope.layers.linear import Linear, has_kernel
from allotrope.layers.parallel import Placement, Section, parameter
from allotrope.ops.matmul.packed_weight import Prepared, prepare_plain
from allotrope.ops.matmul.product import multiply
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
            self.correction = parameter((spec.experts,), Placement((section,)), torch.float32, build.device)
        if spec.table:
            placement = Placement((Section("", spec.table),), below=spec.experts)
            self.table = parameter((spec.table, spec.topk), placement, torch.int64, build.device)
        self._route_spec = spec.route
        self._route = build.chooser.choose(HASH_ROUTE if spec.table else MOE_ROUTE, self._route_spec).run
        self.narrow: Prepared | None = None
        self.dtype = build.dtype

    def finish_loading(self) -> None:
        """Let the gate's weight be bf16 where that loses nothing: checkpoints mostly store it so.

        Products of bf16 are exact in fp32, so that logits are as exact, several times as fast for long prompts.
        """
        weight = self.gate.weight
        assert weight is not None
        if self.dtype != torch.bfloat16 or weight.device.type != "cuda" or torch.version.cuda is None:
            return
        rounded = weight.data.to(torch.bfloat16)
        if has_kernel(rounded) and torch.equal(rounded.float(), weight.data):
            # The gate's own hook comes after this one, and keeps what it finds.
            self.narrow, weight.data = prepare_plain(rounded), rounded

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
        if self.narrow is None:
            return self.gate(x.float())
        if x.dtype != torch.bfloat16:
            return F.linear(x.float(), self.narrow.codes[0].float(), self.gate.bias)
        logits = torch.empty(len(x), self.spec.experts, dtype=torch.float32, device=x.device)
        return multiply(x, self.narrow, bias=self.gate.bias, out=logits)
