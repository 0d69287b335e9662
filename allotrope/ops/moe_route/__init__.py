"""Choosing the experts of each token, and their weights: top-k of the router's scores, or by token id.

    experts[t] = topk(score(logits[t]) + correction), within the best groups; or table[ids[t]]
    weights[t] = score(logits[t])[experts[t]], over their sum if they are normalized, times the scale

Mathematics in fp32. Sources: Shazeer et al. 2017 (top-k); DeepSeek-V3 (groups, correction); Roller et al. 2021 (hash).
"""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.moe_route import cpu, reference
from allotrope.ops.moe_route.spec import RouteSpec, Score

__all__ = ["HASH_ROUTE", "MOE_ROUTE", "RouteSpec", "Score"]

MOE_ROUTE = Op(
    "moe_route",
    "weights, experts = topk(score(logits) + correction)",
    (
        Backend("triton", needs_triton, lazily("allotrope.ops.moe_route.triton", "route")),
        Backend("cpu", cpu.rejects, cpu.route),
        Backend("reference", runs_anywhere, reference.route),
    ),
)
HASH_ROUTE = Op(
    "hash_route",
    "experts = table[ids]; weights = score(logits)[experts]",
    (
        Backend("triton", needs_triton, lazily("allotrope.ops.moe_route.triton", "hash_route")),
        Backend("reference", runs_anywhere, reference.hash_route),
    ),
)
