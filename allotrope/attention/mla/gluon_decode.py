"""Warp-specialized MLA decode of many heads on Hopper: one producer warpgroup loads, two consumer warpgroups multiply.

Owns: `triton_decode.attend_kernel` for 64 heads a program, with explicit layouts and mbarriers (the schedule is that of
FlashMLA). Must not know: anything that the Triton kernel does not.

Shared memory holds the queries and two tiles of 64 keys, each in two halves of its channels. Consumer 0 computes QK^T
of tile a and owns the left half of the accumulator; consumer 1 computes QK^T of tile b and owns the right half. Each
passes its p to the other. While one computes its softmax, the tensor cores work for the other:

    consumer 0    QK^T a | softmax a | left += p a        | left += p b
    consumer 1    QK^T b |       softmax b | right += p b | right += p a

p of tile a is relative to the row max up to tile a, p of tile b to the row max up to tile b. Before consumer 0 passes
its p on, it rescales p and its accumulator to the later row max. Each consumer multiplies its own half of its own tile
first, so that the loads of the next pair begin while the other's p is still multiplied.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from allotrope.attention.mla.gluon_decode_producer import (
    BLOCK_N,
    HALF,
    LOAD_LAYOUT,
    ROPE,
    produce,
    produce_block_scaled,
)
from allotrope.kernels.gluon.opaque_zero import unknown_zero
from allotrope.kernels.gluon.propagate_nan import at_least, higher_of, highest
from allotrope.kernels.gluon.versions import barrier
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, with_pdl
from allotrope.kernels.softmax import LOG2E, LOWEST

# Heads of a program.
_BLOCK_H = gl.constexpr(64)

_QK_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N.value, 16]))
_ACC_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF.value, 16]))
_P_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, _ACC_LAYOUT.value, 2))
_VECTOR_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _load_queries(
    q, q_pe, q_left_tile, q_right_tile, rope_tile, loaded_bar, head, q_h, pe_h, H: gl.constexpr, CONSUMER: gl.constexpr
):
    """Store a consumer's half of the queries to shared memory, and wait for the other consumer's half."""
    row = head + gl.arange(0, _BLOCK_H, gl.SliceLayout(1, LOAD_LAYOUT))
    mask_h = (row < H)[:, None]
    offs_c = gl.arange(0, HALF, gl.SliceLayout(0, LOAD_LAYOUT))
    q_ptrs = q + row[:, None] * q_h + offs_c[None, :]
    if CONSUMER == 0:
        q_left_tile.index(0).store(gl.load(q_ptrs, mask=mask_h, other=0.0))
    else:
        q_right_tile.index(0).store(gl.load(q_ptrs + HALF, mask=mask_h, other=0.0))
        offs_r = gl.arange(0, ROPE, gl.SliceLayout(0, LOAD_LAYOUT))
        rope_tile.index(0).store(gl.load(q_pe + row[:, None] * pe_h + offs_r[None, :], mask=mask_h, other=0.0))
    fence_async_shared()
    mbarrier.arrive(loaded_bar, count=1)
    mbarrier.wait(loaded_bar, 0)


@gluon.jit
def _key_mask(topk_indices, is_sparse, start, end, SPARSE: gl.constexpr):
    """Mask of the keys of a tile."""
    offs_n = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, _QK_LAYOUT))
    mask_n = offs_n < end
    if SPARSE:
        mask_n = mask_n & (gl.load(topk_indices + offs_n, mask=mask_n & is_sparse, other=0) >= 0)
    return mask_n


@gluon.jit
def _qk(q_near, q_far, q_rope, k_near, k_far, rope, ready_near, ready_far, phase, mask_n, qk_scale):
    """Masked logits of a tile; its `k_near` half is loaded first."""
    logits = gl.zeros([_BLOCK_H, BLOCK_N], gl.float32, _QK_LAYOUT)
    mbarrier.wait(ready_near, phase)
    fence_async_shared()
    logits = warpgroup_mma(q_near, k_near.permute((1, 0)), logits, use_acc=False, is_async=True)
    mbarrier.wait(ready_far, phase)
    fence_async_shared()
    logits = warpgroup_mma(q_far, k_far.permute((1, 0)), logits, is_async=True)
    logits = warpgroup_mma(q_rope, rope.permute((1, 0)), logits, is_async=True)
    logits = warpgroup_mma_wait(0, deps=[logits])
    return gl.where(mask_n[None, :], logits * qk_scale, float("-inf"))


@gluon.jit
def _consumer_0(args, H: gl.constexpr, SPARSE: gl.constexpr, DIRECT: gl.constexpr):
    """Consumer 0: QK^T of tile a, left half of the accumulator.

    p overwrites the rope part of its tile, which is free after QK^T. `exchange_bars`: row max of a, row max of b, p of
    a, p of b, queries.
    """
    (q, q_pe, q_left, q_right, q_rope, a_left, a_right, a_rope, b_left, _b_right, b_rope, ready_bars, free_bars,
     exchange_bars, row_stats, topk_indices, is_sparse, begin, end, qk_scale, out, lse, head, kv_scale, q_h, pe_h,
     out_h) = args  # fmt: skip
    _load_queries(q, q_pe, q_left, q_right, q_rope, exchange_bars.index(4), head, q_h, pe_h, H, 0)
    acc = gl.zeros([_BLOCK_H, HALF], gl.float32, _ACC_LAYOUT)
    m_i = gl.full([_BLOCK_H], LOWEST, gl.float32, gl.SliceLayout(1, _QK_LAYOUT))
    l_i = gl.zeros([_BLOCK_H], gl.float32, gl.SliceLayout(1, _QK_LAYOUT))
    pairs = gl.cdiv(end - begin, 2 * BLOCK_N)
    for pair in range(pairs):
        phase = pair & 1
        zero = unknown_zero(pair)
        mask_n = _key_mask(topk_indices, is_sparse, begin + pair * (2 * BLOCK_N), end, SPARSE)
        logits = _qk(
            q_left.index(zero), q_right.index(zero), q_rope.index(zero), a_left, a_right, a_rope,
            ready_bars.index(0), ready_bars.index(1), phase, mask_n, qk_scale,
        )  # fmt: skip
        m_new = higher_of(m_i, highest(logits, 1))
        row_stats.index(0).store(m_new)
        mbarrier.arrive(exchange_bars.index(0), count=1)
        p = gl.exp2(logits - m_new[:, None])
        alpha = gl.exp2(m_i - m_new)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, _ACC_LAYOUT))[:, None]
        l_i = l_i * alpha + gl.sum(p, 1)
        p = p.to(a_left.dtype)
        acc_async = warpgroup_mma(gl.convert_layout(p, _P_LAYOUT), a_left, acc, is_async=True)
        mbarrier.wait(exchange_bars.index(1), phase)
        m_i = row_stats.index(1).load(gl.SliceLayout(1, _QK_LAYOUT))
        alpha = gl.exp2(m_new - m_i)
        a_rope.store((p.to(gl.float32) * alpha[:, None]).to(a_left.dtype))
        fence_async_shared()
        mbarrier.arrive(exchange_bars.index(2), count=1)
        l_i = l_i * alpha
        acc = warpgroup_mma_wait(0, deps=[acc_async])
        mbarrier.arrive(free_bars.index(0), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, _ACC_LAYOUT))[:, None]
        # Tile b is loaded, since it has p. The wait makes its bytes visible to this warpgroup.
        mbarrier.wait(ready_bars.index(2), phase)
        mbarrier.wait(exchange_bars.index(3), phase)
        fence_async_shared()
        acc_async = warpgroup_mma(b_rope, b_left, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_async])
        mbarrier.arrive(free_bars.index(2), count=1)
    _finish(acc, m_i, l_i, row_stats, exchange_bars, pairs, out, lse, head, kv_scale, out_h, begin < end, H, DIRECT, 0)


@gluon.jit
def _consumer_1(args, H: gl.constexpr, SPARSE: gl.constexpr, DIRECT: gl.constexpr):
    """Consumer 1: QK^T of tile b, right half of the accumulator."""
    (q, q_pe, q_left, q_right, q_rope, _a_left, a_right, a_rope, b_left, b_right, b_rope, ready_bars, free_bars,
     exchange_bars, row_stats, topk_indices, is_sparse, begin, end, qk_scale, out, lse, head, kv_scale, q_h, pe_h,
     out_h) = args  # fmt: skip
    _load_queries(q, q_pe, q_left, q_right, q_rope, exchange_bars.index(4), head, q_h, pe_h, H, 1)
    acc = gl.zeros([_BLOCK_H, HALF], gl.float32, _ACC_LAYOUT)
    m_i = gl.full([_BLOCK_H], LOWEST, gl.float32, gl.SliceLayout(1, _QK_LAYOUT))
    l_i = gl.zeros([_BLOCK_H], gl.float32, gl.SliceLayout(1, _QK_LAYOUT))
    pairs = gl.cdiv(end - begin, 2 * BLOCK_N)
    for pair in range(pairs):
        phase = pair & 1
        zero = unknown_zero(pair)
        mask_n = _key_mask(topk_indices, is_sparse, begin + pair * (2 * BLOCK_N) + BLOCK_N, end, SPARSE)
        logits = _qk(
            q_right.index(zero), q_left.index(zero), q_rope.index(zero), b_right, b_left, b_rope,
            ready_bars.index(3), ready_bars.index(2), phase, mask_n, qk_scale,
        )  # fmt: skip
        tile_max = highest(logits, 1)
        mbarrier.wait(exchange_bars.index(0), phase)
        m_new = higher_of(row_stats.index(0).load(gl.SliceLayout(1, _QK_LAYOUT)), tile_max)
        row_stats.index(1).store(m_new)
        mbarrier.arrive(exchange_bars.index(1), count=1)
        p = gl.exp2(logits - m_new[:, None])
        alpha = gl.exp2(m_i - m_new)
        m_i = m_new
        l_i = l_i * alpha + gl.sum(p, 1)
        p = p.to(b_right.dtype)
        b_rope.store(p)
        fence_async_shared()
        mbarrier.arrive(exchange_bars.index(3), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, _ACC_LAYOUT))[:, None]
        acc_async = warpgroup_mma(gl.convert_layout(p, _P_LAYOUT), b_right, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_async])
        mbarrier.arrive(free_bars.index(3), count=1)
        mbarrier.wait(ready_bars.index(1), phase)
        mbarrier.wait(exchange_bars.index(2), phase)
        fence_async_shared()
        acc_async = warpgroup_mma(a_rope, a_right, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_async])
        mbarrier.arrive(free_bars.index(1), count=1)
    _finish(acc, m_i, l_i, row_stats, exchange_bars, pairs, out, lse, head, kv_scale, out_h, begin < end, H, DIRECT, 1)


@gluon.jit
def _finish(
    acc, m_i, l_i, row_stats, exchange_bars, pairs, out, lse, head, kv_scale, out_h, has_keys,
    H: gl.constexpr, DIRECT: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Write a consumer's half of the output; the row sums of both are relative to the same row max."""
    row_stats.index(CONSUMER).store(l_i)
    mbarrier.arrive(exchange_bars.index(CONSUMER), count=1)
    mbarrier.wait(exchange_bars.index(1 - CONSUMER), pairs & 1)
    l_i += row_stats.index(1 - CONSUMER).load(gl.SliceLayout(1, _QK_LAYOUT))
    row_sum = gl.convert_layout(l_i, gl.SliceLayout(1, _ACC_LAYOUT))
    offs_h = head + gl.arange(0, _BLOCK_H, gl.SliceLayout(1, _ACC_LAYOUT))
    offs_c = CONSUMER * HALF + gl.arange(0, HALF, gl.SliceLayout(0, _ACC_LAYOUT))
    # The row max itself adds 1 to the row sum, so the bound changes only queries without keys.
    acc = acc * (kv_scale / at_least(row_sum, 1.0))[:, None]
    mask_h = offs_h < H
    if not DIRECT:
        mask_h = mask_h & has_keys
    out_ptrs = out + offs_h[:, None] * out_h + offs_c[None, :]
    gl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=mask_h[:, None])
    if not DIRECT and CONSUMER == 0:
        row_max = gl.convert_layout(m_i, gl.SliceLayout(1, _ACC_LAYOUT))
        split_lse = gl.where(row_sum == 0.0, LOWEST, row_max + gl.log2(at_least(row_sum, 1.0)))
        gl.store(lse + offs_h, split_lse, mask=mask_h)


