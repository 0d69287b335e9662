"""Hyper-connections: N residual streams per token, mixed around every sublayer by weights made from the streams.

With v = flatten(X) of the streams X [N, hidden], and m = RMSNorm(v) fn^T, without a norm weight, all in fp32:

    pre_i  = sigmoid(m_i * scale_0 + base_i) + eps                       i < N
    post_j = 2 sigmoid(m_(N+j) * scale_1 + base_(N+j))                   j < N
    C      = sinkhorn(softmax over rows of (m_2N.. * scale_2 + base_2N..)[N, N] + eps)
    x      = sum_i pre_i X_i               what the sublayer reads
    X'_j   = post_j y + sum_i C_ij X_i     y is what the sublayer returns

Sinkhorn makes C nearly doubly stochastic: columns first, then rows and columns in turn, eps in every denominator.
Source: Xie et al. 2026 (manifold-constrained hyper-connections); DeepSeek-AI 2026, "DeepSeek-V4", section 2.2, whose
code calls the two halves hc_pre and hc_post.
"""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.chip import Chip
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.hyper_connection import cpu, reference
from allotrope.ops.hyper_connection.spec import HyperConnectionSpec

__all__ = ["HC_POST", "HC_PRE", "HyperConnectionSpec"]


def _rejects(spec: HyperConnectionSpec, chip: Chip) -> list[str]:
    reasons = needs_triton(spec, chip)
    if spec.streams & (spec.streams - 1):
        reasons.append(f"streams={spec.streams} (needs a power of 2)")
    return reasons


HC_PRE = Op(
    "hc_pre",
    "x = sum_i pre_i X_i, and post and C of the same streams X",
    (
        Backend("triton", _rejects, lazily("allotrope.ops.hyper_connection.triton", "hc_pre")),
        Backend("cpu", cpu.rejects, cpu.hc_pre),
        Backend("reference", runs_anywhere, reference.hc_pre),
    ),
)
HC_POST = Op(
    "hc_post",
    "X'_j = post_j y + sum_i C_ij X_i",
    (
        Backend("triton", _rejects, lazily("allotrope.ops.hyper_connection.triton", "hc_post")),
        Backend("reference", runs_anywhere, reference.hc_post),
    ),
)
