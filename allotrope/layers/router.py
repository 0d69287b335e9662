"""Choosing the experts of each token, and their weights.

Must not know what experts compute. All of it is fp32, and equal on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.linear import Linear
from allotrope.layers.parallel import Placement, Section, parameter
from allotrope.layers.weights import WeightMatmul
from allotrope.ops.device_kernels import device_kernels
from allotrope.ops.matmul import MATMUL, MatmulSpec
from allotrope.ops.matmul.plain import PLAIN, PlainWeight
from allotrope.ops.matmul.weight import Weight
from allotrope.ops.moe_route.cpu import expert_functions

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How `topk` of `experts` are chosen and weighted, from logits = W x (+ b with `bias`) in fp32.

    `score`: what the logits become; softmax over all experts. `correction`: a learned number per expert joins the score
    for the choice only. `groups`: experts come in this many equal groups, of which only the best `top_groups` may be
    chosen from; a group's score is the sum of its best `group_best` experts. `normalize`: weights are divided by their
    sum. `scale`: their factor. `table`: if not 0, the experts are looked up by token id (of that many), not chosen.
    """

    experts: int
    topk: int
    score: Score = "softmax"
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    normalize: bool = True
    scale: float = 1.0
    table: int = 0

    def __post_init__(self) -> None:
        wrong = []
        if not 1 <= self.topk <= self.experts:
            wrong.append(f"topk={self.topk}; allowed: 1 to experts={self.experts}")
        if self.groups < 1 or self.experts % self.groups:
            wrong.append(f"experts={self.experts} is not a multiple of groups={self.groups}")
        elif not 1 <= self.top_groups <= self.groups:
            wrong.append(f"top_groups={self.top_groups}; allowed: 1 to groups={self.groups}")
        elif self.top_groups * (self.experts // self.groups) < self.topk:
            wrong.append(f"top_groups={self.top_groups} of {self.experts // self.groups} experts hold no {self.topk}")
        if wrong:
            raise ValueError("router: " + "; ".join(wrong))


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
        spec = self.spec
        logits = self._logits(x)
        groups = (spec.groups, spec.top_groups, spec.group_best)
        fused = device_kernels("moe_route", logits.device)
        if fused is not None and self.table is not None:
            return fused.looked_up(logits, self.table, ids, spec.score, spec.normalize, spec.scale)
        if fused is not None:
            return fused.route(logits, self.correction, spec.topk, groups, spec.score, spec.normalize, spec.scale)
        compiled = expert_functions(logits.dtype, logits.device)
        if compiled is not None and self.table is None:
            return compiled.route(logits, self.correction, spec.topk, groups, spec.score, spec.normalize, spec.scale)
        scores = _score(logits, spec.score)
        experts = self._choose(scores) if self.table is None else self.table[ids]
        weights = scores.gather(1, experts)
        if spec.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights if spec.scale == 1.0 else weights * spec.scale, experts

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """[T, experts] fp32."""
        if self.bf16_weight is None:
            return self.gate(x.float())
        assert self.bf16_matmul is not None
        if x.dtype != torch.bfloat16:
            return F.linear(x.float(), self.bf16_weight.dequantize(), self.gate.bias)
        return self.bf16_matmul.in_fp32(x, self.bf16_weight, self.gate.bias)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """[T, topk] experts of the highest scores, within the best groups."""
        spec = self.spec
        if self.correction is not None:
            scores = scores + self.correction
        if spec.top_groups < spec.groups:
            grouped = scores.unflatten(-1, (spec.groups, -1))
            best = grouped.topk(min(spec.group_best, grouped.shape[-1]), dim=-1).values.sum(-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(spec.top_groups).indices, True)
            scores = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        return scores.topk(spec.topk, dim=-1).indices


def _score(logits: torch.Tensor, kind: Score) -> torch.Tensor:
    if kind == "softmax":
        return torch.softmax(logits, dim=-1)
    return torch.sigmoid(logits) if kind == "sigmoid" else F.softplus(logits).sqrt()
