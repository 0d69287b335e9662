"""Cases of the norms: heads cut out of wider rows, sizes of no power of 2, sums that `floor` counts in."""

from __future__ import annotations

from functools import partial

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.rms_norm import RMSNormSpec
from allotrope.ops.rms_norm.reference import GateActivation

FLOOR = 0.25


def _norm(size: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    draw = Draw(generator, device)
    return draw(dtype, 7, 5, size)[:, 1:4], draw(torch.float32, size), FLOOR


def _add(
    inner: bool, scale: bool, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    draw = Draw(generator, device)
    x, residual = draw(dtype, 7, 2 * 72)[:, :72], draw(dtype, 7, 72)
    weight, inner_weight = draw(torch.float32, 72), draw(torch.float32, 72) if inner else None
    return x, residual, weight, FLOOR, inner_weight, draw(dtype, 1) if scale else None


def _gated(
    activation: GateActivation, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    draw = Draw(generator, device)
    x, gate = draw(dtype, 7, 3, 32), 4 * draw(dtype, 7, 3 * 32 + 5)[:, 5:]
    return x, draw(torch.float32, 32), FLOOR, gate, activation


CASES: Cases = {
    "rms_norm": {f"size {size}": OpCase(partial(RMSNormSpec, size), partial(_norm, size)) for size in (8, 64, 577)},
    "add_rms_norm": {
        "plain": OpCase(partial(RMSNormSpec, 72), partial(_add, False, False)),
        "normed before": OpCase(partial(RMSNormSpec, 72), partial(_add, True, False)),
        "normed before and scaled": OpCase(partial(RMSNormSpec, 72), partial(_add, True, True)),
    },
    "gated_rms_norm": {
        "silu": OpCase(partial(RMSNormSpec, 32), partial(_gated, "silu")),
        "sigmoid": OpCase(partial(RMSNormSpec, 32), partial(_gated, "sigmoid")),
    },
}
