"""How the rows of two tiles come to shared memory on Hopper: what the reading group of `triton_hopper` does.

Owns: which rows a tile has, by picks and pages, and how their bytes become numbers. Must not know: what is computed.

Tiles a and b of 64 keys lie in two halves of their channels each. `full` and `empty`: barriers of left of a, right of
a, left of b, right of b; the later half of a tile brings the rotated part.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from allotrope.attention.mla.rows import BLOCK, scaled_bytes
from allotrope.kernels.gluon.versions import load_rows

_LATENT, _ROPE = 512, 64
# Keys of a tile, and the one size of rows that fits: half of the channels, rotated ones.
KEYS, HALF, ROPE = gl.constexpr(64), gl.constexpr(_LATENT // 2), gl.constexpr(_ROPE)
_BLOCK = gl.constexpr(BLOCK)
# Bytes of a scaled row, of the codes in it, and of what is before its rotated part.
_ROW = gl.constexpr(scaled_bytes(_LATENT, _ROPE))
_CODES = gl.constexpr(_LATENT)
_BEFORE = gl.constexpr(scaled_bytes(_LATENT, 0))

READ = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_DECODE = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _keys(picks, start, end, many, PICKED: gl.constexpr):
    """The keys of a pair of tiles, one a thread; -1 for none."""
    at = start + gl.arange(0, 2 * KEYS, _EACH)
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
    channel = gl.arange(0, HALF, gl.SliceLayout(0, READ))
    if WITH_ROPE:
        rope = gl.arange(0, ROPE, gl.SliceLayout(0, READ))
        load_rows(rope_tile, rope_at[:, None] + rope[None, :], there[:, None])
    load_rows(tile, at[:, None] + channel[None, :], there[:, None])
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def read(
    c_pool, pe_pool, table, picks, rows, a_left, a_right, a_rope, b_left, b_right, b_rope, full, empty,
    begin, end, many, c_page, c_row, pe_page, pe_row, PAGE: gl.constexpr, PICKED: gl.constexpr,
):  # fmt: skip
    """Fill both tiles again and again: halves in the order in which they are done with.

    `rows`: the numbers of a pair's rows. Those of the next pair, and the keys of the one after it, are on their way.
    """
    rows.index(0).store(_rows(table, _keys(picks, begin, end, many, PICKED), PAGE))
    keys = _keys(picks, begin + 2 * KEYS, end, many, PICKED)
    for pair in range(gl.cdiv(end - begin, 2 * KEYS)):
        before = (pair & 1) ^ 1
        following = _rows(table, keys, PAGE)
        keys = _keys(picks, begin + (pair + 2) * (2 * KEYS), end, many, PICKED)
        here = rows.index(pair & 1)
        page, offset, there_a = _places(here.slice(0, KEYS), READ, PAGE)
        a, a_tail = c_pool + (page * c_page + offset * c_row), pe_pool + (page * pe_page + offset * pe_row)
        page, offset, there_b = _places(here.slice(KEYS, KEYS), READ, PAGE)
        b, b_tail = c_pool + (page * c_page + offset * c_row), pe_pool + (page * pe_page + offset * pe_row)
        mbarrier.wait(empty.index(0), before)
        _copy(a, a_tail, there_a, a_left, a_rope, full.index(0), False)
        mbarrier.wait(empty.index(3), before)
        _copy(b + HALF, b_tail, there_b, b_right, b_rope, full.index(3), False)
        rows.index((pair + 1) & 1).store(following)
        mbarrier.wait(empty.index(1), before)
        _copy(a + HALF, a_tail, there_a, a_right, a_rope, full.index(1), True)
        mbarrier.wait(empty.index(2), before)
        _copy(b, b_tail, there_b, b_left, b_rope, full.index(2), True)


@gluon.jit
def _scaled(pool, factors, rows, column, c_page, f_page, PAGE: gl.constexpr):
    """Where the first block of codes and the factors of a tile's rows are, and which rows there are. Rows are of a
    known length in each of the types that they are read in: loads are as wide as can be.
    """
    page, offset, there = _places(rows, _DECODE, PAGE)
    at = (pool + (page * c_page + offset * _ROW))[:, None] + column[None, :]
    return at, factors + (page * f_page + offset * (_ROW // 4) + _CODES // 4), there


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
    page, offset, there = _places(rows, READ, PAGE)
    at = pool + (page * pe_page + offset * (_ROW // 2) + _BEFORE // 2)
    rope = gl.arange(0, ROPE, gl.SliceLayout(0, READ))
    load_rows(tile, at[:, None] + rope[None, :], there[:, None])
    async_copy.commit_group()


@gluon.jit
def read_scaled(
    c_pool, pe_pool, factors, table, picks, rows, a_left, a_right, a_rope, b_left, b_right, b_rope, full, empty,
    begin, end, many, c_page, pe_page, f_page, PAGE: gl.constexpr, PICKED: gl.constexpr,
):  # fmt: skip
    """As `read`, of codes. They are loaded two blocks ahead of where they are decoded."""
    column = gl.arange(0, _BLOCK, gl.SliceLayout(0, _DECODE))
    rows.index(0).store(_rows(table, _keys(picks, begin, end, many, PICKED), PAGE))
    keys = _keys(picks, begin + 2 * KEYS, end, many, PICKED)
    for pair in range(gl.cdiv(end - begin, 2 * KEYS)):
        before = (pair & 1) ^ 1
        following = _rows(table, keys, PAGE)
        keys = _keys(picks, begin + (pair + 2) * (2 * KEYS), end, many, PICKED)
        rows_a, rows_b = rows.index(pair & 1).slice(0, KEYS), rows.index(pair & 1).slice(KEYS, KEYS)
        a, a_factors, there_a = _scaled(c_pool, factors, rows_a, column, c_page, f_page, PAGE)
        b, b_factors, there_b = _scaled(c_pool, factors, rows_b, column, c_page, f_page, PAGE)
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