@with_pdl
@gluon.jit
def attend_kernel(
    q, q_pe, c_pool, pe_pool, scales, table, request, kv_lens, topk_indices, partial, lse, out,
    scale, kv_scale, topk, num_splits,
    q_t, q_h, pe_t, pe_h, c_page, c_row, pe_page, pe_row, scale_page, scale_row, table_b, topk_t, out_t, out_h,
    H: gl.constexpr, PAGE: gl.constexpr, SPARSE: gl.constexpr, BLOCK_SCALED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """64 heads of one query over one split of its keys, as in `triton_decode`."""
    gdc_wait()
    gdc_launch_dependents()
    head = gl.program_id(0) * _BLOCK_H
    split = gl.program_id(1)
    query = gl.program_id(2).to(gl.int64)
    kv_len = gl.load(kv_lens + query)
    is_sparse = kv_len > topk
    if SPARSE:
        kv_len = gl.minimum(kv_len, topk)
    split_size = gl.cdiv(gl.cdiv(kv_len, 2 * BLOCK_N), num_splits) * (2 * BLOCK_N)
    begin = split * split_size
    end = gl.maximum(begin, gl.minimum(begin + split_size, kv_len))
    table += gl.load(request + query).to(gl.int64) * table_b
    topk_indices += query * topk_t
    dtype: gl.constexpr = q.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Separate allocations: the compiler adds no barrier between buffers that it knows to be disjoint.
    q_left = gl.allocate_shared_memory(dtype, [1, _BLOCK_H, HALF], layout)
    q_right = gl.allocate_shared_memory(dtype, [1, _BLOCK_H, HALF], layout)
    q_rope = gl.allocate_shared_memory(dtype, [1, _BLOCK_H, ROPE], layout)
    a_left = gl.allocate_shared_memory(dtype, [BLOCK_N, HALF], layout)
    a_right = gl.allocate_shared_memory(dtype, [BLOCK_N, HALF], layout)
    a_rope = gl.allocate_shared_memory(dtype, [BLOCK_N, ROPE], layout)
    b_left = gl.allocate_shared_memory(dtype, [BLOCK_N, HALF], layout)
    b_right = gl.allocate_shared_memory(dtype, [BLOCK_N, HALF], layout)
    b_rope = gl.allocate_shared_memory(dtype, [BLOCK_N, ROPE], layout)
    row_stats = gl.allocate_shared_memory(gl.float32, [2, _BLOCK_H], _VECTOR_LAYOUT)
    slot_buffer = gl.allocate_shared_memory(gl.int32, [2, 2 * BLOCK_N], _VECTOR_LAYOUT)
    # Barriers of left of a, right of a, left of b, right of b; the later half of a tile includes its rope part.
    ready_bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    free_bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    exchange_bars = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        # Each copying thread arrives when its copies are complete; dequantized tiles arrive once.
        mbarrier.init(ready_bars.index(i), count=1 if BLOCK_SCALED else 128)
        mbarrier.init(free_bars.index(i), count=1)
        mbarrier.init(exchange_bars.index(i), count=1)
    mbarrier.init(exchange_bars.index(4), count=2)
    fence_async_shared()
    barrier()
    lse_offset = (query * num_splits + split) * H
    if DIRECT:
        out_ptrs = out + query * out_t
        out_stride = out_h
    else:
        out_ptrs = partial + lse_offset * (2 * HALF)
        out_stride = 2 * HALF
    qk_scale = scale * kv_scale * LOG2E
    q += query * q_t
    q_pe += query * pe_t
    args = (q, q_pe, q_left, q_right, q_rope, a_left, a_right, a_rope, b_left, b_right, b_rope, ready_bars, free_bars,
            exchange_bars, row_stats, topk_indices, is_sparse, begin, end, qk_scale, out_ptrs, lse + lse_offset, head,
            kv_scale, q_h, pe_h, out_stride)  # fmt: skip
    if BLOCK_SCALED:
        gl.warp_specialize(
            [
                (produce_block_scaled, (c_pool, pe_pool, scales, table, topk_indices, slot_buffer, a_left, a_right,
                                        a_rope, b_left, b_right, b_rope, ready_bars, free_bars, begin, end, is_sparse,
                                        c_page, pe_page, scale_page, PAGE, SPARSE)),
                (_consumer_0, (args, H, SPARSE, DIRECT)),
                (_consumer_1, (args, H, SPARSE, DIRECT)),
            ],
            [4, 4],
            [200, 200],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (produce, (c_pool, pe_pool, table, topk_indices, slot_buffer, a_left, a_right, a_rope, b_left, b_right,
                           b_rope, ready_bars, free_bars, begin, end, is_sparse, c_page, c_row, pe_page, pe_row, PAGE,
                           SPARSE)),
                (_consumer_0, (args, H, SPARSE, DIRECT)),
                (_consumer_1, (args, H, SPARSE, DIRECT)),
            ],
            [4, 4],
            [216, 216],
        )  # fmt: skip
