"""Warp-specialized prefill on Hopper, as FlashAttention-3: a producer warp loads, two consumer warpgroups multiply.

Owns: the kernel for bf16 and fp16 prompts. Must not know: pages; `triton_prefill` gathers them.

Each consumer owns half of a tile's rows. It issues QK^T of one block before PV of the previous block, so that its
softmax overlaps a matrix product. The two consumers drift apart, and one computes while the other waits.

The accumulator of a head dim above 256 does not fit into registers, so two programs own half of the columns each. Both
compute all of QK^T, which costs half as much again. Tiles of 128 rows pay that back: keys come from L2 half as often.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from allotrope.attention.mha.spec import MhaSpec
from allotrope.attention.mha.triton_decode import NO_WINDOW
from allotrope.attention.mha.triton_prefill import Tiles, gather, heads_per_tile
from allotrope.kernels.chip import Chip
from allotrope.kernels.gluon.descriptor import descriptor, descriptor_type
from allotrope.kernels.gluon.opaque_zero import unknown_zero
from allotrope.kernels.gluon.propagate_nan import higher_of, highest
from allotrope.kernels.gluon.ring import ring
from allotrope.kernels.gluon.versions import barrier, load_tile
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, with_pdl
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.softmax import LOG2E, LOWEST
from allotrope.kernels.tiles import next_power_of_2


@gluon.jit
def _block_start(i, first_key, window_blocks, full_end, full_begin, partial_blocks, BLOCK_N: gl.constexpr):
    """First key of the i-th block: partial blocks at the window's edge, those at the diagonal, then the full blocks."""
    partial = gl.where(i < window_blocks, first_key + i * BLOCK_N, full_end + (i - window_blocks) * BLOCK_N)
    return gl.where(i < partial_blocks, partial, full_begin + (i - partial_blocks) * BLOCK_N)


