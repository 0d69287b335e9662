"""Cases of whole experts: widths of no whole vector, rows of wider ones, biases, clamps."""

from __future__ import annotations

from functools import partial

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.moe_experts import MoeExpertsSpec

EXPERTS, TOPK = 5, 2
SHAPES = {"one vector": (3, 32, 16), "odd": (2, 37, 21)}
ACTIVATIONS = {"silu": GatedActivation(), "clamped": GatedActivation(slope=1.702, limit=2.0, offset=1.0)}


def _make(
    activation: GatedActivation,
    bias: bool,
    tokens: int,
    hidden: int,
    width: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[object, ...]:
    draw = Draw(generator, device)
    x = draw(dtype, tokens, hidden + 5)[:, 5:]
    weights = draw(torch.float32, tokens, TOPK).softmax(-1)
    gate_up = draw(dtype, EXPERTS, 2 * width, hidden) / hidden**0.5
    down = draw(dtype, EXPERTS, hidden, width) / width**0.5
    biases = (draw(dtype, EXPERTS, 2 * width), draw(dtype, EXPERTS, hidden)) if bias else (None, None)
    experts = draw.integers(0, EXPERTS, tokens, TOPK)
    return x, weights, experts, (gate_up, biases[0]), (down, biases[1]), activation


def _spec(hidden: int, width: int, dtype: torch.dtype) -> MoeExpertsSpec:
    return MoeExpertsSpec(hidden, width, dtype)


CASES: Cases = {
    "moe_experts": {
        f"{name}, {how}{', bias' if bias else ''}": OpCase(
            partial(_spec, *shape[1:]), partial(_make, activation, bias, *shape)
        )
        for name, shape in SHAPES.items()
        for how, activation in ACTIVATIONS.items()
        for bias in (False, True)
    }
}
