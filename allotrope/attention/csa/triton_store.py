"""All cache writes of a layer of compressed sparse attention, and its rotated queries, in one launch.

For every token the kernel rotates the queries, rotates and stores the window's vector, and stores the compressor states
with the biased score. A token at a block boundary also completes an entry: the compressor pools the tokens of this
step, which it reads from the step's inputs, with the saved states of earlier ones; the entry is normed, rotated at the
first token of its block, and stored. So no program waits for another's store. A sequence with drafts has its tokens in
several requests of the step, from `first_rows` on.

A program owns one token and one of: window vector, entry, index key, BLOCK_H heads. Offsets are 64-bit.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from allotrope.attention.csa.rows import BLOCK
from allotrope.attention.mla.rows import FP8_MAX
from allotrope.attention.mla.triton_store import pow2_scale
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import clamped, higher_of, highest, largest_of
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import next_power_of_2

_FP8_MAX = tl.constexpr(FP8_MAX)
_SCALE_BLOCK = tl.constexpr(BLOCK)
# Cache formats.
PLAIN = tl.constexpr(0)
PER_TENSOR = tl.constexpr(1)
BLOCK_SCALED = tl.constexpr(2)


@triton.jit
def apply_rope(x, cos, sin, lead: tl.constexpr, width: tl.constexpr):
    """Rotate interleaved pairs of `x` [lead, width]. `cos`, `sin`: [width / 2], one for each pair."""
    a, b = tl.split(tl.reshape(x, [lead, width // 2, 2]))
    cos, sin = cos[None, :], sin[None, :]
    return tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), [lead, width])


@triton.jit
def pair_angles(cos, sin, token, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr):
    """cos and sin [BLOCK_D / 2] of the pairs of D dims, of which the last R are rotated. Tables: [T, R]."""
    second_dim = 2 * tl.arange(0, BLOCK_D // 2) + 1 - (D - R)
    is_rotated = (second_dim > 0) & (second_dim < R)
    offset = token.to(tl.int64) * R + second_dim
    return tl.load(cos + offset, mask=is_rotated, other=1.0), tl.load(sin + offset, mask=is_rotated, other=0.0)


@triton.jit
def _store_kv(
    x, values, rope_part, scales, slot, value_page, value_row, rope_page, rope_row, scale_page, scale_row, inv_scale,
    ROWS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Store `x` [BLOCK_D] fp32 at `slot`. `values`, `rope_part`, `scales`: the pool in the types of its parts."""
    page, row = slot // ROWS, slot % ROWS
    offs_d = tl.arange(0, BLOCK_D)
    if FORMAT == BLOCK_SCALED:
        nope_dim: tl.constexpr = D - R
        x = tl.where(offs_d < D, x, 0.0)
        groups = tl.reshape(x, [BLOCK_D // _SCALE_BLOCK, _SCALE_BLOCK])
        offs_g = tl.arange(0, BLOCK_D // _SCALE_BLOCK)
        scale = pow2_scale(largest_of(groups, 1))
        exponent = scale.to(tl.int32, bitcast=True) >> 23
        quantized = tl.reshape(groups / scale[:, None], [BLOCK_D])
        quantized = clamped(quantized, _FP8_MAX)
        tl.store(
            values + page * value_page + row * value_row + offs_d, quantized.to(tl.float8e4nv), mask=offs_d < nope_dim
        )
        ptrs = rope_part + page * rope_page + row * rope_row + nope_dim // 2 + (offs_d - nope_dim)
        tl.store(ptrs, x.to(tl.bfloat16), mask=(offs_d >= nope_dim) & (offs_d < D))
        ptrs = scales + page * scale_page + row * scale_row
        tl.store(ptrs + offs_g, exponent.to(tl.uint8), mask=offs_g < nope_dim // _SCALE_BLOCK)
        padding = nope_dim // _SCALE_BLOCK + tl.arange(0, 8)
        tl.store(ptrs + padding, tl.zeros([8], tl.uint8), mask=padding < (nope_dim // _SCALE_BLOCK + 7) // 8 * 8)
    else:
        if FORMAT == PER_TENSOR:
            x = clamped(x * inv_scale, _FP8_MAX)
        tl.store(values + page * value_page + row * value_row + offs_d, x.to(values.dtype.element_ty), mask=offs_d < D)


@triton.jit
def _store_window(
    kv, slots, cos, sin, values, rope_part, scales, token, kv_row, value_page, value_row, rope_page, rope_row,
    scale_page, scale_row, inv_scale,
    ROWS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        offs_d = tl.arange(0, BLOCK_D)
        x = tl.load(kv + token.to(tl.int64) * kv_row + offs_d, mask=offs_d < D, other=0.0)
        c, s = pair_angles(cos, sin, token, D, R, BLOCK_D)
        y = tl.reshape(apply_rope(tl.reshape(x.to(tl.float32), [1, BLOCK_D]), c, s, 1, BLOCK_D), [BLOCK_D])
        # Round to the input's dtype first, as the reference does.
        _store_kv(
            y.to(x.dtype).to(tl.float32), values, rope_part, scales, slot, value_page, value_row, rope_page, rope_row,
            scale_page, scale_row, inv_scale, ROWS, D, R, BLOCK_D, FORMAT,
        )  # fmt: skip


@triton.jit
def _compress(
    kv_score, bias, norm, states, state_slots, state_table, entry_slots, positions, requests, query_start, first_rows,
    cos, sin, values, rope_part, scales, token, input_row, state_page, state_row, table_row, eps, value_page, value_row,
    rope_page, rope_row, scale_page, scale_row, inv_scale,
    STATE_ROWS: tl.constexpr, ROWS: tl.constexpr, RATIO: tl.constexpr, STREAMS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
):  # fmt: skip
    """The compressor: save one token's state and, at a block boundary, pool and store the entry."""
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    kv_dim: tl.constexpr = STREAMS * D
    position = tl.load(positions + token).to(tl.int32)
    input_ptr = kv_score + token.to(tl.int64) * input_row
    slot = tl.load(state_slots + token).to(tl.int64)
    if slot >= 0:
        state_ptr = states + slot // STATE_ROWS * state_page + slot % STATE_ROWS * state_row
        for stream in tl.static_range(STREAMS):
            at = stream * D + offs_d
            tl.store(state_ptr + at, tl.load(input_ptr + at, mask=mask_d).to(tl.float32), mask=mask_d)
            score = tl.load(input_ptr + kv_dim + at, mask=mask_d).to(tl.float32)
            score += tl.load(bias + position % RATIO * kv_dim + at, mask=mask_d).to(tl.float32)
            tl.store(state_ptr + kv_dim + at, score, mask=mask_d)
    entry = tl.load(entry_slots + token).to(tl.int64)
    if (entry >= 0) & (position % RATIO == RATIO - 1):
        request = tl.load(requests + token)
        first_row = request
        if HAS_DRAFTS:
            first_row = tl.load(first_rows + request)
        # Position of the sequence's first token in this step: this launch may not have saved the states from it on.
        first_pos = position - (token - tl.load(query_start + first_row))
        m_i = tl.full([BLOCK_D], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_D], tl.float32)
        acc = tl.zeros([BLOCK_D], tl.float32)
        size: tl.constexpr = STREAMS * RATIO
        for begin in range(0, size, BLOCK_T):
            offs_t = begin + tl.arange(0, BLOCK_T)
            at = position - (size - 1) + offs_t
            mask_t = (offs_t < size) & (at >= 0)
            column = (offs_t // RATIO * D)[:, None] + offs_d[None, :]
            mask_new = (mask_t & (at >= first_pos))[:, None] & mask_d[None, :]
            mask_saved = (mask_t & (at < first_pos))[:, None] & mask_d[None, :]
            source_offset = (token + at - position).to(tl.int64) * input_row
            new_ptrs = kv_score + source_offset[:, None] + column
            page = tl.load(
                state_table + request * table_row + at // STATE_ROWS, mask=mask_t & (at < first_pos), other=0
            ).to(tl.int64)  # fmt: skip
            saved_ptrs = states + (page * state_page + at % STATE_ROWS * state_row)[:, None] + column
            kv = tl.load(new_ptrs, mask=mask_new, other=0.0).to(tl.float32) + tl.load(
                saved_ptrs, mask=mask_saved, other=0.0
            )
            score = tl.load(new_ptrs + kv_dim, mask=mask_new, other=0.0).to(tl.float32)
            score += tl.load(bias + (at % RATIO * kv_dim)[:, None] + column, mask=mask_new, other=0.0).to(tl.float32)
            score += tl.load(saved_ptrs + kv_dim, mask=mask_saved, other=0.0)
            score = tl.where(mask_t[:, None], score, float("-inf"))
            m_new = higher_of(m_i, highest(score, 0))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp(score - m_safe[None, :])
            alpha = tl.exp(m_i - m_safe)
            l_i = l_i * alpha + tl.sum(p, axis=0)
            acc = acc * alpha + tl.sum(p * kv, axis=0)
            m_i = m_new
        x = tl.where(mask_d, acc / l_i, 0.0)
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        x *= tl.load(norm + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        c, s = pair_angles(cos, sin, token, D, R, BLOCK_D)
        y = tl.reshape(apply_rope(tl.reshape(x, [1, BLOCK_D]), c, s, 1, BLOCK_D), [BLOCK_D])
        _store_kv(
            y, values, rope_part, scales, entry // RATIO, value_page, value_row, rope_page, rope_row, scale_page,
            scale_row, inv_scale, ROWS, D, R, BLOCK_D, FORMAT,
        )  # fmt: skip


@triton.jit
def _rotate_queries(
    q, q_rotated, cos, sin, token, block, q_token, q_head,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK_H heads of one query. `q_rotated`: [T, H, D]."""
    head, offs_d = block * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask_hd = (head < H)[:, None] & (offs_d < D)[None, :]
    q_ptr = q + token.to(tl.int64) * q_token
    x = tl.load(q_ptr + head[:, None] * q_head + offs_d[None, :], mask=mask_hd, other=0.0).to(tl.float32)
    c, s = pair_angles(cos, sin, token, D, R, BLOCK_D)
    ptrs = q_rotated + (token.to(tl.int64) * H + head)[:, None] * D + offs_d[None, :]
    tl.store(ptrs, apply_rope(x, c, s, BLOCK_H, BLOCK_D).to(q_rotated.dtype.element_ty), mask=mask_hd)


@pdl_jit
def store_kernel(
    q, q_rotated, q_token, q_head,
    positions, requests, query_start, first_rows, cos, sin, first_cos, first_sin, inv_scale, eps,
    kv, kv_row, window_slots, w_values, w_rope, w_scales, wc_page, wc_row, wt_page, wt_row, wf_page, wf_row,
    kv_score, input_row, bias, norm, states, state_slots, state_table, state_page, state_row, table_row,
    entry_slots, e_values, e_rope, e_scales, ec_page, ec_row, et_page, et_row, ef_page, ef_row,
    i_kv_score, i_input_row, i_bias, i_norm, i_states, i_state_slots, i_state_table, i_state_page, i_state_row,
    i_table_row, i_slots, i_keys, i_page, i_row,
    W_ROWS: tl.constexpr, STATE_ROWS: tl.constexpr, E_ROWS: tl.constexpr, I_STATE_ROWS: tl.constexpr,
    I_ROWS: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, RATIO: tl.constexpr, STREAMS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr,
    BLOCK_D: tl.constexpr, INDEX_D: tl.constexpr, BLOCK_I: tl.constexpr, FORMAT: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
):  # fmt: skip
    """Program (token, task): task 0 stores the window vector, 1 the entry, 2 the index key, the others rotate queries.

    `cos`, `sin`: [T, R] at the token, `first_*` at the first token of its entry. `w_`, `e_`: the window's and the
    entries' pool, as in `_store_kv`. `first_rows`: [B] int32, the first request of the same sequence; without
    HAS_DRAFTS every request is a sequence alone, and it is not read.
    """
    gdc_wait()
    gdc_launch_dependents()
    token, task = tl.program_id(0), tl.program_id(1)
    if task == 0:
        _store_window(
            kv, window_slots, cos, sin, w_values, w_rope, w_scales, token, kv_row, wc_page, wc_row, wt_page, wt_row,
            wf_page, wf_row, inv_scale, W_ROWS, D, R, BLOCK_D, FORMAT,
        )  # fmt: skip
    if task >= 3:
        _rotate_queries(q, q_rotated, cos, sin, token, task - 3, q_token, q_head, H, D, R, BLOCK_D, BLOCK_H)
    if RATIO > 0:  # noqa: SIM102 (not compiled otherwise)
        if task == 1:
            _compress(
                kv_score, bias, norm, states, state_slots, state_table, entry_slots, positions, requests, query_start,
                first_rows, first_cos, first_sin, e_values, e_rope, e_scales, token, input_row, state_page, state_row,
                table_row, eps, ec_page, ec_row, et_page, et_row, ef_page, ef_row, inv_scale, STATE_ROWS, E_ROWS, RATIO,
                STREAMS, D, R, BLOCK_D, FORMAT, BLOCK_T, HAS_DRAFTS,
            )  # fmt: skip
    if INDEX_D > 0:  # noqa: SIM102
        if task == 2:
            _compress(
                i_kv_score, i_bias, i_norm, i_states, i_state_slots, i_state_table, i_slots, positions, requests,
                query_start, first_rows, first_cos, first_sin, i_keys, i_keys, i_keys, token, i_input_row, i_state_page,
                i_state_row, i_table_row, eps, i_page, i_row, i_page, i_row, i_page, i_row, 1.0, I_STATE_ROWS, I_ROWS,
                RATIO, STREAMS, INDEX_D, R, BLOCK_I, PLAIN, BLOCK_T, HAS_DRAFTS,
            )  # fmt: skip


def config(chip: Chip, dim: int, pooled: int) -> dict[str, int]:
    """Launch parameters. `pooled`: tokens of an entry."""
    block_t = min(max(2, next_power_of_2(pooled)), 8)
    if pooled > 16 and chip.has_wgmma:
        return {"BLOCK_T": 16, "BLOCK_H": 8, "num_warps": 8, "num_stages": 1}
    return {"BLOCK_T": block_t, "BLOCK_H": 4, "num_warps": 4 if dim > 128 else 2, "num_stages": 1}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes: entries of 4 tokens with an indexer, and of 128 without; cache of bf16, and block-scaled; with
    and without drafts.
    """
    made = []
    for name, row, ratio, streams in (
        ("4 bf16", ("*bf16:16",) * 3, 4, 2),
        ("4 scaled", ("*fp8e4nv:16", "*bf16:16", "*u8:16"), 4, 2),
        ("4 scaled with drafts", ("*fp8e4nv:16", "*bf16:16", "*u8:16"), 4, 2),
        ("128 bf16", ("*bf16:16",) * 3, 128, 1),
    ):
        launch = config(chip, 512, ratio * streams)
        signature = dict.fromkeys(("positions", "requests", "window_slots", "entry_slots", "i_slots"), "*i64:16")
        signature |= dict.fromkeys(("state_slots", "state_table", "i_state_slots", "i_state_table"), "*i64:16")
        signature |= dict.fromkeys(("cos", "sin", "first_cos", "first_sin", "bias", "norm", "i_bias"), "*fp32:16")
        signature |= dict.fromkeys(("kv_score", "states", "i_kv_score", "i_states", "i_norm"), "*fp32:16")
        signature |= {
            "query_start": "*i32:16",
            "first_rows": "*i32:16",
            "kv": "*bf16:16",
            "i_keys": "*bf16:16",
            "inv_scale": "fp32",
            "eps": "fp32",
        }
        signature |= dict.fromkeys(("kv_row", "input_row", "state_page", "state_row", "i_input_row"), "i32:16")
        signature |= dict.fromkeys(("i_state_page", "i_state_row", "i_page", "i_row"), "i32:16")
        signature |= dict.fromkeys(("table_row", "i_table_row"), "i32") | dict.fromkeys(("q", "q_rotated"), "*bf16:16")
        signature |= dict.fromkeys(("q_token", "q_head"), "i32:16")
        for pool in ("w", "e"):
            signature |= dict(zip((f"{pool}_values", f"{pool}_rope", f"{pool}_scales"), row, strict=True))
            signature |= dict.fromkeys((f"{pool}{part}_{at}" for part in "ctf" for at in ("page", "row")), "i32:16")
        constants = {"W_ROWS": 64, "STATE_ROWS": 8, "E_ROWS": 256 // ratio, "I_STATE_ROWS": 8, "I_ROWS": 64}
        constants |= {"RATIO": ratio, "STREAMS": streams, "D": 512, "R": 64, "BLOCK_D": 512, "BLOCK_I": 128}
        constants |= {"INDEX_D": 128 if ratio == 4 else 0, "FORMAT": 2 if "scaled" in name else 0}
        constants |= {"BLOCK_T": launch["BLOCK_T"], "BLOCK_H": launch["BLOCK_H"], "H": 64}
        constants["HAS_DRAFTS"] = "drafts" in name
        made.append(Specialization(f"csa store {name}", store_kernel, signature, constants, launch["num_warps"], 1))
    return made
