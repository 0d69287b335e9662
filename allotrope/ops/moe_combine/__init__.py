"""The weighted sum of experts' outputs, and of what every token gets beside it.

    y[t] = sum over k of weights[t, k] * (results[inverse[t, k]] + bias[experts[t, k]]) + shared[t] * sigmoid(gate[t])

Mathematics in fp32, rounded once; PyTorch and C round before they add `shared`.
"""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.chip import Chip
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.moe_combine import cpu, reference
from allotrope.ops.moe_combine.reference import add_shared
from allotrope.ops.moe_combine.spec import CombineSpec

__all__ = ["MOE_COMBINE", "CombineSpec", "add_shared"]


def _triton_rejects(spec: CombineSpec, chip: Chip) -> list[str]:
    reasons = needs_triton(spec, chip)
    if spec.ranks > 1:
        reasons.append(f"ranks={spec.ranks} (needs 1: it adds the shared expert in the same launch)")
    return reasons


MOE_COMBINE = Op(
    "moe_combine",
    "y = sum of weights * (results[inverse] + bias[experts]) + shared * sigmoid(gate)",
    (
        Backend("triton", _triton_rejects, lazily("allotrope.ops.moe_combine.triton", "combine")),
        Backend("cpu", cpu.rejects, cpu.combine),
        Backend("reference", runs_anywhere, reference.combine),
    ),
)
