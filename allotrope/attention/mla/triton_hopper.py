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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from allotrope.attention.mla.triton_hopper_rows import HALF, KEYS, READ, ROPE, read, read_scaled
from allotrope.kernels.gluon.opaque_zero import unknown_zero
from allotrope.kernels.gluon.propagate_nan import at_least, higher_of, highest
from allotrope.kernels.gluon.versions import barrier
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, with_pdl
from allotrope.kernels.softmax import LOG2E, LOWEST

# Heads of a program.
_H = gl.constexpr(64)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS.value, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF.value, 16]))
_GIVEN = gl.constexpr(gl.DotOperandLayout(0, _SUMS.value, 2))
_NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _load_queries(q, q_pe, left, right, rope_tile, loaded, head, q_h, pe_h, H: gl.constexpr, WHICH: gl.constexpr):
    """Each computing group brings half of the queries to shared memory, and waits for the other half."""
    row = head + gl.arange(0, _H, gl.SliceLayout(1, READ))
    real = (row < H)[:, None]
    channel = gl.arange(0, HALF, gl.SliceLayout(0, READ))
    at = q + row[:, None] * q_h + channel[None, :]
    if WHICH == 0:
        left.index(0).store(gl.load(at, mask=real, other=0.0))
    else:
        right.index(0).store(gl.load(at + HALF, mask=real, other=0.0))
        rope = gl.arange(0, ROPE, gl.SliceLayout(0, READ))
        rope_tile.index(0).store(gl.load(q_pe + row[:, None] * pe_h + rope[None, :], mask=real, other=0.0))
    fence_async_shared()
    mbarrier.arrive(loaded, count=1)
    mbarrier.wait(loaded, 0)


@gluon.jit
def _seen(picks, many, start, end, PICKED: gl.constexpr):
    """Which keys of a tile there are."""
    key = start + gl.arange(0, KEYS, gl.SliceLayout(0, _SCORES))
    there = key < end
    if PICKED:
        there = there & (gl.load(picks + key, mask=there & many, other=0) >= 0)
    return there


@gluon.jit
def _scores(q_near, q_far, q_rope, near, far, rope, full_near, full_far, phase, there, factor):
    """Logits of a tile, whose `near` half comes first."""
    logits = gl.zeros([_H, KEYS], gl.float32, _SCORES)
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
def _first(work, H: gl.constexpr, PICKED: gl.constexpr, DIRECT: gl.constexpr):
    """The first computing group: scores of tile a, left half of the sums. Weights lie in the rotated part of a tile,
    which is done with once it has scores. `said`: top a, top b, weights a, weights b, queries."""
    (q, q_pe, q_left, q_right, q_rope, a_left, a_right, a_rope, b_left, _b_right, b_rope, full, empty, said, numbers,
     picks, many, begin, end, factor, out, lse, head, kv_scale, q_h, pe_h, out_h) = work  # fmt: skip
    _load_queries(q, q_pe, q_left, q_right, q_rope, said.index(4), head, q_h, pe_h, H, 0)
    mixed = gl.zeros([_H, HALF], gl.float32, _SUMS)
    top = gl.full([_H], LOWEST, gl.float32, gl.SliceLayout(1, _SCORES))
    total = gl.zeros([_H], gl.float32, gl.SliceLayout(1, _SCORES))
    pairs = gl.cdiv(end - begin, 2 * KEYS)
    for pair in range(pairs):
        phase = pair & 1
        zero = unknown_zero(pair)
        there = _seen(picks, many, begin + pair * (2 * KEYS), end, PICKED)
        logits = _scores(
            q_left.index(zero), q_right.index(zero), q_rope.index(zero), a_left, a_right, a_rope,
            full.index(0), full.index(1), phase, there, factor,
        )  # fmt: skip
        higher = higher_of(top, highest(logits, 1))
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
def _second(work, H: gl.constexpr, PICKED: gl.constexpr, DIRECT: gl.constexpr):
    """The second computing group: scores of tile b, right half of the sums."""
    (q, q_pe, q_left, q_right, q_rope, _a_left, a_right, a_rope, b_left, b_right, b_rope, full, empty, said, numbers,
     picks, many, begin, end, factor, out, lse, head, kv_scale, q_h, pe_h, out_h) = work  # fmt: skip
    _load_queries(q, q_pe, q_left, q_right, q_rope, said.index(4), head, q_h, pe_h, H, 1)
    mixed = gl.zeros([_H, HALF], gl.float32, _SUMS)
    top = gl.full([_H], LOWEST, gl.float32, gl.SliceLayout(1, _SCORES))
    total = gl.zeros([_H], gl.float32, gl.SliceLayout(1, _SCORES))
    pairs = gl.cdiv(end - begin, 2 * KEYS)
    for pair in range(pairs):
        phase = pair & 1
        zero = unknown_zero(pair)
        there = _seen(picks, many, begin + pair * (2 * KEYS) + KEYS, end, PICKED)
        logits = _scores(
            q_right.index(zero), q_left.index(zero), q_rope.index(zero), b_right, b_left, b_rope,
            full.index(3), full.index(2), phase, there, factor,
        )  # fmt: skip
        own = highest(logits, 1)
        mbarrier.wait(said.index(0), phase)
        higher = higher_of(numbers.index(0).load(gl.SliceLayout(1, _SCORES)), own)
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
    channel = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(0, _SUMS))
    # The largest logit of a row adds 1, so the bound touches only queries that see nothing.
    mixed = mixed * (kv_scale / at_least(sum_of, 1.0))[:, None]
    kept = row < H
    if not DIRECT:
        kept = kept & any_keys
    to = out + row[:, None] * out_h + channel[None, :]
    gl.store(to, mixed.to(out.dtype.element_ty), mask=kept[:, None])
    if not DIRECT and WHICH == 0:
        largest = gl.convert_layout(top, gl.SliceLayout(1, _SUMS))
        found = gl.where(sum_of == 0.0, LOWEST, largest + gl.log2(at_least(sum_of, 1.0)))
        gl.store(lse + row, found, mask=kept)


