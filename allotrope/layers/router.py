"""Choosing the experts of each token, and their weights.

Must not know what experts compute. All of it is fp32, and equal on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.kernels.chip import chip_of
from allotrope.layers.build import Build
from allotrope.layers.linear import Linear, has_kernel
from allotrope.layers.parallel import Placement, Section, parameter
from allotrope.ops.device_kernels import device_kernels
from allotrope.ops.matmul.packed_weight import Prepared, prepare_plain
from allotrope.ops.matmul.product import multiply
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
        self.narrow: Prepared | None = None
        self.dtype = build.dtype

    def finish_loading(self) -> None:
        """Let the gate's weight be bf16 where that loses nothing: checkpoints mostly store it so.

        Products of bf16 are exact in fp32, so that logits are as exact, several times as fast for long prompts.
        """
        weight = self.gate.weight
        assert weight is not None
        if self.dtype != torch.bfloat16 or chip_of(weight.device).vendor != "nvidia":
            return
        rounded = weight.data.to(torch.bfloat16)
        if has_kernel(rounded) and torch.equal(rounded.float(), weight.data):
            # The gate's own hook comes after this one, and keeps what it finds.
            self.narrow, weight.data = prepare_plain(rounded), rounded

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
        if self.narrow is None:
            return self.gate(x.float())
        if x.dtype != torch.bfloat16:
            return F.linear(x.float(), self.narrow.codes[0].float(), self.gate.bias)
        logits = torch.empty(len(x), self.spec.experts, dtype=torch.float32, device=x.device)
        return multiply(x, self.narrow, bias=self.gate.bias, out=logits)

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
