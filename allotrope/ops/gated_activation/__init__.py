"""Gates: act(gate) * up of feed-forward blocks, and x * sigmoid(gate) of attention outputs.

Source: Shazeer 2020, "GLU variants improve transformer".
"""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.gated_activation import cpu, reference
from allotrope.ops.gated_activation.spec import Activation, GatedActivation, GatedActivationSpec, SigmoidGateSpec

__all__ = [
    "GATED_ACTIVATION",
    "SIGMOID_GATE",
    "Activation",
    "GatedActivation",
    "GatedActivationSpec",
    "SigmoidGateSpec",
]


def _triton(function: str) -> Backend:
    return Backend("triton", needs_triton, lazily("allotrope.ops.gated_activation.triton", function), quantizes=True)


GATED_ACTIVATION = Op(
    "gated_activation",
    "y = act(gate) * (up + offset)",
    (
        _triton("gated_activation"),
        Backend("cpu", cpu.rejects, cpu.gated_activation),
        Backend("reference", runs_anywhere, reference.gated_activation),
    ),
)
SIGMOID_GATE = Op(
    "sigmoid_gate",
    "y = x * sigmoid(gate)",
    (
        _triton("sigmoid_gate"),
        Backend("reference", runs_anywhere, reference.sigmoid_gate),
    ),
)
