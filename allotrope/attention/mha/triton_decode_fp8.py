"""The decode kernel for FP8 rows and queries of two bytes.

Owns: reading rows of float8_e4m3fn as pairs. Must not know: how chunks are merged.

A tensor core multiplies fp16. An e4m3 number becomes one by moving its bits, as 2^-8 of itself, exactly; and the two
numbers of a 16-bit word are the even and the odd dims of a row, so that tiles are moved like those of any 16-bit type.
Queries are scaled by a power of two, row by row, so that they fit.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from allotrope.attention.mha.triton_decode import kv_chunks
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_least, higher_of, highest, largest_of
from allotrope.kernels.softmax import LOG2E, LOWEST, logits_to_base_2


@triton.jit
def _unpacked(pairs, NVIDIA: tl.constexpr):
    """The even and odd numbers of [N, D / 2] words, times 2^-8.

    The code for "not a number" moves to 480 * 2^-8, the only one to carry into bit 14 when a step of e4m3 is added;
    with that bit set, it is not a number in fp16 either.
    """
    if NVIDIA:
        # The same for two words at once.
        even = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            and.b32 a, $1, 0x007F007F;
            shl.b32 a, a, 7;
            add.u32 c, a, 0x00800080;
            shl.b32 b, $1, 8;
            lop3.b32 a, b, 0x80008000, a, 0xEA;
            lop3.b32 $0, c, 0x40004000, a, 0xEA;
            }""",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, c;
            shr.b32 a, $1, 1;
            and.b32 a, a, 0x3F803F80;
            add.u32 c, a, 0x00800080;
            lop3.b32 a, $1, 0x80008000, a, 0xEA;
            lop3.b32 $0, c, 0x40004000, a, 0xEA;
            }""",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        return even, odd
    even, odd = (pairs & 0x7F) << 7, (pairs >> 1) & 0x3F80
    even |= ((even + 0x80) & 0x4000) | ((pairs << 8) & -32768)
    odd |= ((odd + 0x80) & 0x4000) | (pairs & -32768)
    return even.to(tl.int16).to(tl.float16, bitcast=True), odd.to(tl.int16).to(tl.float16, bitcast=True)


@pdl_jit(do_not_specialize=["window", "splits", "capacity"])
def decode_kernel(
    q, k_pool, v_pool, table, seq_lens, sinks, partial, lse, out,
    scale, softcap, v_scale, window, splits, capacity,
    q_t, q_h, kp_p, kp_s, kp_g, vp_p, vp_s, vp_g, table_b, out_t, out_h,
    H: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, MOST: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, DIRECT: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """As `triton_decode.decode_kernel`. `k_pool`, `v_pool`: int16 views, and their strides."""
    gdc_wait()
    gdc_launch_dependents()
    split = tl.program_id(0)
    group = tl.program_id(1) // tl.cdiv(R, BLOCK_H)
    request = tl.program_id(2).to(tl.int64)
    inner = tl.program_id(1) % tl.cdiv(R, BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = group * R + inner
    real = inner < R
    n = tl.load(seq_lens + request)
    first, aligned, size, chunks = kv_chunks(n, window, BLOCK_N, CHUNK, MOST)
    word, value_word = tl.arange(0, BLOCK_D // 2), tl.arange(0, BLOCK_DV // 2)
    in_dim, in_value = word < D // 2, value_word < DV // 2
    here = q + request * q_t + head[:, None] * q_h + 2 * word[None, :]
    q_even = tl.load(here, mask=real[:, None] & in_dim[None, :], other=0.0).to(tl.float32)
    q_odd = tl.load(here + 1, mask=real[:, None] & in_dim[None, :], other=0.0).to(tl.float32)
    largest = higher_of(largest_of(q_even, 1), largest_of(q_odd, 1))
    power = tl.exp2(tl.floor(tl.log2(at_least(largest, 1.0e-30))))
    q_even = (q_even / power[:, None]).to(tl.float16)
    q_odd = (q_odd / power[:, None]).to(tl.float16)
    power = power * 256.0
    table += request * table_b
    k_pool += group * kp_g
    v_pool += group * vp_g
    even_out = out + request * out_t + head[:, None] * out_h + 2 * value_word[None, :]
    mask_out = real[:, None] & in_value[None, :]
    if DIRECT:
        nothing = tl.zeros([BLOCK_H, BLOCK_DV // 2], out.dtype.element_ty)
        tl.store(even_out, nothing, mask=mask_out & (chunks == 0))
        tl.store(even_out + 1, nothing, mask=mask_out & (chunks == 0))
    for chunk in range(split, chunks, splits):
        begin = aligned + chunk * size
        end = tl.minimum(begin + size, n)
        top = tl.full([BLOCK_H], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        even = tl.zeros([BLOCK_H, BLOCK_DV // 2], tl.float32)
        odd = tl.zeros([BLOCK_H, BLOCK_DV // 2], tl.float32)
        for start in range(begin, end, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            seen = (key >= first) & (key < end)
            if PAGE % BLOCK_N == 0:
                page = tl.load(table + start // PAGE).to(tl.int64)
                held = seen & (page >= 0)
                offset = start % PAGE + tl.arange(0, BLOCK_N)
            else:
                page = tl.load(table + key // PAGE, mask=seen, other=-1).to(tl.int64)
                held = page >= 0
                offset = key % PAGE
            row = page * kp_p + offset * kp_s
            mask = held[:, None]
            if 2 * (D // 2) != BLOCK_D:
                mask = mask & in_dim[None, :]
            k_even, k_odd = _unpacked(tl.load(k_pool + row[:, None] + word[None, :], mask=mask, other=0), NVIDIA)
            logits = tl.dot(q_even, tl.trans(k_even))
            logits = tl.dot(q_odd, tl.trans(k_odd), logits) * power[:, None]
            logits = tl.where(seen[None, :], logits_to_base_2(logits, scale, softcap, SOFTCAP), float("-inf"))
            higher = higher_of(top, highest(logits, 1))
            weights = tl.exp2(logits - higher[:, None])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(weights, 1)
            top = higher
            if SHARED:
                v_even, v_odd = k_even, k_odd
            else:
                row = page * vp_p + offset * vp_s
                mask = held[:, None]
                if 2 * (DV // 2) != BLOCK_DV:
                    mask = mask & in_value[None, :]
                v_even, v_odd = _unpacked(
                    tl.load(v_pool + row[:, None] + value_word[None, :], mask=mask, other=0), NVIDIA
                )
            weights = weights.to(tl.float16)
            even = tl.dot(weights, v_even, even * fade[:, None])
            odd = tl.dot(weights, v_odd, odd * fade[:, None])
        even = even * (256.0 * v_scale / total)[:, None]
        odd = odd * (256.0 * v_scale / total)[:, None]
        level = top + tl.log2(total)
        if DIRECT:
            if SINKS:
                sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
                higher = higher_of(level, sink)
                weight = tl.exp2(level - higher)
                share = weight + tl.exp2(sink - higher)
                even = even * weight[:, None] / share[:, None]
                odd = odd * weight[:, None] / share[:, None]
            tl.store(even_out, even.to(out.dtype.element_ty), mask=mask_out)
            tl.store(even_out + 1, odd.to(out.dtype.element_ty), mask=mask_out)
        else:
            place = (request * H + head) * capacity + chunk
            tl.store(lse + place, level, mask=real)
            to = partial + place[:, None] * DV + 2 * value_word[None, :]
            tl.store(to, even, mask=mask_out)
            tl.store(to + 1, odd, mask=mask_out)
