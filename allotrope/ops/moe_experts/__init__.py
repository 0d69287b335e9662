"""Whole experts for few tokens: both products, the activation and the weighted sum, without sorting by expert.

    y[t] = sum over k of weights[t, k] * (down_e act(gate_up_e x[t] + b_e) + c_e), e = experts[t, k]

On a CPU only: each pair of token and expert reads the expert's weights anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from allotrope.kernels.backend import Backend, Op, runs_anywhere
from allotrope.ops.moe_experts import cpu, reference
from allotrope.ops.moe_experts.spec import MoeExpertsSpec

__all__ = ["MOE_EXPERTS", "MoeExpertsBackend", "MoeExpertsSpec"]


@dataclass(frozen=True, kw_only=True)
class MoeExpertsBackend(Backend):
    """`max_pairs`: of token and expert, up to which it costs less than sorting them by expert."""

    max_pairs: int


MOE_EXPERTS = Op(
    "moe_experts",
    "y = sum of weights * expert(x), for few tokens",
    (
        MoeExpertsBackend("cpu", cpu.rejects, cpu.moe_experts, max_pairs=32),
        MoeExpertsBackend("reference", runs_anywhere, reference.moe_experts, max_pairs=0),
    ),
)
