"""Soft-capped logits: y = cap tanh(x / cap)."""

from __future__ import annotations

from dataclasses import dataclass

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.softcap import reference


@dataclass(frozen=True)
class SoftcapSpec:
    """`cap`: bound of the logits' absolute values."""

    cap: float


SOFTCAP = Op(
    "softcap",
    "y = cap * tanh(x / cap), in fp32",
    (
        Backend("triton", needs_triton, lazily("allotrope.ops.softcap.triton", "softcap")),
        Backend("reference", runs_anywhere, reference.softcap),
    ),
)
