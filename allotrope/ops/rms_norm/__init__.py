"""Root-mean-square norm over the last dimension, alone, after a residual sum, and before a gate.

    norm(x) = x / sqrt(sum x^2 + floor) * weight

With floor = size * eps and weight = sqrt(size) * w that is x / sqrt(mean(x^2) + eps) * w. Mathematics in fp32, rounded
once. Source: Zhang and Sennrich 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.rms_norm import cpu, reference


@dataclass(frozen=True)
class RMSNormSpec:
    """`size`: of the last dimension. `dtype`: of what is normed."""

    size: int
    dtype: torch.dtype


def _triton(function: str) -> Backend:
    run: Any = lazily("allotrope.ops.rms_norm.triton", function)
    return Backend("triton", needs_triton, run, quantizes=True)


RMS_NORM = Op(
    "rms_norm",
    "y = norm(x)",
    (
        _triton("rms_norm"),
        Backend("cpu", cpu.rejects, cpu.rms_norm),
        Backend("reference", runs_anywhere, reference.rms_norm),
    ),
)
ADD_RMS_NORM = Op(
    "add_rms_norm",
    "s = (residual + x) * scale; y = norm(s)",
    (
        _triton("add_rms_norm"),
        Backend("cpu", cpu.rejects, cpu.add_rms_norm),
        Backend("reference", runs_anywhere, reference.add_rms_norm),
    ),
)
GATED_RMS_NORM = Op(
    "gated_rms_norm",
    "y = norm(x) * silu(gate), or sigmoid(gate)",
    (
        _triton("gated_rms_norm"),
        Backend("cpu", cpu.rejects, cpu.gated_rms_norm),
        Backend("reference", runs_anywhere, reference.gated_rms_norm),
    ),
)
