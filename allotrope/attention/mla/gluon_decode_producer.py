"""The producer warpgroup of `gluon_decode`: it loads two tiles of the latent KV cache to shared memory.

Owns: the cache slots of a tile, by sparse indices and page table, and dequantization. Must not know: the computation.

Tiles a and b of 64 keys lie in two halves of their channels each. `ready_bars` and `free_bars`: mbarriers of left of a,
right of a, left of b, right of b; the later half of a tile includes its rope part.
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
# Keys of a tile, and the one size that fits: half of the latent dim, and the rope dim.
BLOCK_N, HALF, ROPE = gl.constexpr(64), gl.constexpr(_LATENT // 2), gl.constexpr(_ROPE)
_BLOCK = gl.constexpr(BLOCK)
# Bytes of a block-scaled cache entry, of its quantized values, and before its rope part.
_ENTRY_BYTES = gl.constexpr(scaled_bytes(_LATENT, _ROPE))
_VALUE_BYTES = gl.constexpr(_LATENT)
_ROPE_OFFSET = gl.constexpr(scaled_bytes(_LATENT, 0))

LOAD_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_DEQUANT_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_VECTOR_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _positions(topk_indices, start, end, is_sparse, SPARSE: gl.constexpr):
    """The positions of a pair of tiles, one for each thread; -1 for none."""
    offs_n = start + gl.arange(0, 2 * BLOCK_N, _VECTOR_LAYOUT)
    position = offs_n
    if SPARSE:
        position = gl.where(
            is_sparse, gl.load(topk_indices + offs_n, mask=(offs_n < end) & is_sparse, other=-1).to(gl.int32), offs_n
        )
    return gl.where(offs_n < end, position, -1)


@gluon.jit
def _slots(table, positions, PAGE: gl.constexpr):
    """The cache slots of positions; -1 for none."""
    page = gl.load(table + gl.maximum(positions, 0) // PAGE, mask=positions >= 0, other=-1).to(gl.int32)
    return gl.where(page >= 0, page * PAGE + positions % PAGE, -1)


@gluon.jit
def _split_slots(slot_buffer, layout: gl.constexpr, PAGE: gl.constexpr):
    """Page, offset in the page, and mask of the keys of a tile."""
    slot = slot_buffer.load(gl.SliceLayout(1, layout))
    mask_n = slot >= 0
    slot = gl.maximum(slot, 0)
    return (slot // PAGE).to(gl.int64), slot % PAGE, mask_n


@gluon.jit
def _copy(ptrs, pe_ptrs, mask_n, tile, rope_tile, ready_bar, WITH_ROPE: gl.constexpr):
    """Copy half of a tile's channels, and WITH_ROPE its rope part; each thread's copies arrive at `ready_bar`."""
    offs_c = gl.arange(0, HALF, gl.SliceLayout(0, LOAD_LAYOUT))
    if WITH_ROPE:
        offs_r = gl.arange(0, ROPE, gl.SliceLayout(0, LOAD_LAYOUT))
        load_rows(rope_tile, pe_ptrs[:, None] + offs_r[None, :], mask_n[:, None])
    load_rows(tile, ptrs[:, None] + offs_c[None, :], mask_n[:, None])
    async_copy.mbarrier_arrive(ready_bar, increment_count=False)


@gluon.jit
def produce(
    c_pool, pe_pool, table, topk_indices, slot_buffer, a_left, a_right, a_rope, b_left, b_right, b_rope, ready_bars,
    free_bars, begin, end, is_sparse, c_page, c_row, pe_page, pe_row, PAGE: gl.constexpr, SPARSE: gl.constexpr,
):  # fmt: skip
    """Load both tiles of every pair, halves in the order in which the consumers free them.

    `slot_buffer`: the slots of a pair of tiles. Those of the next pair, and the positions of the one after it, are
    prefetched.
    """
    slot_buffer.index(0).store(_slots(table, _positions(topk_indices, begin, end, is_sparse, SPARSE), PAGE))
    positions = _positions(topk_indices, begin + 2 * BLOCK_N, end, is_sparse, SPARSE)
    for pair in range(gl.cdiv(end - begin, 2 * BLOCK_N)):
        free_phase = (pair & 1) ^ 1
        next_slots = _slots(table, positions, PAGE)
        positions = _positions(topk_indices, begin + (pair + 2) * (2 * BLOCK_N), end, is_sparse, SPARSE)
        pair_slots = slot_buffer.index(pair & 1)
        page, offset, mask_a = _split_slots(pair_slots.slice(0, BLOCK_N), LOAD_LAYOUT, PAGE)
        a, a_pe = c_pool + (page * c_page + offset * c_row), pe_pool + (page * pe_page + offset * pe_row)
        page, offset, mask_b = _split_slots(pair_slots.slice(BLOCK_N, BLOCK_N), LOAD_LAYOUT, PAGE)
        b, b_pe = c_pool + (page * c_page + offset * c_row), pe_pool + (page * pe_page + offset * pe_row)
        mbarrier.wait(free_bars.index(0), free_phase)
        _copy(a, a_pe, mask_a, a_left, a_rope, ready_bars.index(0), False)
        mbarrier.wait(free_bars.index(3), free_phase)
        _copy(b + HALF, b_pe, mask_b, b_right, b_rope, ready_bars.index(3), False)
        slot_buffer.index((pair + 1) & 1).store(next_slots)
        mbarrier.wait(free_bars.index(1), free_phase)
        _copy(a + HALF, a_pe, mask_a, a_right, a_rope, ready_bars.index(1), True)
        mbarrier.wait(free_bars.index(2), free_phase)
        _copy(b, b_pe, mask_b, b_left, b_rope, ready_bars.index(2), True)


@gluon.jit
def _entry_ptrs(pool, scales, slot_buffer, offs_c, c_page, scale_page, PAGE: gl.constexpr):
    """Pointers to the first block of quantized values and to the scales of a tile, and its mask.

    The size of an entry is a constant in each of the types that it is read in, so that loads are as wide as possible.
    """
    page, offset, mask_n = _split_slots(slot_buffer, _DEQUANT_LAYOUT, PAGE)
    ptrs = (pool + (page * c_page + offset * _ENTRY_BYTES))[:, None] + offs_c[None, :]
    return ptrs, scales + (page * scale_page + offset * (_ENTRY_BYTES // 4) + _VALUE_BYTES // 4), mask_n


@gluon.jit
def _load_block(ptrs, scales, mask_n, block):
    """A block's quantized values and scales."""
    values = gl.load(ptrs + block * _BLOCK, mask=mask_n[:, None], other=0.0)
    return values, gl.load(scales + block, mask=mask_n, other=0.0)