@gluon.jit
def _produce(
    k, v, k_tiles, v_tiles, ready_bars, free_bars, scratch_row, first_key, window_blocks, full_end, full_begin,
    partial_blocks, num_blocks, dv_begin, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer warp: load the keys of a block and the values of the previous one, in the order of their use."""
    for i in range(num_blocks + 1):
        if i < num_blocks:
            stage = i % STAGES
            row = scratch_row + _block_start(i, first_key, window_blocks, full_end, full_begin, partial_blocks, BLOCK_N)
            mbarrier.wait(free_bars.index(stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(ready_bars.index(stage), k.block_type.nbytes)
            load_tile(k, [row, 0], ready_bars.index(stage), k_tiles.index(stage))
        if i > 0:
            stage = (i - 1) % STAGES
            row = scratch_row + _block_start(
                i - 1, first_key, window_blocks, full_end, full_begin, partial_blocks, BLOCK_N
            )
            mbarrier.wait(free_bars.index(STAGES + stage), (((i - 1) // STAGES) & 1) ^ 1)
            mbarrier.expect(ready_bars.index(STAGES + stage), v.block_type.nbytes)
            load_tile(v, [row, dv_begin], ready_bars.index(STAGES + stage), v_tiles.index(stage))


@gluon.jit
def _online_softmax(
    logits, m_i, l_i, q_pos, start, scale, softcap, window, MASK: gl.constexpr, SOFTCAP: gl.constexpr,
    BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """One step of online softmax: p, the new m_i and l_i, and alpha, which rescales the accumulator."""
    if SOFTCAP:
        x = logits * (scale / softcap)
        logits = (softcap * LOG2E) * (1.0 - 2.0 / (gl.exp2(x * (2.0 * LOG2E)) + 1.0))
        qk_scale = 1.0
    else:
        qk_scale = scale * LOG2E
    if MASK:
        offs_n = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        distance = gl.expand_dims(q_pos, 1) - gl.expand_dims(offs_n, 0)
        logits = gl.where((distance >= 0) & (distance < window), logits, float("-inf"))
    m_new = higher_of(m_i, highest(logits, 1) * qk_scale)
    p = gl.exp2(logits * qk_scale - gl.expand_dims(m_new, 1))
    alpha = gl.exp2(m_i - m_new)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _pack_pairs(p, DTYPE: gl.constexpr):
    """[M, N] fp32 as [M, N / 2] words of two 16-bit values.

    The compiler would unpack 16-bit values that a loop carries, and not words.
    """
    low, high = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    if gl.bfloat16 == DTYPE:
        convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        convert: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"  # type: ignore[no-redef]
    return gl.inline_asm_elementwise(convert, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack_pairs(words, DTYPE: gl.constexpr, p_layout: gl.constexpr):
    """The words as [M, N] values in the layout of a WGMMA operand in registers."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    values = gl.join(low, high).to(DTYPE, bitcast=True)
    return gl.convert_layout(values.reshape([words.shape[0], words.shape[1] * 2]), p_layout)


@gluon.jit
def _consume(
    q, k_tiles, v_tiles, ready_bars, free_bars, sinks, out, record, head_tile, scale, softcap, v_scale, window,
    first_key, window_blocks, full_end, full_begin, partial_blocks, num_blocks, dv_begin, out_t, out_h,
    CONSUMER: gl.constexpr, HEADS_PER_TILE: gl.constexpr, DV: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_DV: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: ROWS rows of the tile over all blocks, and their output."""
    qk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    dtype: gl.constexpr = q.dtype
    first_token, num_tokens, first_pos = gl.load(record + 1).to(gl.int64), gl.load(record + 2), gl.load(record + 3)
    offs_m = CONSUMER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, qk_layout))
    q_pos = first_pos + offs_m // HEADS_PER_TILE
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, qk_layout)
    m_i = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, qk_layout))
    l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, qk_layout))
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, acc_layout)
    mbarrier.wait(ready_bars.index(0), 0)
    logits = warpgroup_mma(q.index(CONSUMER), k_tiles.index(0).permute((1, 0)), zeros, use_acc=False)
    mbarrier.arrive(free_bars.index(0), count=1)
    start = _block_start(0, first_key, window_blocks, full_end, full_begin, partial_blocks, BLOCK_N)
    p, m_i, l_i, alpha = _online_softmax(
        logits, m_i, l_i, q_pos, start, scale, softcap, window, True, SOFTCAP, BLOCK_N, qk_layout
    )
    p = _pack_pairs(p, dtype)
    mbarrier.wait(ready_bars.index(1 % STAGES), (1 // STAGES) & 1, pred=num_blocks > 1)
    for i in range(1, partial_blocks):
        start = _block_start(i, first_key, window_blocks, full_end, full_begin, partial_blocks, BLOCK_N)
        p, acc, m_i, l_i = _consume_block(
            i, num_blocks, start, q, k_tiles, v_tiles, ready_bars, free_bars, p, acc, m_i, l_i, q_pos, scale, softcap,
            window, zeros, CONSUMER, True, SOFTCAP, BLOCK_N, STAGES, qk_layout, acc_layout, p_layout,
        )  # fmt: skip
    for i in range(gl.maximum(partial_blocks, 1), num_blocks):
        p, acc, m_i, l_i = _consume_block(
            i, num_blocks, 0, q, k_tiles, v_tiles, ready_bars, free_bars, p, acc, m_i, l_i, q_pos, scale, softcap,
            window, zeros, CONSUMER, False, SOFTCAP, BLOCK_N, STAGES, qk_layout, acc_layout, p_layout,
        )  # fmt: skip
    stage = (num_blocks - 1) % STAGES
    mbarrier.wait(ready_bars.index(STAGES + stage), ((num_blocks - 1) // STAGES) & 1)
    acc = warpgroup_mma(_unpack_pairs(p, dtype, p_layout), v_tiles.index(stage), acc)
    if SINKS:
        mask_m = offs_m // HEADS_PER_TILE < num_tokens
        sink = (
            gl.load(sinks + head_tile * HEADS_PER_TILE + offs_m % HEADS_PER_TILE, mask=mask_m, other=0.0).to(gl.float32)
            * LOG2E
        )
        m_new = higher_of(m_i, sink)
        alpha = gl.exp2(m_i - m_new)
        l_i = l_i * alpha + gl.exp2(sink - m_new)
        out_scale = alpha * v_scale / l_i
    else:
        out_scale = v_scale / l_i
    acc = acc * gl.expand_dims(gl.convert_layout(out_scale, gl.SliceLayout(1, acc_layout)), 1)
    offs_m = CONSUMER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc_layout))
    offs_d = dv_begin + gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(0, acc_layout))
    out_offset = (first_token + offs_m // HEADS_PER_TILE) * out_t + (
        head_tile * HEADS_PER_TILE + offs_m % HEADS_PER_TILE
    ) * out_h
    mask_md = gl.expand_dims(offs_m // HEADS_PER_TILE < num_tokens, 1) & gl.expand_dims(offs_d < DV, 0)
    gl.store(
        out + gl.expand_dims(out_offset, 1) + gl.expand_dims(offs_d, 0), acc.to(out.dtype.element_ty), mask=mask_md
    )


@gluon.jit
def _consume_block(
    i, num_blocks, start, q, k_tiles, v_tiles, ready_bars, free_bars, p, acc, m_i, l_i, q_pos, scale, softcap, window,
    zeros, CONSUMER: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, qk_layout: gl.constexpr, acc_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """QK^T and softmax of block i, overlapped with PV of block i - 1."""
    dtype: gl.constexpr = q.dtype
    stage, prev_stage, consumer = i % STAGES, (i - 1) % STAGES, CONSUMER
    if STAGES == 1:
        stage = unknown_zero(i)
        prev_stage, consumer = stage, CONSUMER + stage
    logits = warpgroup_mma(
        q.index(consumer), k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )  # fmt: skip
    mbarrier.wait(ready_bars.index(STAGES + prev_stage), ((i - 1) // STAGES) & 1)
    acc = warpgroup_mma(_unpack_pairs(p, dtype, p_layout), v_tiles.index(prev_stage), acc, is_async=True)
    logits = warpgroup_mma_wait(1, deps=(logits,))
    mbarrier.arrive(free_bars.index(stage), count=1)
    p_next, m_i, l_i, alpha = _online_softmax(
        logits, m_i, l_i, q_pos, start, scale, softcap, window, MASK, SOFTCAP, BLOCK_N, qk_layout
    )
    # This wait is a loop, and the next one takes the row sums as operands: both keep ptxas from moving the softmax
    # behind them.
    mbarrier.wait(ready_bars.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1, pred=i + 1 < num_blocks)
    acc, l_i, alpha = warpgroup_mma_wait(0, deps=(acc, l_i, alpha))
    mbarrier.arrive(free_bars.index(STAGES + prev_stage), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout)), 1)
    return _pack_pairs(p_next, dtype), acc, m_i, l_i


@with_pdl
@gluon.jit
def prefill_kernel(
    q, k, v, records, sinks, out, scale, softcap, v_scale, window, rows, q_t, q_h, out_t, out_h,
    NUM_KV_HEADS: gl.constexpr, Q_PER_KV: gl.constexpr, HEADS_PER_TILE: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, STAGES: gl.constexpr,
    VALUE_SPLITS: gl.constexpr, NUM_CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr, SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr,
):  # fmt: skip
    """As `triton_prefill.prefill_kernel` with GATHERED, for one of VALUE_SPLITS splits of the value columns.

    NUM_CONSUMERS consumer warpgroups of BLOCK_M // NUM_CONSUMERS rows, and one producer warp.
    """
    gdc_wait()
    gdc_launch_dependents()
    dv_begin = gl.program_id(0) % VALUE_SPLITS * BLOCK_DV
    tile = gl.program_id(0) // VALUE_SPLITS
    head_tile = tile % (NUM_KV_HEADS * (Q_PER_KV // HEADS_PER_TILE))
    record = records + tile // (NUM_KV_HEADS * (Q_PER_KV // HEADS_PER_TILE)) * 5
    kv_head = head_tile // (Q_PER_KV // HEADS_PER_TILE)
    first_token, num_tokens, first_pos = gl.load(record + 1).to(gl.int64), gl.load(record + 2), gl.load(record + 3)
    scratch_row = kv_head * rows + gl.load(record + 4)
    kv_len = first_pos + num_tokens
    first_key = gl.maximum(first_pos + 1 - window, 0) // BLOCK_N * BLOCK_N
    full_begin = gl.cdiv(gl.maximum(kv_len - window, 0), BLOCK_N) * BLOCK_N
    full_end = gl.maximum((first_pos + 1) // BLOCK_N * BLOCK_N, full_begin)
    window_blocks = (full_begin - first_key) // BLOCK_N
    partial_blocks = window_blocks + gl.cdiv(gl.maximum(kv_len - full_end, 0), BLOCK_N)
    num_blocks = partial_blocks + (full_end - full_begin) // BLOCK_N

    ROWS: gl.constexpr = BLOCK_M // NUM_CONSUMERS
    dtype: gl.constexpr = q.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [NUM_CONSUMERS, ROWS, BLOCK_D], q_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], k.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_DV], v.layout)
    ready_bars, free_bars = ring(2 * STAGES, NUM_CONSUMERS)

    LANES_D: gl.constexpr = min(BLOCK_D // 8, 32)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES_D, LANES_D], [4, 1], [1, 0])
    offs_d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, load_layout))
    for consumer in gl.static_range(NUM_CONSUMERS):
        offs_m = consumer * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, load_layout))
        q_offset = (first_token + offs_m // HEADS_PER_TILE) * q_t + (
            head_tile * HEADS_PER_TILE + offs_m % HEADS_PER_TILE
        ) * q_h
        mask_md = gl.expand_dims(offs_m // HEADS_PER_TILE < num_tokens, 1) & gl.expand_dims(offs_d < D, 0)
        q_tile = gl.load(q + gl.expand_dims(q_offset, 1) + gl.expand_dims(offs_d, 0), mask=mask_md, other=0.0)
        q_tiles.index(consumer).store(q_tile)
    fence_async_shared()
    barrier()
    if NUM_CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (q_tiles, k_tiles, v_tiles, ready_bars, free_bars, sinks, out, record, head_tile, scale,
                           softcap, v_scale, window, first_key, window_blocks, full_end, full_begin, partial_blocks,
                           num_blocks, dv_begin, out_t, out_h, 0, HEADS_PER_TILE, DV, ROWS, BLOCK_N, BLOCK_DV, STAGES,
                           SOFTCAP, SINKS)),
                (_consume, (q_tiles, k_tiles, v_tiles, ready_bars, free_bars, sinks, out, record, head_tile, scale,
                           softcap, v_scale, window, first_key, window_blocks, full_end, full_begin, partial_blocks,
                           num_blocks, dv_begin, out_t, out_h, 1, HEADS_PER_TILE, DV, ROWS, BLOCK_N, BLOCK_DV, STAGES,
                           SOFTCAP, SINKS)),
                (_produce, (k, v, k_tiles, v_tiles, ready_bars, free_bars, scratch_row, first_key, window_blocks,
                          full_end, full_begin, partial_blocks, num_blocks, dv_begin, BLOCK_N, STAGES)),
            ],
            [4, 4],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (q_tiles, k_tiles, v_tiles, ready_bars, free_bars, sinks, out, record, head_tile, scale,
                           softcap, v_scale, window, first_key, window_blocks, full_end, full_begin, partial_blocks,
                           num_blocks, dv_begin, out_t, out_h, 0, HEADS_PER_TILE, DV, ROWS, BLOCK_N, BLOCK_DV, STAGES,
                           SOFTCAP, SINKS)),
                (_consume, (q_tiles, k_tiles, v_tiles, ready_bars, free_bars, sinks, out, record, head_tile, scale,
                           softcap, v_scale, window, first_key, window_blocks, full_end, full_begin, partial_blocks,
                           num_blocks, dv_begin, out_t, out_h, 1, HEADS_PER_TILE, DV, ROWS, BLOCK_N, BLOCK_DV, STAGES,
                           SOFTCAP, SINKS)),
                (_consume, (q_tiles, k_tiles, v_tiles, ready_bars, free_bars, sinks, out, record, head_tile, scale,
                           softcap, v_scale, window, first_key, window_blocks, full_end, full_begin, partial_blocks,
                           num_blocks, dv_begin, out_t, out_h, 2, HEADS_PER_TILE, DV, ROWS, BLOCK_N, BLOCK_DV, STAGES,
                           SOFTCAP, SINKS)),
                (_produce, (k, v, k_tiles, v_tiles, ready_bars, free_bars, scratch_row, first_key, window_blocks,
                          full_end, full_begin, partial_blocks, num_blocks, dv_begin, BLOCK_N, STAGES)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


@dataclass(frozen=True)
class Config:
    """`block_m`: rows of a tile, shared equally by the `consumers`, warpgroups that multiply. `block_n`: keys of one
    loop iteration. `stages`: tiles of keys, and of values, in shared memory. `registers`: of a consumer's thread.
    `value_splits`: programs that share the value columns."""

    block_m: int
    block_n: int
    stages: int
    registers: int
    consumers: int = 2
    value_splits: int = 1


def config(chip: Chip, spec: MhaSpec, dtype: torch.dtype) -> Config | None:
    """Launch parameters; None where `triton_prefill` runs instead. `dtype`: type of the queries."""
    widest = max(spec.head_dim, spec.value_dim)
    if not chip.has_wgmma or dtype not in _TYPES or widest <= 64:
        return None
    if widest > 256:
        return Config(128, 64, 1, 240, value_splits=2 if spec.value_dim > 256 else 1)
    return Config(128, 128 if widest <= 128 else 64, 2, 240)


_TYPES = (torch.bfloat16, torch.float16)


def prefill(
    spec: MhaSpec,
    how: Config,
    tiles: Tiles,
    q: torch.Tensor,
    pools: dict[str, torch.Tensor],
    table: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """As `triton_prefill.prefill`."""
    num_kv_heads, dim, value_dim = spec.num_kv_heads, spec.head_dim, spec.value_dim
    q_per_kv = spec.num_heads // num_kv_heads
    tile_heads = heads_per_tile(spec, how.block_m)
    block_d, block_dv = max(64, next_power_of_2(dim)), max(64, next_power_of_2(value_dim))
    k_scratch, v_scratch = gather(
        spec, tiles, pools["k"], pools["k"] if spec.values_are_keys else pools["v"], table, q.dtype
    )
    k = _descriptor(k_scratch, dim, how.block_n, block_d)
    v = _descriptor(v_scratch, value_dim, how.block_n, block_dv // how.value_splits)
    prefill_kernel[(len(tiles.records) * num_kv_heads * (q_per_kv // tile_heads) * how.value_splits,)](
        q, k, v, tiles.records, out if sinks is None else sinks, out,
        spec.scale * k_scale, spec.softcap or 1.0, k_scale if spec.values_are_keys else v_scale,
        NO_WINDOW if spec.window is None else spec.window, tiles.rows, *q.stride()[:2], *out.stride()[:2],
        NUM_KV_HEADS=num_kv_heads, Q_PER_KV=q_per_kv, HEADS_PER_TILE=tile_heads, D=dim, DV=value_dim,
        BLOCK_M=how.block_m, BLOCK_N=how.block_n, BLOCK_D=block_d, BLOCK_DV=block_dv // how.value_splits,
        STAGES=how.stages, VALUE_SPLITS=how.value_splits, NUM_CONSUMERS=how.consumers, REGISTERS=how.registers,
        SOFTCAP=spec.softcap is not None, SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip


def _descriptor(rows: torch.Tensor, dim: int, block_n: int, block_d: int) -> Any:
    """The scratch as one matrix [G * rows, dim]."""
    return descriptor(rows.flatten(0, 1)[:, :dim], [block_n, block_d])


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Head dims 128, 256 with sinks, and 512, on a chip with WGMMA."""
    found = []
    for heads, groups, dim, sinks in ((64, 8, 128, False), (16, 2, 256, True), (32, 4, 512, False)):
        spec = MhaSpec(num_heads=heads, num_kv_heads=groups, head_dim=dim, scale=1.0, kv_dtype=torch.bfloat16)
        how = config(chip, spec, torch.bfloat16)
        if how is None:
            return []
        rows = []
        for columns in (dim, dim // how.value_splits):
            rows.append(descriptor_type(torch.bfloat16, [how.block_n, columns]))
        signature = {"q": "*bf16:16", "k": rows[0], "v": rows[1]}
        signature |= {"records": "*i32", "sinks": "*fp32", "out": "*bf16:16"}
        signature |= dict.fromkeys(("scale", "softcap", "v_scale"), "fp32") | {"window": "i32"}
        signature |= dict.fromkeys(("rows", "q_t", "q_h", "out_t", "out_h"), "i32:16")
        constants = {
            "NUM_KV_HEADS": groups,
            "Q_PER_KV": heads // groups,
            "HEADS_PER_TILE": heads_per_tile(spec, how.block_m),
            "D": dim,
        }
        constants |= {"DV": dim, "BLOCK_M": how.block_m, "BLOCK_N": how.block_n, "BLOCK_D": dim}
        constants |= {"BLOCK_DV": dim // how.value_splits, "VALUE_SPLITS": how.value_splits}
        constants |= {"STAGES": how.stages, "NUM_CONSUMERS": how.consumers, "REGISTERS": how.registers}
        constants |= {"SOFTCAP": False, "SINKS": sinks}
        name = f"mha prefill {heads}/{groups} x {dim}, warps apart"
        # Triton 3.7 needs one or two registers more than 3.6.
        found.append(Specialization(name, prefill_kernel, signature, constants, 4, 1, spills=8))
    return found
