"""Cases of the sum: with and without biases, a shared expert and its gate; more choices than are read at once."""

from __future__ import annotations

from functools import partial

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.moe_combine import CombineSpec

EXPERTS = 6
JOINED: dict[str, frozenset[str]] = {
    "alone": frozenset(),
    "bias": frozenset({"bias"}),
    "shared": frozenset({"shared"}),
    "bias and gated shared": frozenset({"bias", "shared", "gate"}),
    "experts of a rank": frozenset({"bias", "held"}),
}
SHAPES = ((5, 3, 40), (1, 1, 300), (3, 13, 20))


# Experts of a rank; rows of the others hold anything.
HELD = 4


def _make(
    joined: frozenset[str],
    tokens: int,
    topk: int,
    hidden: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[object, ...]:
    draw = Draw(generator, device)
    pairs = tokens * topk
    results, inverse = draw(dtype, pairs, hidden), draw.permutation(pairs)
    weights = draw(torch.float32, tokens, topk).softmax(-1)
    experts = draw.integers(0, EXPERTS, tokens, topk)
    bias = draw(dtype, EXPERTS, hidden) if "bias" in joined else None
    shared = draw(dtype, tokens, hidden + 3)[:, 3:] if "shared" in joined else None
    gate = draw(dtype, tokens, 1) if "gate" in joined else None
    held = HELD if "held" in joined else None
    if held is not None:
        results[inverse[experts.flatten() >= held]] = 1e6
    return results, weights, inverse, experts, dtype, bias, shared, gate, held


def _spec(hidden: int, dtype: torch.dtype) -> CombineSpec:
    return CombineSpec(hidden, dtype)


CASES: Cases = {
    "moe_combine": {
        f"{name}, {shape}": OpCase(partial(_spec, shape[-1]), partial(_make, joined, *shape))
        for name, joined in JOINED.items()
        for shape in SHAPES
    }
}
