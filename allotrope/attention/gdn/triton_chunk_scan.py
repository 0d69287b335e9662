"""The inter-chunk recurrence: the state from chunk to chunk, and the output.

With S the state before a chunk, E = V - e^G K S and D = Akk_inv E (see `triton_wy`):

    O = e^G Q S + Aqk D          S <- e^(G_last) S + (e^(G_last - G) K)^T D

A program owns BLOCK_V value channels of one value head of one request, and iterates over its chunks. It holds S
transposed, so that S, E and D stay in registers between the products. Only q, k, v and the matrices of `triton_wy` are
loaded, one chunk ahead.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton.language as tl

from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import no_pdl_jit
from allotrope.kernels.tiles import next_power_of_2


# Without programmatic dependent launch: its few long programs would start beside the last ones of the previous kernel,
# several of them on one multiprocessor, and stay there. Prompts begin behind the decodes, at any alignment.
@no_pdl_jit(do_not_specialize_on_alignment=["query_start", "seq_lens", "slots"])
def chunk_scan_kernel(
    conv_out, Akk_inv, Aqk, exp_g, decay_to_end, k_exp_g, q_exp_g, k_to_end, exp_g_last, ssm, out, query_start,
    seq_lens, slots, first_chunk, ssm_slot, value_scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`first_chunk`: [B] int32, with CHANNEL the first row of each request in `exp_g_last`. `exp_g` and `decay_to_end`
    are read without CHANNEL; `k_exp_g`, `q_exp_g`, `k_to_end` and `exp_g_last` with it. Values and state are divided by
    `value_scale`.
    """
    v_block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - begin
    slot = tl.load(slots + request).to(tl.int64)
    offs_k, offs_v, offs_t = tl.arange(0, BLOCK_K), v_block * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, CHUNK)
    mask_k, mask_v = offs_k < DK, offs_v < DV
    conv_dim: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    if slot <= 0:
        for start in range(0, length, CHUNK):
            token = (begin + start + offs_t).to(tl.int64)
            out_ptrs = out + ((token * VALUE_HEADS + head) * DV)[None, :] + offs_v[:, None]
            mask = mask_v[:, None] & (start + offs_t < length)[None, :]
            tl.store(out_ptrs, tl.zeros([BLOCK_V, CHUNK], out.dtype.element_ty), mask=mask)
        return
    is_new = tl.load(seq_lens + request) == length
    state_ptrs = ssm + slot * ssm_slot + head * (DK * DV) + offs_k[None, :] * DV + offs_v[:, None]
    mask_state = mask_k[None, :] & mask_v[:, None]
    state = tl.load(state_ptrs, mask=mask_state & (is_new == 0), other=0.0).to(tl.float32) * (1.0 / value_scale)
    dtype = conv_out.dtype.element_ty
    # Offsets from the chunk's first token fit into 32 bits, and are the same for every chunk.
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    v_offset = (offs_t * conv_dim)[None, :] + (2 * KEY_HEADS * DK + head * DV + offs_v)[:, None]
    k_offset = (offs_t * conv_dim)[:, None] + (key_head * DK + offs_k)[None, :]
    scaled_offset = (offs_t * (VALUE_HEADS * DK))[:, None] + (head * DK + offs_k)[None, :]
    pair_offset = (offs_t * (VALUE_HEADS * CHUNK))[:, None] + (head * CHUNK + offs_t)[None, :]
    g_offset = offs_t * VALUE_HEADS + head
    out_offset = (offs_t * (VALUE_HEADS * DV))[None, :] + (head * DV + offs_v)[:, None]
    for start in tl.range(0, length, CHUNK, num_stages=STAGES):
        first_token = (begin + start).to(tl.int64)
        mask_t = offs_t < length - start
        mask = mask_t[:, None] & mask_k[None, :]
        # [BLOCK_V, CHUNK]
        v = tl.load(conv_out + first_token * conv_dim + v_offset, mask=mask_v[:, None] & mask_t[None, :], other=0.0)
        h = state.to(dtype)
        if CHANNEL:
            base = first_token * (VALUE_HEADS * DK)
            k_scaled = tl.load(k_exp_g + base + scaled_offset, mask=mask, other=0.0)
            q = tl.load(q_exp_g + base + scaled_offset, mask=mask, other=0.0)
            k = tl.load(k_to_end + base + scaled_offset, mask=mask, other=0.0)
            k_state = tl.dot(h, tl.trans(k_scaled), input_precision=PRECISION)
            q_state = tl.dot(h, tl.trans(q), input_precision=PRECISION)
        else:
            base = conv_out + first_token * conv_dim
            q = tl.load(base + k_offset, mask=mask, other=0.0)
            k = tl.load(base + KEY_HEADS * DK + k_offset, mask=mask, other=0.0)
            exp_g_t = tl.load(exp_g + first_token * VALUE_HEADS + g_offset, mask=mask_t, other=0.0)
            k_state = tl.dot(h, tl.trans(k), input_precision=PRECISION) * exp_g_t[None, :]
            q_state = tl.dot(h, tl.trans(q), input_precision=PRECISION) * exp_g_t[None, :]
        residual = (v.to(tl.float32) - k_state).to(dtype)
        base = first_token * (VALUE_HEADS * CHUNK)
        inverse = tl.load(Akk_inv + base + pair_offset, mask=mask_t[:, None], other=0.0)
        v_new = tl.dot(residual, tl.trans(inverse), input_precision=PRECISION)
        attn = tl.load(Aqk + base + pair_offset, mask=mask_t[:, None], other=0.0)
        if CHANNEL:
            chunk = (tl.load(first_chunk + request) + start // CHUNK).to(tl.int64)
            chunk_decay = tl.load(exp_g_last + (chunk * VALUE_HEADS + head) * DK + offs_k, mask=mask_k, other=0.0)
            state = tl.dot(v_new.to(dtype), k, state * chunk_decay[None, :], input_precision=PRECISION)
        else:
            decay = tl.load(decay_to_end + first_token * VALUE_HEADS + g_offset, mask=mask_t, other=0.0)
            last_token = begin + min(start + CHUNK, length) - 1
            chunk_decay = tl.load(exp_g + last_token.to(tl.int64) * VALUE_HEADS + head)
            state = tl.dot((v_new * decay[None, :]).to(dtype), k, state * chunk_decay, input_precision=PRECISION)
        o = tl.dot(v_new.to(dtype), tl.trans(attn), q_state, input_precision=PRECISION)
        out_ptrs = out + first_token * (VALUE_HEADS * DV) + out_offset
        tl.store(out_ptrs, (o * value_scale).to(out.dtype.element_ty), mask=mask_v[:, None] & mask_t[None, :])
    tl.store(state_ptrs, (state * value_scale).to(ssm.dtype.element_ty), mask=mask_state)


def config(chip: Chip, key_dim: int, value_dim: int, half: bool) -> dict[str, int]:
    """Launch parameters. `half`: products of fp16. Blocks of few value channels let one long request fill the chip."""
    block_v = min(32, max(16, next_power_of_2(value_dim)))
    block_k = max(16, next_power_of_2(key_dim))
    stages = 3 if chip.has_wgmma and half and block_k <= 128 else 1
    return {"BLOCK_K": block_k, "BLOCK_V": block_v, "num_warps": 4, "STAGES": stages}
