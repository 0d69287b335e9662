"""Routing in PyTorch: what kernels are held against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from allotrope.ops.moe_route.spec import RouteSpec, Score


def route(logits: torch.Tensor, correction: torch.Tensor | None, spec: RouteSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of the highest score + correction, within the best groups, and their weights.

    `logits`: [T, E] fp32. `correction`: [E] fp32. Returns weights [T, topk] fp32 and experts [T, topk] int64, best
    first.
    """
    scores = _score(logits, spec.score)
    return _weigh(scores, topk_experts(scores, correction, spec), spec)


def hash_route(
    logits: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, spec: RouteSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route`, with the experts looked up by token id. `table`: [V, topk] int64. `ids`: [T]."""
    return _weigh(_score(logits, spec.score), table[ids], spec)


def topk_experts(scores: torch.Tensor, correction: torch.Tensor | None, spec: RouteSpec) -> torch.Tensor:
    """[T, topk] experts of the highest `scores` [T, E] + `correction`, within the best groups."""
    if correction is not None:
        scores = scores + correction
    if spec.top_groups < spec.groups:
        grouped = scores.unflatten(-1, (spec.groups, -1))
        best = grouped.topk(min(spec.group_best, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(spec.top_groups).indices, True)
        scores = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    return scores.topk(spec.topk, dim=-1).indices


def _weigh(scores: torch.Tensor, experts: torch.Tensor, spec: RouteSpec) -> tuple[torch.Tensor, torch.Tensor]:
    weights = scores.gather(1, experts)
    if spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights if spec.scale == 1.0 else weights * spec.scale, experts


def _score(logits: torch.Tensor, kind: Score) -> torch.Tensor:
    if kind == "softmax":
        return torch.softmax(logits, dim=-1)
    return torch.sigmoid(logits) if kind == "sigmoid" else F.softplus(logits).sqrt()
