"""Cases of the gates: rows cut out of wider ones, widths that fill no block and no vector, values beyond the limit."""

from __future__ import annotations

from functools import partial

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.gated_activation import GatedActivation, GatedActivationSpec, SigmoidGateSpec

ACTIVATIONS = {
    "silu": GatedActivation(),
    "gelu": GatedActivation(activation="gelu_tanh"),
    "clamped": GatedActivation(limit=3.0),
    "clamped with slope and offset": GatedActivation(slope=1.702, limit=1.0, offset=1.0),
}
WIDTHS = (4, 112, 1100)


def _gate_up(
    activation: GatedActivation, width: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    return 2 * Draw(generator, device)(dtype, 7, 2 * width + 8)[:, 8:], activation


def _x_and_gate(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    draw = Draw(generator, device)
    return draw(dtype, 3, 200)[:, 20:150], draw(dtype, 3, 300)[:, :130]


CASES: Cases = {
    "gated_activation": {
        f"{name}, width {width}": OpCase(partial(GatedActivationSpec, activation), partial(_gate_up, activation, width))
        for name, activation in ACTIVATIONS.items()
        for width in WIDTHS
    },
    "sigmoid_gate": {"plain": OpCase(SigmoidGateSpec, _x_and_gate)},
}
