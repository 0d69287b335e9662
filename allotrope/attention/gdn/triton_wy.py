"""Whatever a chunk of tokens needs that does not depend on the state before it.

With G the sum of g from the chunk's start, and for keys and queries of the head:

    A_ij = beta_i (k_i . k_j) e^(G_i - G_j), j < i            mix    = (I + A)^-1 beta
    scores_ij = (q_i . k_j) e^(G_i - G_j), j <= i

A program owns one value head of one chunk. With one decay per head, G is summed in double, as in `chunked`, and e^G
(`grown`) and e^(G_last - G) (`rest`) are left for the scan. With one per channel, `triton_channel_pairs` scales the
rows instead.
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
    """(I + A)^-1 of a strictly lower A [64, 64], fp32.

    Blocks of twice the size from blocks X: of [[X1^-1, 0], [M, X2^-1]] it is [[X1, 0], [-X2 M X1, X2]]. The sixteen
    rows of a diagonal block double as masked products of the whole block, larger ones as products of their quarters.
    """
    tl.static_assert(CHUNK == 64)
    blocks = tl.reshape(A, [4, 16, 4, 16])
    i = tl.arange(0, 4)[:, None, None, None]
    j = tl.arange(0, 4)[None, None, :, None]
    own = tl.sum(tl.where(i == j, blocks, 0.0), axis=2)
    left = tl.sum(tl.where(i == j + 1, blocks, 0.0), axis=2)
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    X = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, own, 0.0)
    for level in tl.static_range(1, 4):
        half = 2**level
        M = tl.where((row // (2 * half) == column // (2 * half)) & (row // half != column // half), own, 0.0)
        seen = tl.dot(X, M, input_precision=PRECISION)
        X -= tl.dot(seen, X, input_precision=PRECISION)
    X1, X2 = tl.split(tl.permute(tl.reshape(X, [2, 2, 16, 16]), [0, 2, 3, 1]))
    _, M = tl.split(tl.permute(tl.reshape(left, [2, 2, 16, 16]), [0, 2, 3, 1]))
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
def pairs_kernel(
    mixed, b, a, A_log, dt_bias, mix, scores, grown, rest, chunks, query_start, slots,
    b_row, b_head, a_row, a_rate,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """`mixed`: [T, conv_dim] of `conv_kernel`. `mix`, `scores`: [T, nv, CHUNK] outputs. `grown`, `rest`: [T, nv] fp32.

    `PRECISION`: of products of `mixed`; `INVERSE`: of those in the inverse.
    """
    gdc_wait()
    gdc_launch_dependents()
    head, chunk = tl.program_id(0), tl.program_id(1)
    request, place = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    if tl.load(slots + request) <= 0:
        return
    begin = tl.load(query_start + request)
    line = tl.arange(0, CHUNK)
    inside = line < tl.load(query_start + request + 1) - begin - place
    first = (begin + place).to(tl.int64)
    step = tl.load(a + first * a_row + line * a_row + head * a_rate, mask=inside, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    g = -rate * softplus(step + tl.load(dt_bias + head).to(tl.float32))
    g = tl.where(inside, g, 0.0).to(tl.float64)
    total = tl.cumsum(g, axis=0)
    beta = tl.sigmoid(tl.load(b + first * b_row + line * b_row + head * b_head, mask=inside, other=0.0).to(tl.float32))
    beta = tl.where(inside, beta, 0.0)

    key = tl.arange(0, BLOCK_K)
    width: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    at = mixed + first * width + (head // (VALUE_HEADS // KEY_HEADS)) * DK
    at += (line * width)[:, None] + key[None, :]
    there = inside[:, None] & (key < DK)[None, :]
    q = tl.load(at, mask=there, other=0.0)
    k = tl.load(at + KEY_HEADS * DK, mask=there, other=0.0)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    decay = tl.exp(tl.where(i >= j, total[:, None] - total[None, :], 0.0).to(tl.float32))
    kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    A = tl.where(i > j, kk * decay * beta[:, None], 0.0)
    X = invert_unit_lower(A, CHUNK, INVERSE) * beta[None, :]
    base, to = (first * VALUE_HEADS + head) * CHUNK, i * (VALUE_HEADS * CHUNK) + j
    tl.store(mix + base + to, X.to(mix.dtype.element_ty), mask=inside[:, None])
    tl.store(scores + base + to, tl.where(i >= j, qk * decay, 0.0).to(scores.dtype.element_ty), mask=inside[:, None])
    last = tl.sum(g, axis=0)
    base, to = first * VALUE_HEADS + head, line * VALUE_HEADS
    tl.store(grown + base + to, tl.exp(total.to(tl.float32)), mask=inside)
    tl.store(rest + base + to, tl.exp((last - total).to(tl.float32)), mask=inside)


@triton.jit
def _partners(x, HALF: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr):
    """For each row, the sum over the other half of its block of 2 HALF rows. `x`: [CHUNK, BLOCK_K]."""
    sums = tl.sum(tl.reshape(x, [CHUNK // (2 * HALF), 2, HALF, BLOCK_K]), axis=2)
    first, second = tl.split(tl.permute(sums, [0, 2, 1]))
    swapped = tl.permute(tl.join(second, first), [0, 2, 1])
    spread = tl.broadcast_to(swapped[:, :, None, :], [CHUNK // (2 * HALF), 2, HALF, BLOCK_K])
    return tl.reshape(spread, [CHUNK, BLOCK_K])


@pdl_jit
def channel_pairs_kernel(
    mixed, b, a, A_log, dt_bias, mix, scores, seen_keys, queries, keys, last, chunks, query_start, slots,
    b_row, b_head, a_row, a_rate,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """As `pairs_kernel` with one decay per channel, by halves of blocks of 2, 4, ... tokens as in `chunked`.

    `seen_keys`: [T, nv, dk] k e^G. `queries`: q e^G. `keys`: k e^(G_last - G). `last`: [N, nv, dk] fp32, e^(G_last).
    Sums of g are only ever added to, never subtracted: they keep their digits.
    """
    gdc_wait()
    gdc_launch_dependents()
    head, chunk = tl.program_id(0), tl.program_id(1)
    request, place = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    if tl.load(slots + request) <= 0:
        return
    begin = tl.load(query_start + request)
    token = place + tl.arange(0, CHUNK)
    inside = token < tl.load(query_start + request + 1) - begin
    token = (begin + token).to(tl.int64)
    beta = tl.sigmoid(tl.load(b + token * b_row + head * b_head, mask=inside, other=0.0).to(tl.float32))
    beta = tl.where(inside, beta, 0.0)
    key = tl.arange(0, BLOCK_K)
    in_key = key < DK
    there = inside[:, None] & in_key[None, :]
    at = head * DK + key
    step = tl.load(a + token[:, None] * a_row + at[None, :] * a_rate, mask=there, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + at, mask=in_key, other=0.0).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    g = tl.where(there, -rate * softplus(step), 0.0)

    row = mixed + token[:, None] * (2 * KEY_HEADS * DK + VALUE_HEADS * DV)
    from_head = row + (head // (VALUE_HEADS // KEY_HEADS)) * DK + key[None, :]
    q = tl.load(from_head, mask=there, other=0.0)
    k = tl.load(from_head + KEY_HEADS * DK, mask=there, other=0.0)
    dtype = mixed.dtype.element_ty
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    S = tl.where(i == j, tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)[:, None], 0.0)
    since, until = g, tl.zeros_like(g)
    for level in tl.static_range(0, 6):
        half = 2**level
        # Rows of a block's second half against the first half's, by way of the first half's last token.
        grown, behind = tl.exp(since), (k.to(tl.float32) * tl.exp(until)).to(dtype)
        met = (i // (2 * half) == j // (2 * half)) & (i // half > j // half)
        late_k, late_q = (k.to(tl.float32) * grown).to(dtype), (q.to(tl.float32) * grown).to(dtype)
        A += tl.where(met, tl.dot(late_k, tl.trans(behind), input_precision=PRECISION), 0.0)
        S += tl.where(met, tl.dot(late_q, tl.trans(behind), input_precision=PRECISION), 0.0)
        other = _partners(g, 2**level, CHUNK, BLOCK_K)
        second = (i // half) % 2 == 1
        since += tl.where(second, other, 0.0)
        until += tl.where(second, 0.0, other)
    X = invert_unit_lower(A * beta[:, None], CHUNK, INVERSE) * beta[None, :]
    to = (token[:, None] * VALUE_HEADS + head) * CHUNK + j
    tl.store(mix + to, X.to(mix.dtype.element_ty), mask=inside[:, None])
    tl.store(scores + to, S.to(scores.dtype.element_ty), mask=inside[:, None])
    to = (token[:, None] * VALUE_HEADS + head) * DK + key[None, :]
    grown = tl.exp(since)
    tl.store(seen_keys + to, (k.to(tl.float32) * grown).to(dtype), mask=there)
    tl.store(queries + to, (q.to(tl.float32) * grown).to(dtype), mask=there)
    tl.store(keys + to, (k.to(tl.float32) * tl.exp(until)).to(dtype), mask=there)
    to = (chunk.to(tl.int64) * VALUE_HEADS + head) * DK + key
    tl.store(last + to, tl.exp(tl.sum(g, axis=0)), mask=in_key)


def config(chip: Chip, key_dim: int, channel: bool) -> dict[str, int]:
    """Of `pairs_kernel`, or with `channel` of `channel_pairs_kernel`."""
    block_k = max(16, next_power_of_2(key_dim))
    warps = 8 if channel else 2 if chip.has_wgmma else 4
    return {"BLOCK_K": block_k, "num_warps": warps, "num_stages": 1}
