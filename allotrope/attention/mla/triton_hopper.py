"""Latent attention of single queries with many heads, on Hopper: one group of warps reads rows, two groups compute.

Owns: the kernel of `triton_decode.attend_kernel` once more, for 64 heads a program, with its layouts and its order of
events written out. Must not know: anything that the other does not.

Two tiles of 64 keys lie in shared memory beside the queries, each in two halves of its channels. The first group scores
tile a and owns the left half of the sums, the second scores tile b and owns the right half; each gives its weights to
the other. While one makes weights, the tensor cores work for the other:

    first     scores a | weights a | left += a        | left += b
    second    scores b |       weights b | right += b | right += a

Weights a are relative to the largest logit up to tile a, weights b to that up to tile b: before the first group hands
its own on, they and its sums are made relative to the later one. Of a tile, the half that its own group sums is read
again first, so that the copies of the next pair begin while the others' weights are still multiplied.
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
from allotrope.attention.gluon_versions import barrier
from allotrope.attention.mla.rows import BLOCK, scaled_bytes

LATENT, ROPE = 512, 64
"""The one size of rows that fits."""

# Heads of a program, keys of a tile.
_H = gl.constexpr(64)
_K = gl.constexpr(64)
_HALF = gl.constexpr(LATENT // 2)
_R = gl.constexpr(ROPE)
_LOG2E = gl.constexpr(1.4426950408889634)
_LOWEST = gl.constexpr(-1.0e30)
_BLOCK = gl.constexpr(BLOCK)
# Bytes of a scaled row, of the codes in it, and of what is before its rotated part.
_ROW = gl.constexpr(scaled_bytes(LATENT, ROPE))
_CODES = gl.constexpr(LATENT)
_BEFORE = gl.constexpr(scaled_bytes(LATENT, 0))

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LATENT // 2, 16]))
_GIVEN = gl.constexpr(gl.DotOperandLayout(0, _SUMS.value, 2))
_READ = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_DECODE = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _keys(picks, start, end, many, PICKED: gl.constexpr):
    """The keys of a pair of tiles, one a thread; -1 for none."""
    at = start + gl.arange(0, 2 * _K, _EACH)
    key = at
    if PICKED:
        key = gl.where(many, gl.load(picks + at, mask=(at < end) & many, other=-1).to(gl.int32), at)
    return gl.where(at < end, key, -1)


@gluon.jit
def _rows(table, keys, PAGE: gl.constexpr):
    """The numbers of their rows, counted through all pages; -1 for none."""
    page = gl.load(table + gl.maximum(keys, 0) // PAGE, mask=keys >= 0, other=-1).to(gl.int32)
    return gl.where(page >= 0, page * PAGE + keys % PAGE, -1)


@gluon.jit
def _places(rows, layout: gl.constexpr, PAGE: gl.constexpr):
    """Page and offset of the rows of a tile, and which there are."""
    row = rows.load(gl.SliceLayout(1, layout))
    there = row >= 0
    row = gl.maximum(row, 0)
    return (row // PAGE).to(gl.int64), row % PAGE, there


@gluon.jit
def _copy(at, rope_at, there, tile, rope_tile, full, WITH_ROPE: gl.constexpr):
    """Copy half of a tile's channels, and WITH_ROPE its rotated part; `full` hears of each thread's copies."""
    channel = gl.arange(0, _HALF, gl.SliceLayout(0, _READ))
    if WITH_ROPE:
        rope = gl.arange(0, _R, gl.SliceLayout(0, _READ))
        async_copy.async_copy_global_to_shared(rope_tile, rope_at[:, None] + rope[None, :], there[:, None])
    async_copy.async_copy_global_to_shared(tile, at[:, None] + channel[None, :], there[:, None])
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _read(
    c_pool, pe_pool, table, picks, rows, a_left, a_right, a_rope, b_left, b_right, b_rope, full, empty,
    begin, end, many, c_page, c_row, pe_page, pe_row, PAGE: gl.constexpr, PICKED: gl.constexpr,
):  # fmt: skip
    """Fill both tiles again and again: halves in the order in which they are done with.

    `rows`: the numbers of a pair's rows. Those of the next pair, and the keys of the one after it, are on their way.
    """
    rows.index(0).store(_rows(table, _keys(picks, begin, end, many, PICKED), PAGE))
    keys = _keys(picks, begin + 2 * _K, end, many, PICKED)
    for pair in range(gl.cdiv(end - begin, 2 * _K)):
        before = (pair & 1) ^ 1
        following = _rows(table, keys, PAGE)
        keys = _keys(picks, begin + (pair + 2) * (2 * _K), end, many, PICKED)
        here = rows.index(pair & 1)
        page, offset, there_a = _places(here.slice(0, _K), _READ, PAGE)
        a, a_tail = c_pool + (page * c_page + offset * c_row), pe_pool + (page * pe_page + offset * pe_row)
        page, offset, there_b = _places(here.slice(_K, _K), _READ, PAGE)
        b, b_tail = c_pool + (page * c_page + offset * c_row), pe_pool + (page * pe_page + offset * pe_row)
        mbarrier.wait(empty.index(0), before)
        _copy(a, a_tail, there_a, a_left, a_rope, full.index(0), False)
        mbarrier.wait(empty.index(3), before)
        _copy(b + _HALF, b_tail, there_b, b_right, b_rope, full.index(3), False)
        rows.index((pair + 1) & 1).store(following)
        mbarrier.wait(empty.index(1), before)
        _copy(a + _HALF, a_tail, there_a, a_right, a_rope, full.index(1), True)
        mbarrier.wait(empty.index(2), before)
        _copy(b, b_tail, there_b, b_left, b_rope, full.index(2), True)


@gluon.jit
def _codes(at, factors, there, block):
    """A block's codes and factors."""
    codes = gl.load(at + block * _BLOCK, mask=there[:, None], other=0.0)
    return codes, gl.load(factors + block, mask=there, other=0.0)


