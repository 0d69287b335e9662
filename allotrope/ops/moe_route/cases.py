"""Cases of routing: rows cut out of wider ones, numbers of experts of no power of 2, groups."""

from __future__ import annotations

from functools import partial

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.moe_route import RouteSpec

ROUTERS = {
    "softmax": RouteSpec(experts=12, topk=3),
    "corrected": RouteSpec(experts=37, topk=5, correction=True, scale=2.0),
    "not normalized": RouteSpec(experts=12, topk=3, normalize=False, scale=4.0),
    "best of groups": RouteSpec(experts=160, topk=6, groups=8, top_groups=3, group_best=1, normalize=False),
    "sigmoid in groups": RouteSpec(
        experts=12, topk=4, score="sigmoid", correction=True, groups=3, top_groups=2, scale=2.5
    ),
    "square root of softplus": RouteSpec(experts=12, topk=2, score="sqrt_softplus", correction=True),
    "all": RouteSpec(experts=12, topk=12),
}
HASHED = {
    "softmax": RouteSpec(experts=13, topk=6, scale=1.5),
    "square root of softplus": RouteSpec(experts=13, topk=2, score="sqrt_softplus", normalize=False),
}
VOCABULARY = 50


def _spec(spec: RouteSpec, dtype: torch.dtype) -> RouteSpec:
    return spec


def _route(spec: RouteSpec, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    draw = Draw(generator, device)
    logits = 3 * draw(dtype, 7, spec.experts + 5)[:, 3 : 3 + spec.experts]
    return logits, draw(dtype, spec.experts) if spec.correction else None, spec


def _hash_route(
    spec: RouteSpec, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    draw = Draw(generator, device)
    table = draw(dtype, VOCABULARY, spec.experts).argsort(1)[:, : spec.topk].contiguous()
    return draw(dtype, 5, spec.experts), table, draw.integers(0, VOCABULARY, 5), spec


CASES: Cases = {
    "moe_route": {
        name: OpCase(partial(_spec, spec), partial(_route, spec), dtypes=(torch.float32,))
        for name, spec in ROUTERS.items()
    },
    "hash_route": {
        name: OpCase(partial(_spec, spec), partial(_hash_route, spec), dtypes=(torch.float32,))
        for name, spec in HASHED.items()
    },
}
