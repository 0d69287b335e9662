"""Latent attention of single queries with many heads, on Hopper: one group of warps reads rows, two groups compute.

Owns: the kernel of `triton_decode.attend_kernel` once more, for 64 heads a program, with its layouts and its order of
events written out. Must not know: anything that the other does not.

Two tiles of 64 keys lie in shared memory beside the queries. Each of the two computing groups scores half of a tile's
keys for all 64 heads, and sums up half of the latent's channels over all of them. Products are queued so that one is
always running while weights are made:

    scores a | scores b | sum a | sum b | scores a of the next pair ...

and a tile is given back to the readers as soon as its sum is done.
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

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16]))
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
def _read(
    c_pool, pe_pool, factors, table, picks, c_tiles, pe_tiles, full, empty, begin, end, many,
    c_page, c_row, pe_page, pe_row, f_page, f_row,
    PAGE: gl.constexpr, PICKED: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Fill tile after tile, one more than there are pairs."""
    rope = gl.arange(0, _R, gl.SliceLayout(0, _READ))
    tiles = 2 * gl.cdiv(end - begin, 2 * _K) + 1
    for i in range(tiles):
        page, offset, there = _place(table, picks, begin + i * _K, end, many, _READ, PAGE, PICKED)
        pe_at = pe_pool + (page * pe_page + offset * pe_row)
        which = i % 2
        if SCALED:
            # The same rows, as the threads that decode hold them.
            page, offset, there_c = _place(table, picks, begin + i * _K, end, many, _DECODE, PAGE, PICKED)
            c_at = c_pool + (page * c_page + offset * c_row)
            f_at = factors + (page * f_page + offset * f_row + _C // 4)
            mbarrier.wait(empty.index(which), (i // 2 + 1) & 1)
            async_copy.async_copy_global_to_shared(
                pe_tiles.index(which), pe_at[:, None] + (rope + (_C + _C // _BLOCK * 4) // 2)[None, :], there[:, None]
            )
            column = gl.arange(0, _BLOCK, gl.SliceLayout(0, _DECODE))
            for block in gl.static_range(_C // _BLOCK):
                factor = gl.load(f_at + block, mask=there_c, other=0.0)
                codes = gl.load(c_at[:, None] + (column + block * _BLOCK)[None, :], mask=there_c[:, None], other=0.0)
                numbers = (codes.to(gl.float32) * factor[:, None]).to(c_tiles.dtype)
                c_tiles.index(which).slice(block * _BLOCK, _BLOCK, dim=1).store(numbers)
            async_copy.commit_group()
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(full.index(which), count=1)
        else:
            c_at = c_pool + (page * c_page + offset * c_row)
            channel = gl.arange(0, _C, gl.SliceLayout(0, _READ))
            mbarrier.wait(empty.index(which), (i // 2 + 1) & 1)
            async_copy.async_copy_global_to_shared(
                pe_tiles.index(which), pe_at[:, None] + rope[None, :], there[:, None]
            )
            async_copy.async_copy_global_to_shared(
                c_tiles.index(which), c_at[:, None] + channel[None, :], there[:, None]
            )
            async_copy.mbarrier_arrive(full.index(which), increment_count=False)


@gluon.jit
def _score(q_c, q_pe, c_tiles, pe_tiles, full, which: gl.constexpr, phase):
    """Queue the logits of a tile [heads, keys]."""
    mbarrier.wait(full.index(which), phase)
    fence_async_shared()
    nothing = gl.zeros([_H, _K], gl.float32, _SCORES)
    logits = warpgroup_mma(q_pe, pe_tiles.index(which).permute((1, 0)), nothing, use_acc=False, is_async=True)
    return warpgroup_mma(q_c, c_tiles.index(which).permute((1, 0)), logits, is_async=True)


@gluon.jit
def _weigh(logits, top, total, factor, start, end, picks, many, PICKED: gl.constexpr):
    """Weights of a tile, the new largest logit, what older sums fade by, and the sums of weights."""
    key = start + gl.arange(0, _K, gl.SliceLayout(0, _SCORES))
    there = key < end
    if PICKED:
        picked = gl.load(picks + key, mask=there & many, other=0)
        there = there & (picked >= 0)
    logits = gl.where(there[None, :], logits * factor, float("-inf"))
    higher = gl.maximum(top, gl.max(logits, 1))
    weights = gl.exp2(logits - higher[:, None])
    fade = gl.exp2(top - higher)
    total = total * fade[:, None] + weights
    return weights, higher, gl.convert_layout(fade, gl.SliceLayout(1, _SUMS)), total


@gluon.jit
def _compute(
    q_c, q_pe, c_tiles, pe_tiles, weights, full, empty, picks, many, begin, end, factor,
    out, lse, head, kv_scale, H: gl.constexpr, PICKED: gl.constexpr, DIRECT: gl.constexpr, out_h,
):  # fmt: skip
    """All of a split, pair after pair of tiles; then the result of the heads."""
    mixed = gl.zeros([_H, _C], gl.float32, _SUMS)
    top = gl.full([_H], _LOWEST, gl.float32, gl.SliceLayout(1, _SCORES))
    total = gl.zeros([_H, _K], gl.float32, _SCORES)
    pairs = gl.cdiv(end - begin, 2 * _K)
    scores_a = _score(q_c, q_pe, c_tiles, pe_tiles, full, 0, 0)
    logits = warpgroup_mma_wait(0, deps=[scores_a])
    for pair in range(pairs):
        start = begin + pair * (2 * _K)
        scores_b = _score(q_c, q_pe, c_tiles, pe_tiles, full, 1, pair & 1)
        made, top, fade, total = _weigh(logits, top, total, factor, start, end, picks, many, PICKED)
        weights.store(made.to(weights.dtype))
        fence_async_shared()
        sums = warpgroup_mma(weights, c_tiles.index(0), mixed * fade[:, None], is_async=True)
        logits = warpgroup_mma_wait(1, deps=[scores_b])
        made, top, fade, total = _weigh(logits, top, total, factor, start + _K, end, picks, many, PICKED)
        mixed = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(0), count=1)
        weights.store(made.to(weights.dtype))
        fence_async_shared()
        sums = warpgroup_mma(weights, c_tiles.index(1), mixed * fade[:, None], is_async=True)
        # The tile behind the last pair is empty: its scores are never looked at.
        scores_a = _score(q_c, q_pe, c_tiles, pe_tiles, full, 0, (pair + 1) & 1)
        mixed = warpgroup_mma_wait(2, deps=[sums])
        mbarrier.arrive(empty.index(1), count=1)
        logits = warpgroup_mma_wait(0, deps=[scores_a])
    sum_of = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, _SUMS))
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


@gluon.jit
def attend_kernel(
    q, q_pe, c_pool, pe_pool, factors, table, request, seen, picks, partial, lse, out,
    scale, kv_scale, topk, splits,
    q_t, q_h, pe_t, pe_h, c_page, c_row, pe_page, pe_row, f_page, f_row, table_b, picks_t, out_t, out_h,
    H: gl.constexpr, PAGE: gl.constexpr, PICKED: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """64 heads of one query over one split of its keys, as in `triton_decode`."""
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
    c_tiles = gl.allocate_shared_memory(kind, [2, _K, _C], layout)
    pe_tiles = gl.allocate_shared_memory(kind, [2, _K, _R], layout)
    weights = gl.allocate_shared_memory(kind, [_H, _K], layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        # Threads that copy each say when their copies have come; who decodes says so once.
        mbarrier.init(full.index(i), count=1 if SCALED else 128)
        mbarrier.init(empty.index(i), count=1)
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
                    queries, queries_pe, c_tiles, pe_tiles, weights, full, empty, picks, many, begin, end, factor,
                    to, lse + place, head, kv_scale, H, PICKED, DIRECT, step,
                ),
            ),
            (
                _read,
                (
                    c_pool, pe_pool, factors, table, picks, c_tiles, pe_tiles, full, empty, begin, end, many,
                    c_page, c_row, pe_page, pe_row, f_page, f_row, PAGE, PICKED, SCALED,
                ),
            ),
        ],
        [4],
        [72],
    )  # fmt: skip
