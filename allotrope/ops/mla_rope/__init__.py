"""Rotation of latent attention's queries and of the one rope key that all heads share, which may be normed first.

The indexer of sparse attention has the same form: its queries, and one key that a LayerNorm comes before.
"""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.chip import Chip
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.mla_rope import cpu, reference
from allotrope.ops.mla_rope.spec import LayerNorm, MlaRopeSpec

__all__ = ["MLA_ROPE", "LayerNorm", "MlaRopeSpec"]


def _rejects(spec: MlaRopeSpec, chip: Chip) -> list[str]:
    return needs_triton(spec, chip) + (["rope=None (needs a rotation)"] if spec.rope is None else [])


MLA_ROPE = Op(
    "mla_rope",
    "rotated heads of q, then rotated norm(k)",
    (
        Backend("triton", _rejects, lazily("allotrope.ops.mla_rope.triton", "mla_rope")),
        Backend("cpu", cpu.rejects, cpu.mla_rope),
        Backend("reference", runs_anywhere, reference.mla_rope),
    ),
)
