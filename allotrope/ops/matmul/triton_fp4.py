"""Sums along 4-bit weights, which become bf16 in registers: four numbers of each word of 16 bits.

    sum_k x[k] w[o, k];  w = value(code) * 2^(exponent - 127)

Number j of each of four runs lies in one word, so that a tile of words gives tiles of whole runs. Which bit of a word
is which (`prepare.fields`) was chosen by what taking them out costs: no bit is moved alone, words side by side come out
as the pairs that tensor cores want, and per 8 weights it takes 12 instructions with those that scale them.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _plain_fp4(field, exponent):
    """bf16 of the numbers whose bits in bf16's places are in `field`, times 2^exponent; any chip."""
    # Sign and magnitude where bf16 has them: the value, subnormal or not, times 2^-126.
    value = ((field & 0x81C0) << 16).to(tl.float32, bitcast=True)
    # Exponents are stored with 126 more, modulo 256.
    power = (((exponent + 130) & 255) << 23).to(tl.float32, bitcast=True)
    return (value * 8.507059173023462e37 * power).to(tl.bfloat16)


@triton.jit
def numbers(words, exponents, HOPPER: tl.constexpr):
    """Words [n, 32] of int16 with four runs' exponents [n, 1] in an int32. Returns the four runs [n, 32] in bf16."""
    if HOPPER:
        # Powers of two in bf16, of runs 0 and 2, of runs 1 and 3: a bf16's exponent begins at bit 7.
        even, odd = (exponents << 7) & 0x7F807F80, (exponents >> 1) & 0x7F807F80
        even, odd = tl.broadcast_to(even, words.shape), tl.broadcast_to(odd, words.shape)
        # Two words at a time. The `lop3` are (a ^ b) & mask.
        a, b, c, d = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 swapped, two, six, four, p, q, r, s;
            .reg .b16 e, f, g, h, i, j, k, l;
            prmt.b32 swapped, $4, 0, 0x2301;
            shl.b32 two, $4, 2;
            shl.b32 six, $4, 6;
            shl.b32 four, swapped, 4;
            and.b32 $0, $4, 0x81C081C0;
            and.b32 $1, four, 0x81C081C0;
            lop3.b32 $2, two, six, 0x81C081C0, 0x28;
            lop3.b32 $3, two, swapped, 0x81C081C0, 0x28;
            mov.b32 {e, g}, $5;
            mov.b32 {i, k}, $6;
            mov.b32 {f, h}, $7;
            mov.b32 {j, l}, $8;
            mov.b32 p, {e, i};
            mov.b32 q, {f, j};
            mov.b32 r, {g, k};
            mov.b32 s, {h, l};
            mul.bf16x2 $0, $0, p;
            mul.bf16x2 $1, $1, q;
            mul.bf16x2 $2, $2, r;
            mul.bf16x2 $3, $3, s;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, even, odd],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        word = words.to(tl.int32) & 0xFFFF
        swapped = ((word & 255) << 8) | (word >> 8)
        a = _plain_fp4(word, exponents)
        b = _plain_fp4(swapped << 4, exponents >> 8)
        c = _plain_fp4((word << 2) ^ (word << 6), exponents >> 16)
        d = _plain_fp4((word << 2) ^ swapped, exponents >> 24)
    return a, b, c, d


@triton.jit
def walk_fp4(
    x, row_mask, values, scales, column, outputs, inputs, padded, begin, stop,
    GATED: tl.constexpr, HOPPER: tl.constexpr, SWAP_AB: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Inputs from `begin` to `stop`, 128 at a time; a step of the compiled loop is BLOCK_K of them. `x`: pointers
    [BLOCK_M, 1], all readable; `row_mask` [BLOCK_M, 1]: those that count. `codes`, `scales`: tiles of the expert; its
    rows from `column` on are the gate weights, with GATED those `outputs` behind them the up weights. Returns the sums
    of the gate weights and of the up weights.
    """
    WIDE: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    each = tl.arange(0, WIDE)
    # Columns behind the last are read as the last: masks would cost more, and nobody keeps what comes of them.
    row = tl.minimum(column + each % BLOCK_N, outputs - 1) + each // BLOCK_N * outputs
    # A tile of 64 rows and 128 inputs has 2048 words and 64 scales, and the next inputs' tile lies behind it.
    first = row // 64 * (padded // 2) + row % 64
    values += first[:, None] * 32
    scales += first[:, None]
    word = tl.arange(0, 32)[None, :]
    depth = tl.arange(0, 128)
    acc = tl.zeros((WIDE, BLOCK_M) if SWAP_AB else (BLOCK_M, WIDE), tl.float32)
    for k in tl.range(begin, stop, 128, loop_unroll_factor=BLOCK_K // 128):
        inside = (k + depth < inputs)[None, :]
        if BLOCK_M <= 64:
            # Experts of few rows fill little of a tile: the rest of it would come as often as the weights do.
            inside = inside & row_mask
        a = tl.load(x + (k + depth)[None, :], mask=inside, other=0.0)
        p, q, r, s = numbers(tl.load(values + k * 16 + word), tl.load(scales + k // 2), HOPPER)
        # [WIDE, 32, 2, 2] -> run by run. Activations are not rounded: weights become what they are.
        w = tl.join(tl.join(p, r), tl.join(q, s)).permute(0, 2, 3, 1).reshape(WIDE, 128).to(a.dtype)
        if SWAP_AB:
            acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    other = acc
    if GATED:
        if SWAP_AB:
            acc, other = acc.reshape(2, BLOCK_N, BLOCK_M).permute(1, 2, 0).split()
        else:
            acc, other = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
    return acc, other
