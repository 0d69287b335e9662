"""The gates in PyTorch: what kernels are held against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from allotrope.ops.gated_activation.spec import Activation, GatedActivation


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The named activation, elementwise."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


def gated_activation(gate_up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """act(gate) * (up + offset). `gate_up`: [..., 2 * width], gate first. Returns [..., width] in the same type."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.offset:
        up = up + activation.offset
    if activation.slope != 1.0:
        return gate * torch.sigmoid(activation.slope * gate) * up
    return activate(gate, activation.activation).mul_(up)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate). `x`, `gate`: [T, width]. Returns [T, width]."""
    return x * torch.sigmoid(gate)
