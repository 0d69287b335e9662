"""The weighted sum of experts' outputs, and of what every token gets beside it.

    y[t] = sum over k of weights[t, k] * (results[inverse[t, k]] + bias[experts[t, k]]) + shared[t] * sigmoid(gate[t])

Where only some experts are here, choices of the others count nothing.

Mathematics in fp32, rounded once; PyTorch and C round before they add `shared`.
"""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.moe_combine import cpu, reference
from allotrope.ops.moe_combine.reference import add_shared
from allotrope.ops.moe_combine.spec import CombineSpec

__all__ = ["MOE_COMBINE", "CombineSpec", "add_shared"]


MOE_COMBINE = Op(
    "moe_combine",
    "y = sum of weights * (results[inverse] + bias[experts]) + shared * sigmoid(gate)",
    (
        Backend("triton", needs_triton, lazily("allotrope.ops.moe_combine.triton", "combine")),
        Backend("cpu", cpu.rejects, cpu.combine),
        Backend("reference", runs_anywhere, reference.combine),
    ),
)
