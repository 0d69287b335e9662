"""The decode kernel of verify steps: the requests of a sequence, its last token and then its drafts, read a key once.

Owns: which of them share a program, and how they are packed. Must not know: how chunks are merged.

A row is such a request here, as in `VerifyTensors`. It has the bits that `triton_decode.decode_kernel` gives it. So
products have tiles of BLOCK_H queries as there, which leaves the order of all sums as it is: a tile holds the query
heads of one KV head of several rows, and a program multiplies each block of keys and values with up to TILES tiles.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
from __future__ import annotations

from dataclasses import replace

import triton.language as tl

from allotrope.attention.mha.triton_decode import (
    kv_chunks,
    load_block,
    pages_of_block,
    softmax_block,
    specialization,
    store_chunk,
)
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.softmax import LOWEST


def num_tiles(head_dim: int, value_dim: int) -> int:
    """Most tiles of a program; with more, its registers would spill."""
    return 2 if max(head_dim, value_dim) <= 256 else 1


@pdl_jit(do_not_specialize=["window", "num_splits", "capacity"])
def verify_kernel(
    q, k_pool, v_pool, table, seq_lens, sinks, partial, lse, out,
    scale, softcap, v_scale, window, num_splits, capacity,
    q_t, q_h, kp_p, kp_s, kp_g, vp_p, vp_s, vp_g, table_b, out_t, out_h, first_row, num_rows,
    H: tl.constexpr, Q_PER_KV: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, LONG_CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, VALUES_ARE_KEYS: tl.constexpr, DIRECT: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """As `triton_decode.decode_kernel`, for requests that are a sequence with its drafts; see `VerifyTensors`.

    The rows of a sequence are taken in groups of as many as TILES tiles hold. The program of a group's first row
    computes the whole group, those of its other rows end at once. A group ends early where the next row's chunks have
    other bounds. A value that is not a number reaches all rows of a group, as 0 * NaN, also those before its token.
    """
    gdc_wait()
    gdc_launch_dependents()
    dtype = q.dtype.element_ty
    ROWS: tl.constexpr = BLOCK_H // Q_PER_KV
    GROUP: tl.constexpr = TILES * ROWS if TILES * ROWS < BLOCK_H else BLOCK_H
    split, kv_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    offs_h, offs_d, offs_dv = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    row_in_tile, head = offs_h // Q_PER_KV, kv_head * Q_PER_KV + offs_h % Q_PER_KV
    q += request * q_t
    out += request * out_t
    kv_len = tl.load(seq_lens + request)
    if kv_len == 0:
        if DIRECT:
            zeros = tl.zeros([BLOCK_H, BLOCK_DV], out.dtype.element_ty)
            mask = (row_in_tile == 0)[:, None] & (offs_dv < DV)[None, :]
            tl.store(out + head[:, None] * out_h + offs_dv[None, :], zeros, mask=mask)
        return
    first = tl.load(first_row + request)
    row = tl.program_id(2) - first
    begins = row % GROUP == 0
    count = tl.minimum(tl.load(num_rows + first) - row, GROUP - row % GROUP)
    first_key, aligned_key, chunk_size, _ = kv_chunks(kv_len, window, BLOCK_N, CHUNK, LONG_CHUNK, MAX_CHUNKS)
    if not DIRECT:
        _, key_before, size_before, _ = kv_chunks(kv_len - 1, window, BLOCK_N, CHUNK, LONG_CHUNK, MAX_CHUNKS)
        begins = begins | (key_before != aligned_key) | (size_before != chunk_size)
        # From row to row the first key never falls, nor the size while that stays: equal rows are neighbours.
        _, keys_behind, sizes_behind, _ = kv_chunks(kv_len + offs_h, window, BLOCK_N, CHUNK, LONG_CHUNK, MAX_CHUNKS)
        same = (keys_behind == aligned_key) & (sizes_behind == chunk_size) & (offs_h < count)
        count = tl.sum(same.to(tl.int32), 0)
    if not begins:
        return
    last_len = kv_len + count - 1
    num_chunks = kv_chunks(last_len, window, BLOCK_N, CHUNK, LONG_CHUNK, MAX_CHUNKS)[3]
    table += request * table_b
    k_pool += kv_head * kp_g
    v_pool += kv_head * vp_g
    lse += request * H * capacity
    partial += request * H * capacity * DV
    # As many tiles as the rows of this group fill, each number in a loop of its own.
    for tiles in tl.static_range(1, TILES + 1):
        if tl.cdiv(count, ROWS) == tiles:
            queries = ()
            for tile in tl.static_range(tiles):
                row_in_group = tile * ROWS + row_in_tile
                mask_h = (row_in_tile < ROWS) & (row_in_group < count)
                q_ptrs = q + row_in_group[:, None] * q_t + head[:, None] * q_h + offs_d[None, :]
                queries += (tl.load(q_ptrs, mask=mask_h[:, None] & (offs_d < D)[None, :], other=0.0),)
            for chunk in range(split, num_chunks, num_splits):
                begin = aligned_key + chunk * chunk_size
                end = last_len if DIRECT else tl.minimum(begin + chunk_size, last_len)
                m_i = (tl.full([BLOCK_H], LOWEST, tl.float32),) * tiles
                l_i = (tl.zeros([BLOCK_H], tl.float32),) * tiles
                acc = (tl.zeros([BLOCK_H, BLOCK_DV], tl.float32),) * tiles
                for start in range(begin, end, BLOCK_N):
                    offs_n = start + tl.arange(0, BLOCK_N)
                    mask_n = (offs_n >= first_key) & (offs_n < end)
                    page, page_offset, mask_kv = pages_of_block(table, start, mask_n, PAGE, BLOCK_N)
                    kv_offset = page * kp_p + page_offset * kp_s
                    keys = load_block(k_pool, kv_offset, mask_kv, D, BLOCK_D).to(dtype)
                    if VALUES_ARE_KEYS:
                        values = keys
                    else:
                        kv_offset = page * vp_p + page_offset * vp_s
                        values = load_block(v_pool, kv_offset, mask_kv, DV, BLOCK_DV).to(dtype)
                    m_new, l_new, acc_new = (), (), ()
                    for tile in tl.static_range(tiles):
                        row_len = (kv_len + tile * ROWS + row_in_tile)[:, None]
                        mask = (offs_n[None, :] >= row_len - window) & (offs_n[None, :] < row_len)
                        p, alpha, m_tile, l_tile = softmax_block(
                            queries[tile], keys, mask, m_i[tile], l_i[tile], scale, softcap, SOFTCAP
                        )
                        acc_tile = tl.dot(p.to(dtype), values, acc[tile] * alpha[:, None], input_precision="ieee")
                        m_new += (m_tile,)
                        l_new += (l_tile,)
                        acc_new += (acc_tile,)
                    m_i, l_i, acc = m_new, l_new, acc_new
                for tile in tl.static_range(tiles):
                    row_in_group = tile * ROWS + row_in_tile
                    # A row that lacks the last chunk of its group leaves NaN there, which the merge does not read.
                    mask_h = (row_in_tile < ROWS) & (row_in_group < count)
                    out_rows = out + row_in_group[:, None] * out_t
                    store_chunk(
                        acc[tile], m_i[tile], l_i[tile], v_scale, sinks, partial, lse, out_rows, out_h, row_in_group,
                        chunk, capacity, head, mask_h, H, DV, SINKS, DIRECT,
                    )  # fmt: skip


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes: query heads, KV heads, head dim, sinks, whether a request has one chunk at most."""
    found = []
    for heads, groups, dim, sinks, direct in (
        (24, 4, 256, False, False),
        (64, 8, 64, True, False),
        (64, 8, 64, True, True),
        (64, 8, 128, False, False),
        (32, 4, 512, False, False),
    ):
        one = specialization(chip, heads, groups, dim, "bf16", sinks, direct)
        name = one.name.replace("decode", "verify") + " one chunk" * direct
        signature = {**one.signature, "first_row": "*i32", "num_rows": "*i32"}
        constants = {**one.constants, "TILES": num_tiles(dim, dim)}
        found.append(replace(one, name=name, kernel=verify_kernel, signature=signature, constants=constants))
    return found
