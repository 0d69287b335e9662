"""Prompts on Hopper: one warp fetches gathered keys and values, two groups of four warps multiply.

Owns: the kernel for bf16 and fp16 prompts. Must not know: pages; `triton_prefill` gathers them.

Each group owns half of a tile's rows. It starts the products of one block's keys before the last block's values are
multiplied, so that its softmax runs beside a product; the two groups fall out of step and fill each other's gaps.

The sums of values wider than 256 do not fit into registers: two programs have half of the columns each. Both score all
keys, which costs half as much again, and is paid back by tiles of 128 rows: keys come from the L2 half as often.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from allotrope.attention.mha.spec import MhaSpec
from allotrope.attention.mha.triton_decode import EVERYTHING
from allotrope.attention.mha.triton_prefill import Tiles, gathered, heads_of_a_tile
from allotrope.kernels.chip import Chip
from allotrope.kernels.gluon.opaque_zero import unknown_zero
from allotrope.kernels.gluon.propagate_nan import higher_of, highest
from allotrope.kernels.gluon.ring import ring
from allotrope.kernels.gluon.versions import barrier, load_tile
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, with_pdl
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.softmax import LOG2E, LOWEST
from allotrope.kernels.tiles import next_power_of_2


@gluon.jit
def _start(i, first, ahead, high, low, masked, BLOCK_N: gl.constexpr):
    """Where the i-th block begins: those at the window's edge, those at the diagonal, then those seen wholly."""
    edge = gl.where(i < ahead, first + i * BLOCK_N, high + (i - ahead) * BLOCK_N)
    return gl.where(i < masked, edge, low + (i - masked) * BLOCK_N)