@with_pdl
@gluon.jit
def attend_kernel(
    q, q_pe, c_pool, pe_pool, factors, table, request, seen, picks, partial, lse, out,
    scale, kv_scale, topk, splits,
    q_t, q_h, pe_t, pe_h, c_page, c_row, pe_page, pe_row, f_page, f_row, table_b, picks_t, out_t, out_h,
    H: gl.constexpr, PAGE: gl.constexpr, PICKED: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """64 heads of one query over one split of its keys, as in `triton_decode`."""
    gdc_wait()
    gdc_launch_dependents()
    head = gl.program_id(0) * _H
    split = gl.program_id(1)
    query = gl.program_id(2).to(gl.int64)
    n = gl.load(seen + query)
    many = n > topk
    if PICKED:
        n = gl.minimum(n, topk)
    size = gl.cdiv(gl.cdiv(n, 2 * KEYS), splits) * (2 * KEYS)
    begin = split * size
    end = gl.maximum(begin, gl.minimum(begin + size, n))
    table += gl.load(request + query).to(gl.int64) * table_b
    picks += query * picks_t
    kind: gl.constexpr = q.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Each is memory of its own: what is known to be apart needs no barrier.
    q_left = gl.allocate_shared_memory(kind, [1, _H, HALF], layout)
    q_right = gl.allocate_shared_memory(kind, [1, _H, HALF], layout)
    q_rope = gl.allocate_shared_memory(kind, [1, _H, ROPE], layout)
    a_left = gl.allocate_shared_memory(kind, [KEYS, HALF], layout)
    a_right = gl.allocate_shared_memory(kind, [KEYS, HALF], layout)
    a_rope = gl.allocate_shared_memory(kind, [KEYS, ROPE], layout)
    b_left = gl.allocate_shared_memory(kind, [KEYS, HALF], layout)
    b_right = gl.allocate_shared_memory(kind, [KEYS, HALF], layout)
    b_rope = gl.allocate_shared_memory(kind, [KEYS, ROPE], layout)
    numbers = gl.allocate_shared_memory(gl.float32, [2, _H], _NUMBERS)
    rows = gl.allocate_shared_memory(gl.int32, [2, 2 * KEYS], _NUMBERS)
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
        to = partial + place * (2 * HALF)
        step = 2 * HALF
    factor = scale * kv_scale * LOG2E
    q += query * q_t
    q_pe += query * pe_t
    work = (q, q_pe, q_left, q_right, q_rope, a_left, a_right, a_rope, b_left, b_right, b_rope, full, empty, said,
            numbers, picks, many, begin, end, factor, to, lse + place, head, kv_scale, q_h, pe_h, step)  # fmt: skip
    if SCALED:
        gl.warp_specialize(
            [
                (read_scaled, (c_pool, pe_pool, factors, table, picks, rows, a_left, a_right, a_rope, b_left, b_right,
                               b_rope, full, empty, begin, end, many, c_page, pe_page, f_page, PAGE, PICKED)),
                (_first, (work, H, PICKED, DIRECT)),
                (_second, (work, H, PICKED, DIRECT)),
            ],
            [4, 4],
            [200, 200],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (read, (c_pool, pe_pool, table, picks, rows, a_left, a_right, a_rope, b_left, b_right, b_rope, full,
                        empty, begin, end, many, c_page, c_row, pe_page, pe_row, PAGE, PICKED)),
                (_first, (work, H, PICKED, DIRECT)),
                (_second, (work, H, PICKED, DIRECT)),
            ],
            [4, 4],
            [216, 216],
        )  # fmt: skip