@gluon.jit
def _dequantize(values, scale, tile):
    """Dequantize a block; the scale is a power of two, so that the product is exact."""
    tile.store((values.to(gl.float32) * scale[:, None]).to(tile.dtype))


@gluon.jit
def _copy_rope(pool, slot_buffer, tile, pe_page, PAGE: gl.constexpr):
    """Start to copy the rope part of a block-scaled tile."""
    page, offset, mask_n = _split_slots(slot_buffer, LOAD_LAYOUT, PAGE)
    ptrs = pool + (page * pe_page + offset * (_ENTRY_BYTES // 2) + _ROPE_OFFSET // 2)
    offs_r = gl.arange(0, ROPE, gl.SliceLayout(0, LOAD_LAYOUT))
    load_rows(tile, ptrs[:, None] + offs_r[None, :], mask_n[:, None])
    async_copy.commit_group()


@gluon.jit
def produce_block_scaled(
    c_pool, pe_pool, scales, table, topk_indices, slot_buffer, a_left, a_right, a_rope, b_left, b_right, b_rope,
    ready_bars, free_bars, begin, end, is_sparse, c_page, pe_page, scale_page, PAGE: gl.constexpr, SPARSE: gl.constexpr,
):  # fmt: skip
    """As `produce`, for the block-scaled FP8 cache. Values are loaded two blocks before they are dequantized."""
    offs_c = gl.arange(0, _BLOCK, gl.SliceLayout(0, _DEQUANT_LAYOUT))
    slot_buffer.index(0).store(_slots(table, _positions(topk_indices, begin, end, is_sparse, SPARSE), PAGE))
    positions = _positions(topk_indices, begin + 2 * BLOCK_N, end, is_sparse, SPARSE)
    for pair in range(gl.cdiv(end - begin, 2 * BLOCK_N)):
        free_phase = (pair & 1) ^ 1
        next_slots = _slots(table, positions, PAGE)
        positions = _positions(topk_indices, begin + (pair + 2) * (2 * BLOCK_N), end, is_sparse, SPARSE)
        slots_a, slots_b = (
            slot_buffer.index(pair & 1).slice(0, BLOCK_N),
            slot_buffer.index(pair & 1).slice(BLOCK_N, BLOCK_N),
        )
        a, a_scales, mask_a = _entry_ptrs(c_pool, scales, slots_a, offs_c, c_page, scale_page, PAGE)
        b, b_scales, mask_b = _entry_ptrs(c_pool, scales, slots_b, offs_c, c_page, scale_page, PAGE)
        values_0, scale_0 = _load_block(a, a_scales, mask_a, 0)
        values_1, scale_1 = _load_block(a, a_scales, mask_a, 1)
        mbarrier.wait(free_bars.index(0), free_phase)
        _dequantize(values_0, scale_0, a_left.slice(0, _BLOCK, dim=1))
        values_0, scale_0 = _load_block(b, b_scales, mask_b, 2)
        _dequantize(values_1, scale_1, a_left.slice(_BLOCK, _BLOCK, dim=1))
        values_1, scale_1 = _load_block(b, b_scales, mask_b, 3)
        fence_async_shared()
        mbarrier.arrive(ready_bars.index(0), count=1)
        mbarrier.wait(free_bars.index(3), free_phase)
        _dequantize(values_0, scale_0, b_right.slice(0, _BLOCK, dim=1))
        values_0, scale_0 = _load_block(a, a_scales, mask_a, 2)
        _dequantize(values_1, scale_1, b_right.slice(_BLOCK, _BLOCK, dim=1))
        values_1, scale_1 = _load_block(a, a_scales, mask_a, 3)
        fence_async_shared()
        mbarrier.arrive(ready_bars.index(3), count=1)
        slot_buffer.index((pair + 1) & 1).store(next_slots)
        mbarrier.wait(free_bars.index(1), free_phase)
        _copy_rope(pe_pool, slots_a, a_rope, pe_page, PAGE)
        _dequantize(values_0, scale_0, a_right.slice(0, _BLOCK, dim=1))
        values_0, scale_0 = _load_block(b, b_scales, mask_b, 0)
        _dequantize(values_1, scale_1, a_right.slice(_BLOCK, _BLOCK, dim=1))
        values_1, scale_1 = _load_block(b, b_scales, mask_b, 1)
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(ready_bars.index(1), count=1)
        mbarrier.wait(free_bars.index(2), free_phase)
        _copy_rope(pe_pool, slots_b, b_rope, pe_page, PAGE)
        _dequantize(values_0, scale_0, b_left.slice(0, _BLOCK, dim=1))
        _dequantize(values_1, scale_1, b_left.slice(_BLOCK, _BLOCK, dim=1))
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(ready_bars.index(2), count=1)
