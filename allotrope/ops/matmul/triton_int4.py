"""Sums along 4-bit integers, which become bf16 in registers: eight of each word of 32 bits, times their group's scale.

sum_k x[k] w[o, k];  w = bf16((q - 8) * scale)
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def int4_weights(words, scales, BLOCK_N: tl.constexpr, GLUON: tl.constexpr):
    """`words`: [BLOCK_N, 16] int32, eight inputs each. `scales`: [BLOCK_N, GROUPS]. Returns [BLOCK_N, 128] bf16."""
    shift = 4 * tl.arange(0, 8)
    values = ((words[:, :, None] >> shift[None, None, :]) & 15) - 8
    values = values.to(tl.float32).reshape(BLOCK_N, GLUON, 128 // GLUON)
    return (values * scales.to(tl.float32)[:, :, None]).reshape(BLOCK_N, 128).to(tl.bfloat16)


@triton.jit
def walk_int4(
    acc, x, row_mask, gate, up, gate_scales, up_scales, column_mask, begin, stop, inputs, GROUP: tl.constexpr,
    GATED: tl.constexpr, SWAP_AB: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Inputs from `begin` to `stop`, 128 at a time. `x`: pointers [BLOCK_M, 1]. `gate`, `up`: of words [BLOCK_N, 1];
    `gate_scales`, `up_scales`: [BLOCK_N]. GROUP: inputs that share a scale, 0 for all. Returns the sums of the gate
    weights and of the up weights.
    """
    GLUON: tl.constexpr = 128 // GROUP if GROUP > 0 and GROUP < 128 else 1
    other = acc
    depth = tl.arange(0, 128)
    word = tl.arange(0, 16)[None, :]
    group = tl.arange(0, GLUON)[None, :]
    for k in range(begin, stop, 128):
        inside = (k + depth < inputs)[None, :]
        a = tl.load(x + (k + depth)[None, :], mask=row_mask & inside, other=0.0)
        at = group
        if GROUP > 0:
            at = group + k // GROUP
        q = tl.load(gate + k // 8 + word, mask=column_mask, other=0)
        s = tl.load(gate_scales[:, None] + at, mask=column_mask, other=0.0)
        w = int4_weights(q, s, BLOCK_N, GLUON).to(a.dtype)
        if SWAP_AB:
            acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            q = tl.load(up + k // 8 + word, mask=column_mask, other=0)
            s = tl.load(up_scales[:, None] + at, mask=column_mask, other=0.0)
            w = int4_weights(q, s, BLOCK_N, GLUON).to(a.dtype)
            if SWAP_AB:
                other = tl.dot(w, tl.trans(a), other, input_precision="ieee")
            else:
                other = tl.dot(a, tl.trans(w), other, input_precision="ieee")
    return acc, other