@gluon.jit
def _fetch(
    k, v, k_tiles, v_tiles, ready, free, scratch_row, first, ahead, high, low, masked, blocks, column,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The fetching warp: keys of a block and values of the block before, as they are used, to tiles that are free."""
    for i in range(blocks + 1):
        if i < blocks:
            slot = i % STAGES
            row = scratch_row + _start(i, first, ahead, high, low, masked, BLOCK_N)
            mbarrier.wait(free.index(slot), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(slot), k.block_type.nbytes)
            load_tile(k, [row, 0], ready.index(slot), k_tiles.index(slot))
        if i > 0:
            slot = (i - 1) % STAGES
            row = scratch_row + _start(i - 1, first, ahead, high, low, masked, BLOCK_N)
            mbarrier.wait(free.index(STAGES + slot), (((i - 1) // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(STAGES + slot), v.block_type.nbytes)
            load_tile(v, [row, column], ready.index(STAGES + slot), v_tiles.index(slot))


@gluon.jit
def _weigh(logits, top, total, at, start, scale, softcap, window, MASK: gl.constexpr, SOFTCAP: gl.constexpr,
           BLOCK_N: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Weights of one block; returns them, the new maximum and sum, and how the old ones fade."""
    if SOFTCAP:
        x = logits * (scale / softcap)
        logits = (softcap * LOG2E) * (1.0 - 2.0 / (gl.exp2(x * (2.0 * LOG2E)) + 1.0))
        factor = 1.0
    else:
        factor = scale * LOG2E
    if MASK:
        key = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        behind = gl.expand_dims(at, 1) - gl.expand_dims(key, 0)
        logits = gl.where((behind >= 0) & (behind < window), logits, float("-inf"))
    higher = higher_of(top, highest(logits, 1) * factor)
    weights = gl.exp2(logits * factor - gl.expand_dims(higher, 1))
    fade = gl.exp2(top - higher)
    return weights, higher, total * fade + gl.sum(weights, 1), fade


@gluon.jit
def _packed(weights, KIND: gl.constexpr):
    """[M, N] fp32 as [M, N / 2] words of two numbers: what a loop carries in 16-bit types, it takes apart."""
    low, high = gl.split(weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
    if gl.bfloat16 == KIND:
        convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        convert: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"  # type: ignore[no-redef]
    return gl.inline_asm_elementwise(convert, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpacked(words, KIND: gl.constexpr, given: gl.constexpr):
    """The words as [M, N] numbers, as the tensor core takes them from registers."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    numbers = gl.join(low, high).to(KIND, bitcast=True)
    return gl.convert_layout(numbers.reshape([words.shape[0], words.shape[1] * 2]), given)


@gluon.jit
def _attend(
    q, k_tiles, v_tiles, ready, free, sinks, out, record, part, scale, softcap, v_scale, window,
    first, ahead, high, low, masked, blocks, column, out_t, out_h,
    WHICH: gl.constexpr, HEADS: gl.constexpr, DV: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_DV: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """One group of four warps: ROWS rows of the tile over all blocks, and their output."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mixes: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    given: gl.constexpr = gl.DotOperandLayout(0, mixes, 2)
    kind: gl.constexpr = q.dtype
    token, count, position = gl.load(record + 1).to(gl.int64), gl.load(record + 2), gl.load(record + 3)
    lane = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores))
    at = position + lane // HEADS
    none = gl.zeros([ROWS, BLOCK_N], gl.float32, scores)
    top = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, scores))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, scores))
    mixed = gl.zeros([ROWS, BLOCK_DV], gl.float32, mixes)
    mbarrier.wait(ready.index(0), 0)
    logits = warpgroup_mma(q.index(WHICH), k_tiles.index(0).permute((1, 0)), none, use_acc=False)
    mbarrier.arrive(free.index(0), count=1)
    start = _start(0, first, ahead, high, low, masked, BLOCK_N)
    weights, top, total, fade = _weigh(
        logits, top, total, at, start, scale, softcap, window, True, SOFTCAP, BLOCK_N, scores
    )
    weights = _packed(weights, kind)
    mbarrier.wait(ready.index(1 % STAGES), (1 // STAGES) & 1, pred=blocks > 1)
    for i in range(1, masked):
        start = _start(i, first, ahead, high, low, masked, BLOCK_N)
        weights, mixed, top, total = _advance(
            i, blocks, start, q, k_tiles, v_tiles, ready, free, weights, mixed, top, total, at, scale, softcap,
            window, none, WHICH, True, SOFTCAP, BLOCK_N, STAGES, scores, mixes, given,
        )  # fmt: skip
    for i in range(gl.maximum(masked, 1), blocks):
        weights, mixed, top, total = _advance(
            i, blocks, 0, q, k_tiles, v_tiles, ready, free, weights, mixed, top, total, at, scale, softcap,
            window, none, WHICH, False, SOFTCAP, BLOCK_N, STAGES, scores, mixes, given,
        )  # fmt: skip
    slot = (blocks - 1) % STAGES
    mbarrier.wait(ready.index(STAGES + slot), ((blocks - 1) // STAGES) & 1)
    mixed = warpgroup_mma(_unpacked(weights, kind, given), v_tiles.index(slot), mixed)
    if SINKS:
        real = lane // HEADS < count
        sink = gl.load(sinks + part * HEADS + lane % HEADS, mask=real, other=0.0).to(gl.float32) * LOG2E
        higher = higher_of(top, sink)
        fade = gl.exp2(top - higher)
        total = total * fade + gl.exp2(sink - higher)
        factor = fade * v_scale / total
    else:
        factor = v_scale / total
    mixed = mixed * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, mixes)), 1)
    lane = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mixes))
    dim = column + gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(0, mixes))
    to = (token + lane // HEADS) * out_t + (part * HEADS + lane % HEADS) * out_h
    mask = gl.expand_dims(lane // HEADS < count, 1) & gl.expand_dims(dim < DV, 0)
    gl.store(out + gl.expand_dims(to, 1) + gl.expand_dims(dim, 0), mixed.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _advance(
    i, blocks, start, q, k_tiles, v_tiles, ready, free, weights, mixed, top, total, at, scale, softcap, window,
    none, WHICH: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    scores: gl.constexpr, mixes: gl.constexpr, given: gl.constexpr,
):  # fmt: skip
    """Block i's keys, beside block i - 1's values."""
    kind: gl.constexpr = q.dtype
    slot, before, which = i % STAGES, (i - 1) % STAGES, WHICH
    if STAGES == 1:
        slot = unknown_zero(i)
        before, which = slot, WHICH + slot
    logits = warpgroup_mma(
        q.index(which), k_tiles.index(slot).permute((1, 0)), none, use_acc=False, is_async=True
    )  # fmt: skip
    mbarrier.wait(ready.index(STAGES + before), ((i - 1) // STAGES) & 1)
    mixed = warpgroup_mma(_unpacked(weights, kind, given), v_tiles.index(before), mixed, is_async=True)
    logits = warpgroup_mma_wait(1, deps=(logits,))
    mbarrier.arrive(free.index(slot), count=1)
    following, top, total, fade = _weigh(
        logits, top, total, at, start, scale, softcap, window, MASK, SOFTCAP, BLOCK_N, scores
    )
    # This wait is a loop, and the next one takes the sums: else the assembler puts the softmax behind both.
    mbarrier.wait(ready.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1, pred=i + 1 < blocks)
    mixed, total, fade = warpgroup_mma_wait(0, deps=(mixed, total, fade))
    mbarrier.arrive(free.index(STAGES + before), count=1)
    mixed = mixed * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, mixes)), 1)
    return _packed(following, kind), mixed, top, total


@with_pdl
@gluon.jit
def prefill_kernel(
    q, k, v, records, sinks, out, scale, softcap, v_scale, window, rows, q_t, q_h, out_t, out_h,
    GROUPS: gl.constexpr, R: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, WORKERS: gl.constexpr, REGISTERS: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """As `triton_prefill.prefill_kernel` with GATHERED, for one of PARTS of the columns; two groups of BLOCK_M // 2
    rows and one warp that fetches."""
    gdc_wait()
    gdc_launch_dependents()
    column = gl.program_id(0) % PARTS * BLOCK_DV
    tile = gl.program_id(0) // PARTS
    part = tile % (GROUPS * (R // HEADS))
    record = records + tile // (GROUPS * (R // HEADS)) * 5
    group = part // (R // HEADS)
    token, count, position = gl.load(record + 1).to(gl.int64), gl.load(record + 2), gl.load(record + 3)
    scratch_row = group * rows + gl.load(record + 4)
    n = position + count
    first = gl.maximum(position + 1 - window, 0) // BLOCK_N * BLOCK_N
    low = gl.cdiv(gl.maximum(n - window, 0), BLOCK_N) * BLOCK_N
    high = gl.maximum((position + 1) // BLOCK_N * BLOCK_N, low)
    ahead = (low - first) // BLOCK_N
    masked = ahead + gl.cdiv(gl.maximum(n - high, 0), BLOCK_N)
    blocks = masked + (high - low) // BLOCK_N

    ROWS: gl.constexpr = BLOCK_M // WORKERS
    kind: gl.constexpr = q.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], kind)
    q_tiles = gl.allocate_shared_memory(kind, [WORKERS, ROWS, BLOCK_D], q_layout)
    k_tiles = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, BLOCK_D], k.layout)
    v_tiles = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, BLOCK_DV], v.layout)
    ready, free = ring(2 * STAGES, WORKERS)

    ACROSS: gl.constexpr = min(BLOCK_D // 8, 32)
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    dim = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, loads))
    for which in gl.static_range(WORKERS):
        lane = which * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, loads))
        here = (token + lane // HEADS) * q_t + (part * HEADS + lane % HEADS) * q_h
        mask = gl.expand_dims(lane // HEADS < count, 1) & gl.expand_dims(dim < D, 0)
        x = gl.load(q + gl.expand_dims(here, 1) + gl.expand_dims(dim, 0), mask=mask, other=0.0)
        q_tiles.index(which).store(x)
    fence_async_shared()
    barrier()
    if WORKERS == 2:
        gl.warp_specialize(
            [
                (_attend, (q_tiles, k_tiles, v_tiles, ready, free, sinks, out, record, part, scale, softcap, v_scale,
                           window, first, ahead, high, low, masked, blocks, column, out_t, out_h,
                           0, HEADS, DV, ROWS, BLOCK_N, BLOCK_DV, STAGES, SOFTCAP, SINKS)),
                (_attend, (q_tiles, k_tiles, v_tiles, ready, free, sinks, out, record, part, scale, softcap, v_scale,
                           window, first, ahead, high, low, masked, blocks, column, out_t, out_h,
                           1, HEADS, DV, ROWS, BLOCK_N, BLOCK_DV, STAGES, SOFTCAP, SINKS)),
                (_fetch, (k, v, k_tiles, v_tiles, ready, free, scratch_row, first, ahead, high, low, masked, blocks,
                          column, BLOCK_N, STAGES)),
            ],
            [4, 4],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (q_tiles, k_tiles, v_tiles, ready, free, sinks, out, record, part, scale, softcap, v_scale,
                           window, first, ahead, high, low, masked, blocks, column, out_t, out_h,
                           0, HEADS, DV, ROWS, BLOCK_N, BLOCK_DV, STAGES, SOFTCAP, SINKS)),
                (_attend, (q_tiles, k_tiles, v_tiles, ready, free, sinks, out, record, part, scale, softcap, v_scale,
                           window, first, ahead, high, low, masked, blocks, column, out_t, out_h,
                           1, HEADS, DV, ROWS, BLOCK_N, BLOCK_DV, STAGES, SOFTCAP, SINKS)),
                (_attend, (q_tiles, k_tiles, v_tiles, ready, free, sinks, out, record, part, scale, softcap, v_scale,
                           window, first, ahead, high, low, masked, blocks, column, out_t, out_h,
                           2, HEADS, DV, ROWS, BLOCK_N, BLOCK_DV, STAGES, SOFTCAP, SINKS)),
                (_fetch, (k, v, k_tiles, v_tiles, ready, free, scratch_row, first, ahead, high, low, masked, blocks,
                          column, BLOCK_N, STAGES)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


@dataclass(frozen=True)
class Config:
    """`block_m`: rows of a tile, an equal part for each of the `workers`, groups of four warps. `block_n`: keys of one
    step. `stages`: tiles of keys, and of values, that are held. `registers`: of a thread that multiplies. `parts`:
    programs that share the columns of the values."""

    block_m: int
    block_n: int
    stages: int
    registers: int
    workers: int = 2
    parts: int = 1


def config(chip: Chip, spec: MhaSpec, dtype: torch.dtype) -> Config | None:
    """Launch parameters; None where `triton_prefill` is to be taken. `dtype`: type of the queries."""
    widest = max(spec.head_dim, spec.value_dim)
    if not chip.has_wgmma or dtype not in _TYPES or widest <= 64:
        return None
    if widest > 256:
        return Config(128, 64, 1, 240, parts=2 if spec.value_dim > 256 else 1)
    return Config(128, 128 if widest <= 128 else 64, 2, 240)


_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def prefill(
    spec: MhaSpec,
    how: Config,
    cut: Tiles,
    q: torch.Tensor,
    pools: dict[str, torch.Tensor],
    table: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """As `triton_prefill.prefill`."""
    groups, dim, value_dim = spec.num_kv_heads, spec.head_dim, spec.value_dim
    repeat = spec.num_heads // groups
    heads = heads_of_a_tile(spec, how.block_m)
    block_d, block_dv = max(64, next_power_of_2(dim)), max(64, next_power_of_2(value_dim))
    k_rows, v_rows = gathered(spec, cut, pools["k"], pools["k"] if spec.values_are_keys else pools["v"], table, q.dtype)
    k = _descriptor(k_rows, dim, how.block_n, block_d)
    v = _descriptor(v_rows, value_dim, how.block_n, block_dv // how.parts)
    prefill_kernel[(len(cut.records) * groups * (repeat // heads) * how.parts,)](
        q, k, v, cut.records, out if sinks is None else sinks, out,
        spec.scale * k_scale, spec.softcap or 1.0, k_scale if spec.values_are_keys else v_scale,
        EVERYTHING if spec.window is None else spec.window, cut.rows, *q.stride()[:2], *out.stride()[:2],
        GROUPS=groups, R=repeat, HEADS=heads, D=dim, DV=value_dim, BLOCK_M=how.block_m, BLOCK_N=how.block_n,
        BLOCK_D=block_d, BLOCK_DV=block_dv // how.parts, STAGES=how.stages, PARTS=how.parts, WORKERS=how.workers,
        REGISTERS=how.registers, SOFTCAP=spec.softcap is not None, SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip


def _descriptor(rows: torch.Tensor, dim: int, block_n: int, block_d: int) -> Any:
    """The scratch as one matrix [G * rows, dim]."""
    flat = rows.flatten(0, 1)
    layout = gl.NVMMASharedLayout.get_default_for([block_n, block_d], _TYPES[rows.dtype])
    return TensorDescriptor(flat, [flat.shape[0], dim], [flat.stride(0), 1], [block_n, block_d], layout)


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Heads of 128, of 256 with sinks, and of 512; nothing but for Hopper."""
    found = []
    for heads, groups, dim, sinks in ((64, 8, 128, False), (16, 2, 256, True), (32, 4, 512, False)):
        spec = MhaSpec(num_heads=heads, num_kv_heads=groups, head_dim=dim, scale=1.0, kv_dtype=torch.bfloat16)
        how = config(chip, spec, torch.bfloat16)
        if how is None:
            return []
        rows = []
        for columns in (dim, dim // how.parts):
            layout = gl.NVMMASharedLayout.get_default_for([how.block_n, columns], gl.bfloat16)
            rows.append(f"tensordesc<bf16[{how.block_n},{columns}],{layout!r}>")
        signature = {"q": "*bf16:16", "k": rows[0], "v": rows[1]}
        signature |= {"records": "*i32", "sinks": "*fp32", "out": "*bf16:16"}
        signature |= dict.fromkeys(("scale", "softcap", "v_scale"), "fp32") | {"window": "i32"}
        signature |= dict.fromkeys(("rows", "q_t", "q_h", "out_t", "out_h"), "i32:16")
        constants = {"GROUPS": groups, "R": heads // groups, "HEADS": heads_of_a_tile(spec, how.block_m), "D": dim}
        constants |= {"DV": dim, "BLOCK_M": how.block_m, "BLOCK_N": how.block_n, "BLOCK_D": dim}
        constants |= {"BLOCK_DV": dim // how.parts, "PARTS": how.parts}
        constants |= {"STAGES": how.stages, "WORKERS": how.workers, "REGISTERS": how.registers}
        constants |= {"SOFTCAP": False, "SINKS": sinks}
        name = f"mha prefill {heads}/{groups} x {dim}, warps apart"
        # Triton 3.7 needs a register or two more than 3.6.
        found.append(Specialization(name, prefill_kernel, signature, constants, 4, 1, spills=8))
    return found
