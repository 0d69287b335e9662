"""The decode kernel for an FP8 KV cache and queries of a 16-bit type.

Owns: reading float8_e4m3fn values in pairs. Must not know: how chunks are merged.

The tensor cores multiply fp16. Moving the bits of an e4m3 value gives 2^-8 of it in fp16, exactly. The two values of a
16-bit word are an even and an odd dim of a key, so that tiles are loaded like those of any 16-bit type. Each query row
is divided by a power of two, so that it fits into fp16.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from allotrope.attention.mha.triton_decode import kv_chunks, pages_of_block
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_least, higher_of, highest, largest_of
from allotrope.kernels.softmax import LOG2E, LOWEST, logits_to_base_2


@triton.jit
def _fp16_pairs(pairs, NVIDIA: tl.constexpr):
    """The even and odd e4m3 values of [N, D / 2] words as fp16, times 2^-8.

    The bits of NaN become 480 * 2^-8, the only value that carries into bit 14 when one unit of the e4m3 mantissa is
    added. With that bit set, it is NaN in fp16 as well.
    """
    if NVIDIA:
        # The assembly does the same for two words at once.
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


@pdl_jit(do_not_specialize=["window", "num_splits", "capacity"])
def decode_kernel(
    q, k_pool, v_pool, table, seq_lens, sinks, partial, lse, out,
    scale, softcap, v_scale, window, num_splits, capacity,
    q_t, q_h, kp_p, kp_s, kp_g, vp_p, vp_s, vp_g, table_b, out_t, out_h,
    H: tl.constexpr, Q_PER_KV: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, LONG_CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, VALUES_ARE_KEYS: tl.constexpr, DIRECT: tl.constexpr,
    NVIDIA: tl.constexpr,
):  # fmt: skip
    """As `triton_decode.decode_kernel`. `k_pool`, `v_pool` and their strides are those of int16 views."""
    gdc_wait()
    gdc_launch_dependents()
    split = tl.program_id(0)
    kv_head = tl.program_id(1) // tl.cdiv(Q_PER_KV, BLOCK_H)
    request = tl.program_id(2).to(tl.int64)
    offs_h = tl.program_id(1) % tl.cdiv(Q_PER_KV, BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * Q_PER_KV + offs_h
    mask_h = offs_h < Q_PER_KV
    kv_len = tl.load(seq_lens + request)
    first_key, aligned_key, chunk_size, num_chunks = kv_chunks(kv_len, window, BLOCK_N, CHUNK, LONG_CHUNK, MAX_CHUNKS)
    offs_d, offs_dv = tl.arange(0, BLOCK_D // 2), tl.arange(0, BLOCK_DV // 2)
    mask_d, mask_dv = offs_d < D // 2, offs_dv < DV // 2
    q_ptrs = q + request * q_t + head[:, None] * q_h + 2 * offs_d[None, :]
    q_even = tl.load(q_ptrs, mask=mask_h[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
    q_odd = tl.load(q_ptrs + 1, mask=mask_h[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
    q_absmax = higher_of(largest_of(q_even, 1), largest_of(q_odd, 1))
    q_scale = tl.exp2(tl.floor(tl.log2(at_least(q_absmax, 1.0e-30))))
    q_even = (q_even / q_scale[:, None]).to(tl.float16)
    q_odd = (q_odd / q_scale[:, None]).to(tl.float16)
    q_scale = q_scale * 256.0
    table += request * table_b
    k_pool += kv_head * kp_g
    v_pool += kv_head * vp_g
    out_ptrs = out + request * out_t + head[:, None] * out_h + 2 * offs_dv[None, :]
    mask_o = mask_h[:, None] & mask_dv[None, :]
    if DIRECT:
        zeros = tl.zeros([BLOCK_H, BLOCK_DV // 2], out.dtype.element_ty)
        tl.store(out_ptrs, zeros, mask=mask_o & (num_chunks == 0))
        tl.store(out_ptrs + 1, zeros, mask=mask_o & (num_chunks == 0))
    for chunk in range(split, num_chunks, num_splits):
        begin = aligned_key + chunk * chunk_size
        end = tl.minimum(begin + chunk_size, kv_len)
        m_i = tl.full([BLOCK_H], LOWEST, tl.float32)
        l_i = tl.zeros([BLOCK_H], tl.float32)
        acc_even = tl.zeros([BLOCK_H, BLOCK_DV // 2], tl.float32)
        acc_odd = tl.zeros([BLOCK_H, BLOCK_DV // 2], tl.float32)
        for start in range(begin, end, BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)
            mask_n = (offs_n >= first_key) & (offs_n < end)
            page, page_offset, mask_kv = pages_of_block(table, start, mask_n, PAGE, BLOCK_N)
            kv_offset = page * kp_p + page_offset * kp_s
            mask = mask_kv[:, None]
            if 2 * (D // 2) != BLOCK_D:
                mask = mask & mask_d[None, :]
            k_even, k_odd = _fp16_pairs(
                tl.load(k_pool + kv_offset[:, None] + offs_d[None, :], mask=mask, other=0), NVIDIA
            )
            logits = tl.dot(q_even, tl.trans(k_even))
            logits = tl.dot(q_odd, tl.trans(k_odd), logits) * q_scale[:, None]
            logits = tl.where(mask_n[None, :], logits_to_base_2(logits, scale, softcap, SOFTCAP), float("-inf"))
            m_new = higher_of(m_i, highest(logits, 1))
            p = tl.exp2(logits - m_new[:, None])
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, 1)
            m_i = m_new
            if VALUES_ARE_KEYS:
                v_even, v_odd = k_even, k_odd
            else:
                kv_offset = page * vp_p + page_offset * vp_s
                mask = mask_kv[:, None]
                if 2 * (DV // 2) != BLOCK_DV:
                    mask = mask & mask_dv[None, :]
                v_even, v_odd = _fp16_pairs(
                    tl.load(v_pool + kv_offset[:, None] + offs_dv[None, :], mask=mask, other=0), NVIDIA
                )
            p = p.to(tl.float16)
            acc_even = tl.dot(p, v_even, acc_even * alpha[:, None])
            acc_odd = tl.dot(p, v_odd, acc_odd * alpha[:, None])
        acc_even = acc_even * (256.0 * v_scale / l_i)[:, None]
        acc_odd = acc_odd * (256.0 * v_scale / l_i)[:, None]
        chunk_lse = m_i + tl.log2(l_i)
        if DIRECT:
            if SINKS:
                sink = tl.load(sinks + head, mask=mask_h, other=0.0).to(tl.float32) * LOG2E
                m_new = higher_of(chunk_lse, sink)
                alpha = tl.exp2(chunk_lse - m_new)
                denominator = alpha + tl.exp2(sink - m_new)
                acc_even = acc_even * alpha[:, None] / denominator[:, None]
                acc_odd = acc_odd * alpha[:, None] / denominator[:, None]
            tl.store(out_ptrs, acc_even.to(out.dtype.element_ty), mask=mask_o)
            tl.store(out_ptrs + 1, acc_odd.to(out.dtype.element_ty), mask=mask_o)
        else:
            lse_offset = (request * H + head) * capacity + chunk
            tl.store(lse + lse_offset, chunk_lse, mask=mask_h)
            partial_ptrs = partial + lse_offset[:, None] * DV + 2 * offs_dv[None, :]
            tl.store(partial_ptrs, acc_even, mask=mask_o)
            tl.store(partial_ptrs + 1, acc_odd, mask=mask_o)
