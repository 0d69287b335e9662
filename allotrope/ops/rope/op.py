"""The operations of rotary position embedding, with their backends."""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.rope import cpu, reference

ROPE_COS_SIN = Op(
    "rope_cos_sin",
    "cos(p f) and sin(p f) of a step's positions p",
    (
        Backend("triton", needs_triton, lazily("allotrope.ops.rope.triton", "rope_cos_sin")),
        Backend("reference", runs_anywhere, reference.rope_cos_sin),
    ),
)
APPLY_ROPE = Op(
    "apply_rope",
    "(x_a, x_b) -> (x_a cos - x_b sin, x_b cos + x_a sin)",
    (
        Backend("cpu", cpu.rejects, cpu.apply_rope),
        Backend("reference", runs_anywhere, reference.apply_rope),
    ),
)
