"""Latent attention of single queries with many heads, on Hopper: one group of warps reads rows, two groups compute.

Owns: the kernel of `triton_decode.attend_kernel` once more, for 64 heads a program, with its layouts and its order of
events written out. Must not know: anything that the other does not.

Two tiles of 64 keys lie in shared memory beside the queries. Each of the two computing groups scores half of a tile's
keys for all 64 heads, and sums up half of the latent's channels over all of them. Products are queued so that one is
always running while weights are made:

    scores a | scores b | sum a | sum b | scores a of the next pair ...

and a tile is given back to the readers as soon as its sum is done. Tiles come in two halves of their channels, so that
scores begin with the first.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from allotrope.attention.early import await_turn, early
from allotrope.attention.mla.rows import scaled_bytes

HEADS = 64
KEYS = 64
PAIR = 2 * KEYS
"""Keys of one step: a split has a multiple of so many."""
LATENT, ROPE = 512, 64
"""The one size of rows that fits."""

_H = gl.constexpr(HEADS)
_K = gl.constexpr(KEYS)
_C = gl.constexpr(LATENT)
_R = gl.constexpr(ROPE)
_LOG2E = gl.constexpr(1.4426950408889634)
_LOWEST = gl.constexpr(-1.0e30)
_BLOCK = gl.constexpr(128)
# Bytes of a scaled row.
_ROW = gl.constexpr(scaled_bytes(LATENT, ROPE))

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16]))
_READ = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_DECODE = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))


@gluon.jit
def _place(table, picks, start, end, many, layout: gl.constexpr, PAGE: gl.constexpr, PICKED: gl.constexpr):
    """Page and offset of the keys of a tile, and which there are."""
    key = start + gl.arange(0, _K, gl.SliceLayout(1, layout))
    there = key < end
    if PICKED:
        picked = gl.load(picks + key, mask=there & many, other=-1).to(gl.int32)
        key = gl.where(many, picked, key)
        there = there & (key >= 0)
        key = gl.maximum(key, 0)
    page = gl.load(table + key // PAGE, mask=there, other=-1).to(gl.int64)
    return page, key % PAGE, there & (page >= 0)


@gluon.jit
def _decoded(codes, factor, kind: gl.constexpr):
    """Codes times a power of two, which is exact."""
    return (codes.to(gl.float32) * factor[:, None]).to(kind)


@gluon.jit
def _fill(
    c_pool, pe_pool, factors, table, picks, c_tile, pe_tile, full_0, full_1, empty, phase, start, end, many,
    c_page, c_row, pe_page, pe_row, f_page, f_row,
    PAGE: gl.constexpr, PICKED: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Read the keys `start` and behind it into a tile, in two halves of the channels."""
    rope = gl.arange(0, _R, gl.SliceLayout(0, _READ))
    half: gl.constexpr = _C // 2
    page, offset, there = _place(table, picks, start, end, many, _READ, PAGE, PICKED)
    if SCALED:
        # Rows of a known length in each of the types that they are read in: loads are as wide as can be.
        pe_at = pe_pool + (page * pe_page + offset * (_ROW // 2) + (_C + _C // _BLOCK * 4) // 2)
        # The same rows, as the threads that decode hold them.
        page, offset, there_c = _place(table, picks, start, end, many, _DECODE, PAGE, PICKED)
        c_at = c_pool + (page * c_page + offset * _ROW)
        f_at = factors + (page * f_page + offset * (_ROW // 4) + _C // 4)
        column = gl.arange(0, _BLOCK, gl.SliceLayout(0, _DECODE))
        at = c_at[:, None] + column[None, :]
        kept = there_c[:, None]
        kind: gl.constexpr = c_tile.dtype
        # Always two blocks ahead of what is decoded.
        codes_0 = gl.load(at, mask=kept, other=0.0)
        codes_1 = gl.load(at + _BLOCK, mask=kept, other=0.0)
        factor_0 = gl.load(f_at, mask=there_c, other=0.0)
        factor_1 = gl.load(f_at + 1, mask=there_c, other=0.0)
        factor_2 = gl.load(f_at + 2, mask=there_c, other=0.0)
        factor_3 = gl.load(f_at + 3, mask=there_c, other=0.0)
        mbarrier.wait(empty, phase ^ 1)
        async_copy.async_copy_global_to_shared(pe_tile, pe_at[:, None] + rope[None, :], there[:, None])
        async_copy.commit_group()
        c_tile.slice(0, _BLOCK, dim=1).store(_decoded(codes_0, factor_0, kind))
        codes_2 = gl.load(at + 2 * _BLOCK, mask=kept, other=0.0)
        c_tile.slice(_BLOCK, _BLOCK, dim=1).store(_decoded(codes_1, factor_1, kind))
        codes_3 = gl.load(at + 3 * _BLOCK, mask=kept, other=0.0)
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(full_0, count=1)
        c_tile.slice(2 * _BLOCK, _BLOCK, dim=1).store(_decoded(codes_2, factor_2, kind))
        c_tile.slice(3 * _BLOCK, _BLOCK, dim=1).store(_decoded(codes_3, factor_3, kind))
        fence_async_shared()
        mbarrier.arrive(full_1, count=1)
    else:
        pe_at = pe_pool + (page * pe_page + offset * pe_row)
        c_at = c_pool + (page * c_page + offset * c_row)
        channel = gl.arange(0, half, gl.SliceLayout(0, _READ))
        mbarrier.wait(empty, phase ^ 1)
        async_copy.async_copy_global_to_shared(pe_tile, pe_at[:, None] + rope[None, :], there[:, None])
        async_copy.async_copy_global_to_shared(
            c_tile.slice(0, half, dim=1), c_at[:, None] + channel[None, :], there[:, None]
        )
        async_copy.mbarrier_arrive(full_0, increment_count=False)
        async_copy.async_copy_global_to_shared(
            c_tile.slice(half, half, dim=1), c_at[:, None] + (channel + half)[None, :], there[:, None]
        )
        async_copy.mbarrier_arrive(full_1, increment_count=False)


@gluon.jit
def _read(
    c_pool, pe_pool, factors, table, picks, c_tiles, pe_tiles, full_0, full_1, empty_a, empty_b,
    begin, end, many, c_page, c_row, pe_page, pe_row, f_page, f_row,
    PAGE: gl.constexpr, PICKED: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Fill both tiles again and again."""
    for pair in range(gl.cdiv(end - begin, 2 * _K)):
        start = begin + pair * (2 * _K)
        _fill(
            c_pool, pe_pool, factors, table, picks, c_tiles.slice(0, _K, dim=0), pe_tiles.slice(0, _K, dim=0),
            full_0, full_1, empty_a, pair & 1, start, end, many,
            c_page, c_row, pe_page, pe_row, f_page, f_row, PAGE, PICKED, SCALED,
        )  # fmt: skip
        _fill(
            c_pool, pe_pool, factors, table, picks, c_tiles.slice(_K, _K, dim=0), pe_tiles.slice(_K, _K, dim=0),
            full_0, full_1, empty_b, pair & 1, start + _K, end, many,
            c_page, c_row, pe_page, pe_row, f_page, f_row, PAGE, PICKED, SCALED,
        )  # fmt: skip


@gluon.jit
def _compute(
    q_c, q_pe, c_tiles, pe_tiles, full_0, full_1, empty_a, empty_b, picks, many, begin, end, factor,
    out, lse, head, kv_scale, H: gl.constexpr, PICKED: gl.constexpr, DIRECT: gl.constexpr, out_h,
):  # fmt: skip
    """All of a split, pair after pair of tiles; then the result of the heads.

    The rotated part of the tiles is done with once they have scores: its memory takes the weights.
    """
    half: gl.constexpr = _C // 2
    mixed = gl.zeros([_H, _C], gl.float32, _SUMS)
    top = gl.full([_H], _LOWEST, gl.float32, gl.SliceLayout(1, _SCORES))
    total = gl.zeros([_H], gl.float32, gl.SliceLayout(1, _SCORES))
    weights = pe_tiles._reinterpret(pe_tiles.dtype, [_H, 2 * _K], pe_tiles.layout)
    in_pair = gl.arange(0, 2 * _K, gl.SliceLayout(0, _SCORES))
    for pair in range(gl.cdiv(end - begin, 2 * _K)):
        key = begin + pair * (2 * _K) + in_pair
        there = key < end
        if PICKED:
            picked = gl.load(picks + key, mask=there & many, other=0)
            there = there & (picked >= 0)
        mbarrier.wait(full_0, pair & 1)
        fence_async_shared()
        logits = gl.zeros([_H, 2 * _K], gl.float32, _SCORES)
        logits = warpgroup_mma(q_pe, pe_tiles.permute((1, 0)), logits, use_acc=False, is_async=True)
        first, second = c_tiles.slice(0, half, dim=1), c_tiles.slice(half, half, dim=1)
        logits = warpgroup_mma(q_c.slice(0, half, dim=1), first.permute((1, 0)), logits, is_async=True)
        mbarrier.wait(full_1, pair & 1)
        fence_async_shared()
        logits = warpgroup_mma(q_c.slice(half, half, dim=1), second.permute((1, 0)), logits, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        logits = gl.where(there[None, :], logits * factor, float("-inf"))
        higher = gl.maximum(top, gl.max(logits, 1))
        made = gl.exp2(logits - higher[:, None])
        fade = gl.exp2(top - higher)
        top = higher
        weights.store(made.to(pe_tiles.dtype))
        fence_async_shared()
        mixed = mixed * gl.convert_layout(fade, gl.SliceLayout(1, _SUMS))[:, None]
        sums = warpgroup_mma(weights.slice(0, _K, dim=1), c_tiles.slice(0, _K, dim=0), mixed, is_async=True)
        sums = warpgroup_mma(weights.slice(_K, _K, dim=1), c_tiles.slice(_K, _K, dim=0), sums, is_async=True)
        total = total * fade + gl.sum(made, 1)
        sums = warpgroup_mma_wait(1, deps=[sums])
        mbarrier.arrive(empty_a, count=1)
        mixed = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty_b, count=1)
    sum_of = gl.convert_layout(total, gl.SliceLayout(1, _SUMS))
    largest = gl.convert_layout(top, gl.SliceLayout(1, _SUMS))
    row = head + gl.arange(0, _H, gl.SliceLayout(1, _SUMS))
    channel = gl.arange(0, _C, gl.SliceLayout(0, _SUMS))
    mixed = mixed * (kv_scale / gl.maximum(sum_of, 1.0))[:, None]
    kept = row < H
    if not DIRECT:
        kept = kept & (begin < end)
    to = out + row[:, None] * out_h + channel[None, :]
    gl.store(to, mixed.to(out.dtype.element_ty), mask=kept[:, None])
    if not DIRECT:
        found = gl.where(sum_of > 0.0, largest + gl.log2(gl.maximum(sum_of, 1.0)), _LOWEST)
        gl.store(lse + row, found, mask=kept)


@early
@gluon.jit
def attend_kernel(
    q, q_pe, c_pool, pe_pool, factors, table, request, seen, picks, partial, lse, out,
    scale, kv_scale, topk, splits,
    q_t, q_h, pe_t, pe_h, c_page, c_row, pe_page, pe_row, f_page, f_row, table_b, picks_t, out_t, out_h,
    H: gl.constexpr, PAGE: gl.constexpr, PICKED: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """64 heads of one query over one split of its keys, as in `triton_decode`."""
    await_turn()
    head = gl.program_id(0) * _H
    split = gl.program_id(1)
    query = gl.program_id(2).to(gl.int64)
    n = gl.load(seen + query)
    many = n > topk
    if PICKED:
        n = gl.minimum(n, topk)
    size = gl.cdiv(gl.cdiv(n, 2 * _K), splits) * (2 * _K)
    begin = split * size
    end = gl.maximum(begin, gl.minimum(begin + size, n))
    table += gl.load(request + query).to(gl.int64) * table_b
    picks += query * picks_t
    kind: gl.constexpr = q.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(kind, [_H, _C], layout)
    queries_pe = gl.allocate_shared_memory(kind, [_H, _R], layout)
    # Each is memory of its own: what is known to be apart needs no barrier.
    c_tiles = gl.allocate_shared_memory(kind, [2 * _K, _C], layout)
    pe_tiles = gl.allocate_shared_memory(kind, [2 * _K, _R], layout)
    full_0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty_a = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty_b = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    # Of each tile, threads that copy say one by one when their copies have come; who decodes says so once.
    readers: gl.constexpr = 2 if SCALED else 256
    mbarrier.init(full_0, count=readers)
    mbarrier.init(full_1, count=readers)
    mbarrier.init(empty_a, count=1)
    mbarrier.init(empty_b, count=1)
    row = head + gl.arange(0, _H, gl.SliceLayout(1, _QUERY))
    channel = gl.arange(0, _C, gl.SliceLayout(0, _QUERY))
    rope = gl.arange(0, _R, gl.SliceLayout(0, _QUERY))
    real = (row < H)[:, None]
    queries.store(gl.load(q + query * q_t + row[:, None] * q_h + channel[None, :], mask=real, other=0.0))
    queries_pe.store(gl.load(q_pe + query * pe_t + row[:, None] * pe_h + rope[None, :], mask=real, other=0.0))
    fence_async_shared()
    place = (query * splits + split) * H
    if DIRECT:
        to = out + query * out_t
        step = out_h
    else:
        to = partial + place * _C
        step = _C
    factor = scale * kv_scale * _LOG2E
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    queries, queries_pe, c_tiles, pe_tiles, full_0, full_1, empty_a, empty_b, picks, many,
                    begin, end, factor,
                    to, lse + place, head, kv_scale, H, PICKED, DIRECT, step,
                ),
            ),
            (
                _read,
                (
                    c_pool, pe_pool, factors, table, picks, c_tiles, pe_tiles, full_0, full_1, empty_a, empty_b,
                    begin, end, many,
                    c_page, c_row, pe_page, pe_row, f_page, f_row, PAGE, PICKED, SCALED,
                ),
            ),
        ],
        [4],
        [80 if SCALED else 56],
    )  # fmt: skip