@gluon.jit
def _decode(codes, factor, tile):
    """Codes times a power of two, which is exact."""
    tile.store((codes.to(gl.float32) * factor[:, None]).to(tile.dtype))


@gluon.jit
def _copy_rope(pool, rows, tile, pe_page, PAGE: gl.constexpr):
    """Begin to copy the rotated part of a tile's scaled rows."""
    page, offset, there = _places(rows, _READ, PAGE)
    at = pool + (page * pe_page + offset * (_ROW // 2) + _BEFORE // 2)
    rope = gl.arange(0, _R, gl.SliceLayout(0, _READ))
    async_copy.async_copy_global_to_shared(tile, at[:, None] + rope[None, :], there[:, None])
    async_copy.commit_group()


@gluon.jit
def _read_scaled(
    c_pool, pe_pool, factors, table, picks, rows, a_left, a_right, a_rope, b_left, b_right, b_rope, full, empty,
    begin, end, many, c_page, pe_page, f_page, PAGE: gl.constexpr, PICKED: gl.constexpr,
):  # fmt: skip
    """As `_read`, of codes. They are loaded two blocks ahead of where they are decoded."""
    column = gl.arange(0, _BLOCK, gl.SliceLayout(0, _DECODE))
    rows.index(0).store(_rows(table, _keys(picks, begin, end, many, PICKED), PAGE))
    keys = _keys(picks, begin + 2 * _K, end, many, PICKED)
    for pair in range(gl.cdiv(end - begin, 2 * _K)):
        before = (pair & 1) ^ 1
        following = _rows(table, keys, PAGE)
        keys = _keys(picks, begin + (pair + 2) * (2 * _K), end, many, PICKED)
        rows_a, rows_b = rows.index(pair & 1).slice(0, _K), rows.index(pair & 1).slice(_K, _K)
        # Rows of a known length in each of the types that they are read in: loads are as wide as can be.
        page, offset, there_a = _places(rows_a, _DECODE, PAGE)
        a = (c_pool + (page * c_page + offset * _ROW))[:, None] + column[None, :]
        a_factors = factors + (page * f_page + offset * (_ROW // 4) + _CODES // 4)
        page, offset, there_b = _places(rows_b, _DECODE, PAGE)
        b = (c_pool + (page * c_page + offset * _ROW))[:, None] + column[None, :]
        b_factors = factors + (page * f_page + offset * (_ROW // 4) + _CODES // 4)
        codes_0, factor_0 = _codes(a, a_factors, there_a, 0)
        codes_1, factor_1 = _codes(a, a_factors, there_a, 1)
        mbarrier.wait(empty.index(0), before)
        _decode(codes_0, factor_0, a_left.slice(0, _BLOCK, dim=1))
        codes_0, factor_0 = _codes(b, b_factors, there_b, 2)
        _decode(codes_1, factor_1, a_left.slice(_BLOCK, _BLOCK, dim=1))
        codes_1, factor_1 = _codes(b, b_factors, there_b, 3)
        fence_async_shared()
        mbarrier.arrive(full.index(0), count=1)
        mbarrier.wait(empty.index(3), before)
        _decode(codes_0, factor_0, b_right.slice(0, _BLOCK, dim=1))
        codes_0, factor_0 = _codes(a, a_factors, there_a, 2)
        _decode(codes_1, factor_1, b_right.slice(_BLOCK, _BLOCK, dim=1))
        codes_1, factor_1 = _codes(a, a_factors, there_a, 3)
        fence_async_shared()
        mbarrier.arrive(full.index(3), count=1)
        rows.index((pair + 1) & 1).store(following)
        mbarrier.wait(empty.index(1), before)
        _copy_rope(pe_pool, rows_a, a_rope, pe_page, PAGE)
        _decode(codes_0, factor_0, a_right.slice(0, _BLOCK, dim=1))
        codes_0, factor_0 = _codes(b, b_factors, there_b, 0)
        _decode(codes_1, factor_1, a_right.slice(_BLOCK, _BLOCK, dim=1))
        codes_1, factor_1 = _codes(b, b_factors, there_b, 1)
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(full.index(1), count=1)
        mbarrier.wait(empty.index(2), before)
        _copy_rope(pe_pool, rows_b, b_rope, pe_page, PAGE)
        _decode(codes_0, factor_0, b_left.slice(0, _BLOCK, dim=1))
        _decode(codes_1, factor_1, b_left.slice(_BLOCK, _BLOCK, dim=1))
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(full.index(2), count=1)


@gluon.jit
def _load_queries(q, q_pe, left, right, rope_tile, loaded, head, q_h, pe_h, H: gl.constexpr, WHICH: gl.constexpr):
    """Each computing group brings half of the queries to shared memory, and waits for the other half."""
    row = head + gl.arange(0, _H, gl.SliceLayout(1, _READ))
    real = (row < H)[:, None]
    channel = gl.arange(0, _HALF, gl.SliceLayout(0, _READ))
    at = q + row[:, None] * q_h + channel[None, :]
    if WHICH == 0:
        left.index(0).store(gl.load(at, mask=real, other=0.0))
    else:
        right.index(0).store(gl.load(at + _HALF, mask=real, other=0.0))
        rope = gl.arange(0, _R, gl.SliceLayout(0, _READ))
        rope_tile.index(0).store(gl.load(q_pe + row[:, None] * pe_h + rope[None, :], mask=real, other=0.0))
    fence_async_shared()
    mbarrier.arrive(loaded, count=1)
    mbarrier.wait(loaded, 0)


@gluon.jit
def _seen(picks, many, start, end, PICKED: gl.constexpr):
    """Which keys of a tile there are."""
    key = start + gl.arange(0, _K, gl.SliceLayout(0, _SCORES))
    there = key < end
    if PICKED:
        there = there & (gl.load(picks + key, mask=there & many, other=0) >= 0)
    return there


@gluon.jit
def _zero(pair):
    """0, but the compiler does not know: addresses that follow from it are made in each step, for which it has time,
    and not kept in registers, of which it has none.
    """
    return gl.inline_asm_elementwise("shr.u32 $0, $1, 31;", "=r,r", [pair], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _scores(q_near, q_far, q_rope, near, far, rope, full_near, full_far, phase, there, factor):
    """Logits of a tile, whose `near` half comes first."""
    logits = gl.zeros([_H, _K], gl.float32, _SCORES)
    mbarrier.wait(full_near, phase)
    fence_async_shared()
    logits = warpgroup_mma(q_near, near.permute((1, 0)), logits, use_acc=False, is_async=True)
    mbarrier.wait(full_far, phase)
    fence_async_shared()
    logits = warpgroup_mma(q_far, far.permute((1, 0)), logits, is_async=True)
    logits = warpgroup_mma(q_rope, rope.permute((1, 0)), logits, is_async=True)
    logits = warpgroup_mma_wait(0, deps=[logits])
    return gl.where(there[None, :], logits * factor, float("-inf"))


@gluon.jit
def _first(
    q, q_pe, q_left, q_right, q_rope, a_left, a_right, a_rope, b_left, b_rope, full, empty, said, numbers, picks, many,
    begin, end, factor, out, lse, head, kv_scale, q_h, pe_h, out_h,
    H: gl.constexpr, PICKED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """The first computing group: scores of tile a, left half of the sums. Weights lie in the rotated part of a tile,
    which is done with once it has scores. `said`: top a, top b, weights a, weights b, queries."""
    _load_queries(q, q_pe, q_left, q_right, q_rope, said.index(4), head, q_h, pe_h, H, 0)
    mixed = gl.zeros([_H, _HALF], gl.float32, _SUMS)
    top = gl.full([_H], _LOWEST, gl.float32, gl.SliceLayout(1, _SCORES))
    total = gl.zeros([_H], gl.float32, gl.SliceLayout(1, _SCORES))
    pairs = gl.cdiv(end - begin, 2 * _K)
    for pair in range(pairs):
        phase = pair & 1
        zero = _zero(pair)
        there = _seen(picks, many, begin + pair * (2 * _K), end, PICKED)
        logits = _scores(
            q_left.index(zero), q_right.index(zero), q_rope.index(zero), a_left, a_right, a_rope,
            full.index(0), full.index(1), phase, there, factor,
        )  # fmt: skip
        higher = gl.maximum(top, gl.max(logits, 1))
        numbers.index(0).store(higher)
        mbarrier.arrive(said.index(0), count=1)
        weights = gl.exp2(logits - higher[:, None])
        fade = gl.exp2(top - higher)
        mixed = mixed * gl.convert_layout(fade, gl.SliceLayout(1, _SUMS))[:, None]
        total = total * fade + gl.sum(weights, 1)
        weights = weights.to(a_left.dtype)
        sums = warpgroup_mma(gl.convert_layout(weights, _GIVEN), a_left, mixed, is_async=True)
        mbarrier.wait(said.index(1), phase)
        top = numbers.index(1).load(gl.SliceLayout(1, _SCORES))
        fade = gl.exp2(higher - top)
        a_rope.store((weights.to(gl.float32) * fade[:, None]).to(a_left.dtype))
        fence_async_shared()
        mbarrier.arrive(said.index(2), count=1)
        total = total * fade
        mixed = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(0), count=1)
        mixed = mixed * gl.convert_layout(fade, gl.SliceLayout(1, _SUMS))[:, None]
        # Tile b has come, for it has weights; here it is asked for once more, for this group to see it.
        mbarrier.wait(full.index(2), phase)
        mbarrier.wait(said.index(3), phase)
        fence_async_shared()
        sums = warpgroup_mma(b_rope, b_left, mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(2), count=1)
    _finish(mixed, top, total, numbers, said, pairs, out, lse, head, kv_scale, out_h, begin < end, H, DIRECT, 0)


@gluon.jit
def _second(
    q, q_pe, q_left, q_right, q_rope, a_right, a_rope, b_left, b_right, b_rope, full, empty, said, numbers, picks, many,
    begin, end, factor, out, lse, head, kv_scale, q_h, pe_h, out_h,
    H: gl.constexpr, PICKED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """The second computing group: scores of tile b, right half of the sums."""
    _load_queries(q, q_pe, q_left, q_right, q_rope, said.index(4), head, q_h, pe_h, H, 1)
    mixed = gl.zeros([_H, _HALF], gl.float32, _SUMS)
    top = gl.full([_H], _LOWEST, gl.float32, gl.SliceLayout(1, _SCORES))
    total = gl.zeros([_H], gl.float32, gl.SliceLayout(1, _SCORES))
    pairs = gl.cdiv(end - begin, 2 * _K)
    for pair in range(pairs):
        phase = pair & 1
        zero = _zero(pair)
        there = _seen(picks, many, begin + pair * (2 * _K) + _K, end, PICKED)
        logits = _scores(
            q_right.index(zero), q_left.index(zero), q_rope.index(zero), b_right, b_left, b_rope,
            full.index(3), full.index(2), phase, there, factor,
        )  # fmt: skip
        own = gl.max(logits, 1)
        mbarrier.wait(said.index(0), phase)
        higher = gl.maximum(numbers.index(0).load(gl.SliceLayout(1, _SCORES)), own)
        numbers.index(1).store(higher)
        mbarrier.arrive(said.index(1), count=1)
        weights = gl.exp2(logits - higher[:, None])
        fade = gl.exp2(top - higher)
        top = higher
        total = total * fade + gl.sum(weights, 1)
        weights = weights.to(b_right.dtype)
        b_rope.store(weights)
        fence_async_shared()
        mbarrier.arrive(said.index(3), count=1)
        mixed = mixed * gl.convert_layout(fade, gl.SliceLayout(1, _SUMS))[:, None]
        sums = warpgroup_mma(gl.convert_layout(weights, _GIVEN), b_right, mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(3), count=1)
        mbarrier.wait(full.index(1), phase)
        mbarrier.wait(said.index(2), phase)
        fence_async_shared()
        sums = warpgroup_mma(a_rope, a_right, mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(1), count=1)
    _finish(mixed, top, total, numbers, said, pairs, out, lse, head, kv_scale, out_h, begin < end, H, DIRECT, 1)


@gluon.jit
def _finish(
    mixed, top, total, numbers, said, pairs, out, lse, head, kv_scale, out_h, any_keys,
    H: gl.constexpr, DIRECT: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """A group's half of the result: both groups' totals are relative to the same top."""
    numbers.index(WHICH).store(total)
    mbarrier.arrive(said.index(WHICH), count=1)
    mbarrier.wait(said.index(1 - WHICH), pairs & 1)
    total += numbers.index(1 - WHICH).load(gl.SliceLayout(1, _SCORES))
    sum_of = gl.convert_layout(total, gl.SliceLayout(1, _SUMS))
    row = head + gl.arange(0, _H, gl.SliceLayout(1, _SUMS))
    channel = WHICH * _HALF + gl.arange(0, _HALF, gl.SliceLayout(0, _SUMS))
    # The largest logit of a row adds 1, so the bound touches only queries that see nothing.
    mixed = mixed * (kv_scale / gl.maximum(sum_of, 1.0))[:, None]
    kept = row < H
    if not DIRECT:
        kept = kept & any_keys
    to = out + row[:, None] * out_h + channel[None, :]
    gl.store(to, mixed.to(out.dtype.element_ty), mask=kept[:, None])
    if not DIRECT and WHICH == 0:
        largest = gl.convert_layout(top, gl.SliceLayout(1, _SUMS))
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
    # Each is memory of its own: what is known to be apart needs no barrier.
    q_left = gl.allocate_shared_memory(kind, [1, _H, _HALF], layout)
    q_right = gl.allocate_shared_memory(kind, [1, _H, _HALF], layout)
    q_rope = gl.allocate_shared_memory(kind, [1, _H, _R], layout)
    a_left = gl.allocate_shared_memory(kind, [_K, _HALF], layout)
    a_right = gl.allocate_shared_memory(kind, [_K, _HALF], layout)
    a_rope = gl.allocate_shared_memory(kind, [_K, _R], layout)
    b_left = gl.allocate_shared_memory(kind, [_K, _HALF], layout)
    b_right = gl.allocate_shared_memory(kind, [_K, _HALF], layout)
    b_rope = gl.allocate_shared_memory(kind, [_K, _R], layout)
    numbers = gl.allocate_shared_memory(gl.float32, [2, _H], _NUMBERS)
    rows = gl.allocate_shared_memory(gl.int32, [2, 2 * _K], _NUMBERS)
    # Halves of tiles: left of a, right of a, left of b, right of b; the later half of each brings the rotated part.
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    said = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        # Threads that copy say one by one when their copies have come; who decodes says so once.
        mbarrier.init(full.index(i), count=1 if SCALED else 128)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(said.index(i), count=1)
    mbarrier.init(said.index(4), count=2)
    fence_async_shared()
    barrier()
    place = (query * splits + split) * H
    if DIRECT:
        to = out + query * out_t
        step = out_h
    else:
        to = partial + place * (2 * _HALF)
        step = 2 * _HALF
    factor = scale * kv_scale * _LOG2E
    q += query * q_t
    q_pe += query * pe_t
    if SCALED:
        gl.warp_specialize(
            [
                (_read_scaled, (c_pool, pe_pool, factors, table, picks, rows, a_left, a_right, a_rope, b_left, b_right,
                                b_rope, full, empty, begin, end, many, c_page, pe_page, f_page, PAGE, PICKED)),
                (_first, (q, q_pe, q_left, q_right, q_rope, a_left, a_right, a_rope, b_left, b_rope, full, empty, said,
                          numbers, picks, many, begin, end, factor, to, lse + place, head, kv_scale, q_h, pe_h, step,
                          H, PICKED, DIRECT)),
                (_second, (q, q_pe, q_left, q_right, q_rope, a_right, a_rope, b_left, b_right, b_rope, full, empty,
                           said, numbers, picks, many, begin, end, factor, to, lse + place, head, kv_scale, q_h, pe_h,
                           step, H, PICKED, DIRECT)),
            ],
            [4, 4],
            [200, 200],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_read, (c_pool, pe_pool, table, picks, rows, a_left, a_right, a_rope, b_left, b_right, b_rope, full,
                         empty, begin, end, many, c_page, c_row, pe_page, pe_row, PAGE, PICKED)),
                (_first, (q, q_pe, q_left, q_right, q_rope, a_left, a_right, a_rope, b_left, b_rope, full, empty, said,
                          numbers, picks, many, begin, end, factor, to, lse + place, head, kv_scale, q_h, pe_h, step,
                          H, PICKED, DIRECT)),
                (_second, (q, q_pe, q_left, q_right, q_rope, a_right, a_rope, b_left, b_right, b_rope, full, empty,
                           said, numbers, picks, many, begin, end, factor, to, lse + place, head, kv_scale, q_h, pe_h,
                           step, H, PICKED, DIRECT)),
            ],
            [4, 4],
            [216, 216],
        )  # fmt: skip
