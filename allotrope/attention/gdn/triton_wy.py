"""The intra-chunk matrices of the WY representation, which do not depend on the state.

With G the cumulative sum of g from the chunk's start, and k and q of the head:

    A_ij = beta_i (k_i . k_j) e^(G_i - G_j), j < i            Akk_inv = (I + A)^-1 beta
    Aqk_ij = (q_i . k_j) e^(G_i - G_j), j <= i

A program owns one value head of one chunk. With a decay per head, G is summed in float64, as in `chunked`, and the
kernel stores e^G (`exp_g`) and e^(G_last - G) (`decay_to_end`) for the scan. With a decay per channel,
`channel_wy_kernel` scales q and k instead.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from allotrope.attention.gdn.triton_gates import softplus
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.tiles import next_power_of_2


@triton.jit
def invert_unit_lower(A, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A [64, 64], fp32.

    Blocks double in size: the inverse of [[X1^-1, 0], [M, X2^-1]] is [[X1, 0], [-X2 M X1, X2]]. Diagonal blocks of up
    to 16 rows are masked products of the whole block; larger ones are products of their quarters.
    """
    tl.static_assert(CHUNK == 64)
    blocks = tl.reshape(A, [4, 16, 4, 16])
    i = tl.arange(0, 4)[:, None, None, None]
    j = tl.arange(0, 4)[None, None, :, None]
    diagonal = tl.sum(tl.where(i == j, blocks, 0.0), axis=2)
    below_diagonal = tl.sum(tl.where(i == j + 1, blocks, 0.0), axis=2)
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    X = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, diagonal, 0.0)
    for level in tl.static_range(1, 4):
        half = 2**level
        M = tl.where((row // (2 * half) == column // (2 * half)) & (row // half != column // half), diagonal, 0.0)
        XM = tl.dot(X, M, input_precision=PRECISION)
        X -= tl.dot(XM, X, input_precision=PRECISION)
    X1, X2 = tl.split(tl.permute(tl.reshape(X, [2, 2, 16, 16]), [0, 2, 3, 1]))
    _, M = tl.split(tl.permute(tl.reshape(below_diagonal, [2, 2, 16, 16]), [0, 2, 3, 1]))
    below = -tl.dot(tl.dot(X2, M, input_precision=PRECISION), X1, input_precision=PRECISION)
    upper = tl.join(X1, tl.zeros_like(X1))
    lower = tl.join(below, X2)
    # [pair, row, column, half of columns, half of rows]
    X = tl.reshape(tl.permute(tl.join(upper, lower), [0, 4, 1, 3, 2]), [2, 32, 32])
    X1, X2 = tl.split(tl.permute(X, [1, 2, 0]))
    columns, _ = tl.split(tl.permute(tl.reshape(A, [2, 32, 2, 32]), [0, 1, 3, 2]))
    _, M = tl.split(tl.permute(columns, [1, 2, 0]))
    below = -tl.dot(tl.dot(X2, M, input_precision=PRECISION), X1, input_precision=PRECISION)
    upper = tl.join(X1, tl.zeros_like(X1))
    lower = tl.join(below, X2)
    return tl.reshape(tl.permute(tl.join(upper, lower), [3, 0, 2, 1]), [64, 64])


@pdl_jit
def wy_kernel(
    conv_out, b, a, A_log, dt_bias, Akk_inv, Aqk, exp_g, decay_to_end, chunks, query_start, slots,
    b_row, b_head, a_row, a_rate,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """`conv_out`: [T, conv_dim] of `conv_kernel`. `Akk_inv`, `Aqk`: [T, nv, CHUNK] outputs. `exp_g`, `decay_to_end`:
    [T, nv] fp32 outputs.

    PRECISION: of the products of q and k. INVERSE_PRECISION: of the products in the inverse.
    """
    gdc_wait()
    gdc_launch_dependents()
    head, chunk = tl.program_id(0), tl.program_id(1)
    request, start = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    if tl.load(slots + request) <= 0:
        return
    begin = tl.load(query_start + request)
    offs_t = tl.arange(0, CHUNK)
    mask_t = offs_t < tl.load(query_start + request + 1) - begin - start
    first_token = (begin + start).to(tl.int64)
    dt = tl.load(a + first_token * a_row + offs_t * a_row + head * a_rate, mask=mask_t, other=0.0).to(tl.float32)
    A_exp = tl.exp(tl.load(A_log + head).to(tl.float32))
    g = -A_exp * softplus(dt + tl.load(dt_bias + head).to(tl.float32))
    g = tl.where(mask_t, g, 0.0).to(tl.float64)
    g_cumsum = tl.cumsum(g, axis=0)
    beta = tl.sigmoid(
        tl.load(b + first_token * b_row + offs_t * b_row + head * b_head, mask=mask_t, other=0.0).to(tl.float32)
    )
    beta = tl.where(mask_t, beta, 0.0)

    offs_k = tl.arange(0, BLOCK_K)
    conv_dim: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    q_ptrs = conv_out + first_token * conv_dim + (head // (VALUE_HEADS // KEY_HEADS)) * DK
    q_ptrs += (offs_t * conv_dim)[:, None] + offs_k[None, :]
    mask_tk = mask_t[:, None] & (offs_k < DK)[None, :]
    q = tl.load(q_ptrs, mask=mask_tk, other=0.0)
    k = tl.load(q_ptrs + KEY_HEADS * DK, mask=mask_tk, other=0.0)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    decay = tl.exp(tl.where(i >= j, g_cumsum[:, None] - g_cumsum[None, :], 0.0).to(tl.float32))
    kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    A = tl.where(i > j, kk * decay * beta[:, None], 0.0)
    X = invert_unit_lower(A, CHUNK, INVERSE_PRECISION) * beta[None, :]
    base, offsets = (first_token * VALUE_HEADS + head) * CHUNK, i * (VALUE_HEADS * CHUNK) + j
    tl.store(Akk_inv + base + offsets, X.to(Akk_inv.dtype.element_ty), mask=mask_t[:, None])
    tl.store(Aqk + base + offsets, tl.where(i >= j, qk * decay, 0.0).to(Aqk.dtype.element_ty), mask=mask_t[:, None])
    g_last = tl.sum(g, axis=0)
    base, offsets = first_token * VALUE_HEADS + head, offs_t * VALUE_HEADS
    tl.store(exp_g + base + offsets, tl.exp(g_cumsum.to(tl.float32)), mask=mask_t)
    tl.store(decay_to_end + base + offsets, tl.exp((g_last - g_cumsum).to(tl.float32)), mask=mask_t)


@triton.jit
def _other_half_sums(x, HALF: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr):
    """For each row of `x` [CHUNK, BLOCK_K], the sum over the other half of its block of 2 HALF rows."""
    half_sums = tl.sum(tl.reshape(x, [CHUNK // (2 * HALF), 2, HALF, BLOCK_K]), axis=2)
    first, second = tl.split(tl.permute(half_sums, [0, 2, 1]))
    swapped = tl.permute(tl.join(second, first), [0, 2, 1])
    expanded = tl.broadcast_to(swapped[:, :, None, :], [CHUNK // (2 * HALF), 2, HALF, BLOCK_K])
    return tl.reshape(expanded, [CHUNK, BLOCK_K])


@pdl_jit
def channel_wy_kernel(
    conv_out, b, a, A_log, dt_bias, Akk_inv, Aqk, k_exp_g, q_exp_g, k_to_end, exp_g_last, chunks, query_start, slots,
    b_row, b_head, a_row, a_rate,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """As `wy_kernel` with a decay per channel, by halves of blocks of 2, 4, ... tokens as in `chunked`.

    `k_exp_g`: [T, nv, dk] k e^G. `q_exp_g`: q e^G. `k_to_end`: k e^(G_last - G). `exp_g_last`: [N, nv, dk] fp32,
    e^(G_last). Sums of g are added and never subtracted, so that no digits cancel.
    """
    gdc_wait()
    gdc_launch_dependents()
    head, chunk = tl.program_id(0), tl.program_id(1)
    request, start = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    if tl.load(slots + request) <= 0:
        return
    begin = tl.load(query_start + request)
    token = start + tl.arange(0, CHUNK)
    mask_t = token < tl.load(query_start + request + 1) - begin
    token = (begin + token).to(tl.int64)
    beta = tl.sigmoid(tl.load(b + token * b_row + head * b_head, mask=mask_t, other=0.0).to(tl.float32))
    beta = tl.where(mask_t, beta, 0.0)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < DK
    mask_tk = mask_t[:, None] & mask_k[None, :]
    q_ptrs = head * DK + offs_k
    dt = tl.load(a + token[:, None] * a_row + q_ptrs[None, :] * a_rate, mask=mask_tk, other=0.0).to(tl.float32)
    dt += tl.load(dt_bias + q_ptrs, mask=mask_k, other=0.0).to(tl.float32)[None, :]
    A_exp = tl.exp(tl.load(A_log + head).to(tl.float32))
    g = tl.where(mask_tk, -A_exp * softplus(dt), 0.0)

    x_ptrs = conv_out + token[:, None] * (2 * KEY_HEADS * DK + VALUE_HEADS * DV)
    q_ptrs = x_ptrs + (head // (VALUE_HEADS // KEY_HEADS)) * DK + offs_k[None, :]
    q = tl.load(q_ptrs, mask=mask_tk, other=0.0)
    k = tl.load(q_ptrs + KEY_HEADS * DK, mask=mask_tk, other=0.0)
    dtype = conv_out.dtype.element_ty
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    S = tl.where(i == j, tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)[:, None], 0.0)
    g_from_start, g_to_end = g, tl.zeros_like(g)
    for level in tl.static_range(0, 6):
        half = 2**level
        # Pairs of a token of a block's second half and one of its first half, whose decays meet at the half's end.
        exp_g, early_k = tl.exp(g_from_start), (k.to(tl.float32) * tl.exp(g_to_end)).to(dtype)
        pair_mask = (i // (2 * half) == j // (2 * half)) & (i // half > j // half)
        late_k, late_q = (k.to(tl.float32) * exp_g).to(dtype), (q.to(tl.float32) * exp_g).to(dtype)
        A += tl.where(pair_mask, tl.dot(late_k, tl.trans(early_k), input_precision=PRECISION), 0.0)
        S += tl.where(pair_mask, tl.dot(late_q, tl.trans(early_k), input_precision=PRECISION), 0.0)
        other_half = _other_half_sums(g, 2**level, CHUNK, BLOCK_K)
        in_second_half = (i // half) % 2 == 1
        g_from_start += tl.where(in_second_half, other_half, 0.0)
        g_to_end += tl.where(in_second_half, 0.0, other_half)
    X = invert_unit_lower(A * beta[:, None], CHUNK, INVERSE_PRECISION) * beta[None, :]
    offsets = (token[:, None] * VALUE_HEADS + head) * CHUNK + j
    tl.store(Akk_inv + offsets, X.to(Akk_inv.dtype.element_ty), mask=mask_t[:, None])
    tl.store(Aqk + offsets, S.to(Aqk.dtype.element_ty), mask=mask_t[:, None])
    offsets = (token[:, None] * VALUE_HEADS + head) * DK + offs_k[None, :]
    exp_g = tl.exp(g_from_start)
    tl.store(k_exp_g + offsets, (k.to(tl.float32) * exp_g).to(dtype), mask=mask_tk)
    tl.store(q_exp_g + offsets, (q.to(tl.float32) * exp_g).to(dtype), mask=mask_tk)
    tl.store(k_to_end + offsets, (k.to(tl.float32) * tl.exp(g_to_end)).to(dtype), mask=mask_tk)
    offsets = (chunk.to(tl.int64) * VALUE_HEADS + head) * DK + offs_k
    tl.store(exp_g_last + offsets, tl.exp(tl.sum(g, axis=0)), mask=mask_k)


def config(chip: Chip, key_dim: int, channel: bool) -> dict[str, int]:
    """Launch parameters of `wy_kernel`, or with `channel` of `channel_wy_kernel`."""
    block_k = max(16, next_power_of_2(key_dim))
    warps = 8 if channel else 2 if chip.has_wgmma else 4
    return {"BLOCK_K": block_k, "num_warps": warps, "num_stages": 1}
