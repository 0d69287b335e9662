"""The work between the fused projection and attention: norms of heads, rotation, and the store to the KV cache.

For every token, with [q | k | v] its projection, head by head:

    q = rope(norm(q));  k = rope(norm(k));  v = value_scale norm(v);  pools[slot] = k / k_scale, v / v_scale
    norm(x) = x / sqrt(sum x^2 + D eps) * weight

each of norm, rotation and scale where the layer has it. Mathematics in fp32; q, k and v are rounded once to the
projection's type, and k and v again to the pool's.
"""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.qk_norm_rope import reference
from allotrope.ops.qk_norm_rope.spec import HeadSpec, Rows

__all__ = ["QK_NORM_ROPE", "HeadSpec", "Rows"]

QK_NORM_ROPE = Op(
    "qk_norm_rope",
    "q = rope(norm(q)); k = rope(norm(k)); k and v go to the KV cache",
    (
        Backend("triton", needs_triton, lazily("allotrope.ops.qk_norm_rope.triton", "rope_store")),
        Backend("reference", runs_anywhere, reference.rope_store),
    ),
)
