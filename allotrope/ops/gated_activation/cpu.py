"""The gated activation in C (`cpu.c`)."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from allotrope.kernels.c.function import CFunction, c_reasons
from allotrope.kernels.chip import Chip
from allotrope.ops.gated_activation import reference
from allotrope.ops.gated_activation.spec import GatedActivation, GatedActivationSpec

SOURCE = Path(__file__).with_name("cpu.c")
# Numbers of a vector in C; widths that are no multiple of it go to the reference.
LANES = 16


def rejects(spec: GatedActivationSpec, chip: Chip) -> list[str]:
    return c_reasons(SOURCE, spec.dtype, chip)


@functools.cache
def _gated_activation(dtype: torch.dtype) -> CFunction:
    return CFunction(SOURCE, "gated_activation", dtype, "ppllllfff")


def gated_activation(gate_up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """As `reference.gated_activation`, which runs what is no matrix, widths of no whole vectors and strided columns."""
    if gate_up.dim() != 2 or gate_up.stride(1) != 1 or gate_up.shape[1] % (2 * LANES):
        return reference.gated_activation(gate_up, activation)
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    _gated_activation(gate_up.dtype)(out, gate_up, tokens, width, gate_up.stride(0), *activation.compiled)
    return out
