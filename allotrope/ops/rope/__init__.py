"""Rotary position embedding. For pair i of R rotated dims at position p, with f_i = theta^(-2i/R) before scaling:

    (x_a, x_b) -> (x_a cos(p f_i) - x_b sin(p f_i), x_b cos(p f_i) + x_a sin(p f_i))

Half-split pairs are (i, i + R/2); interleaved pairs are (2i, 2i + 1).
"""

from __future__ import annotations

from allotrope.ops.rope.op import APPLY_ROPE, ROPE_COS_SIN
from allotrope.ops.rope.spec import ApplyRopeSpec, RopeScaling, RopeSpec, Rotation, ScalingKind, inverse_frequencies
from allotrope.ops.rope.table import RopeTable, RopeTables

__all__ = [
    "APPLY_ROPE",
    "ROPE_COS_SIN",
    "ApplyRopeSpec",
    "RopeScaling",
    "RopeSpec",
    "RopeTable",
    "RopeTables",
    "Rotation",
    "ScalingKind",
    "inverse_frequencies",
]
