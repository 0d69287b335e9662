"""What a router computes, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]


@dataclass(frozen=True, kw_only=True)
class RouteSpec:
    """How `topk` of `experts` are chosen and weighted, from logits in fp32.

    `score`: what the logits become; softmax over all experts. `correction`: a learned number per expert joins the score
    for the choice only. `groups`: experts come in this many equal groups, of which only the best `top_groups` may be
    chosen from; a group's score is the sum of its best `group_best` experts. `normalize`: weights are divided by their
    sum. `scale`: their factor.
    """

    experts: int
    topk: int
    score: Score = "softmax"
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    normalize: bool = True
    scale: float = 1.0

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
