"""FlashAttention prefill over a paged KV cache, whose keys and values are first gathered where many tiles read them.

Owns: the kernels of a prefill and the lists of tiles, built on the host. Must not know: decodes.

A tile packs the query heads of one KV head, token after token (FlashAttention's PackGQA): a tile of 128 rows holds 16
tokens of 8 heads.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from allotrope.attention.batch import BatchLayout, on_device
from allotrope.attention.mha.spec import MhaSpec
from allotrope.attention.mha.triton_decode import NO_WINDOW
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import higher_of, highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.softmax import LOG2E, LOWEST, logits_to_base_2
from allotrope.kernels.tiles import next_power_of_2

# Keys of one gathered block. A request's region of the scratch begins at a multiple, and is zeros up to the next one.
GATHER_BLOCK = 128
# Bytes of scratch above which the prefill reads pages instead: it is slower, and takes no memory.
_MAX_SCRATCH_BYTES = 2**29


@dataclass(frozen=True)
class Config:
    """`block_m`: rows of a tile. `block_n`: keys of one loop iteration. `gather`: copy a request's keys to contiguous
    scratch first, so that TMA can load whole tiles."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    gather: bool


def config(chip: Chip, spec: MhaSpec, dtype: torch.dtype) -> Config:
    """Launch parameters; `dtype`: type of the queries."""
    widest = max(next_power_of_2(spec.head_dim), next_power_of_2(spec.value_dim))
    if chip.vendor == "cpu":
        return Config(64, 32, 4, 1, spec.num_kv_heads % 2 == 0)
    if dtype == torch.float32:
        return Config(32, 32, 4, 1, False) if widest <= 128 else Config(16, 16, 4, 1, False)
    if chip.vendor == "amd":
        return Config(64, 32, 4, 1, False) if widest <= 256 else Config(32, 16, 4, 1, False)
    # With small tiles several programs share a multiprocessor, and one computes while another waits.
    if widest <= 128:
        how = Config(64, 64, 4, 2 if widest <= 64 else 3, True)
    else:
        how = Config(128, 64, 8, 2, True) if widest <= 256 else Config(64, 32, 8, 2, True)
    # Queries, and keys and values of each stage, two bytes a number; barriers take a little more.
    needed = 2 * widest * (how.block_m + 2 * how.block_n * how.stages) + 2048
    return how if chip.has_tma and needed <= chip.shared_memory else _by_pointers(widest)


def _by_pointers(widest: int) -> Config:
    """Launch parameters of NVIDIA's chips without TMA or Hopper's shared memory: within 99 KiB."""
    if widest <= 128:
        return Config(128, 32, 8, 5, False)
    return Config(64, 32, 8, 3, False) if widest <= 256 else Config(32, 32, 8, 2, False)


def without_gather(chip: Chip, spec: MhaSpec, how: Config) -> Config:
    """Launch parameters of the same layer that read pages, with no scratch."""
    widest = max(spec.head_dim, spec.value_dim)
    if how.gather and chip.vendor == "nvidia" and not chip.has_wgmma:
        return _by_pointers(next_power_of_2(widest))
    if not how.gather or widest > 256:
        return replace(how, gather=False)
    # The page table is read one stage ahead of the keys.
    return Config(128, 64, 8, 5 if widest <= 128 else 3, False)


@dataclass(frozen=True)
class Tiles:
    """`records`: [N, 5] int32 on the device, one for each tile, those with the most keys first: request, first token in
    the batch, number of tokens, position of the first, and the scratch row that position 0 of the request would have.
    `blocks`: [M, 4] int32, one for each block of the scratch: request, position, scratch row, KV length of the request.
    `rows`: rows of the scratch.
    """

    records: torch.Tensor
    blocks: torch.Tensor
    rows: int


def tiles(batch: BatchLayout, window: int | None, tokens: int) -> Tiles:
    """Cut the prompts of a batch into tiles of at most `tokens` tokens."""
    record_runs: list[np.ndarray] = []
    block_runs: list[np.ndarray] = []
    rows = 0
    for b in range(batch.num_decodes, batch.num_requests):
        context, n, count = batch.context_lens[b], batch.seq_lens[b], batch.query_lens[b]
        base = 0 if window is None else max(0, context + 1 - window) // GATHER_BLOCK * GATHER_BLOCK
        begin = np.arange(0, count, tokens)
        record = np.empty((len(begin), 5), dtype=np.int32)
        record[:, 0] = b
        record[:, 1] = batch.query_start[b] + begin
        record[:, 2] = np.minimum(count - begin, tokens)
        record[:, 3] = context + begin
        record[:, 4] = rows - base
        record_runs.append(record)
        position = np.arange(base, n, GATHER_BLOCK)
        block = np.empty((len(position), 4), dtype=np.int32)
        block[:, 0] = b
        block[:, 1] = position
        block[:, 2] = rows + position - base
        block[:, 3] = n
        block_runs.append(block)
        rows += len(position) * GATHER_BLOCK
    all_records, all_blocks = np.concatenate(record_runs), np.concatenate(block_runs)
    last = all_records[:, 3] + all_records[:, 2]
    order = np.argsort(-(last if window is None else np.minimum(last, window)), kind="stable")
    records, blocks = (on_device(one, torch.int32, batch.device) for one in (all_records[order], all_blocks))
    return Tiles(records, blocks, rows)


@pdl_jit
def gather_kernel(
    k_pool, v_pool, table, blocks, k_scratch, v_scratch, rows, kp_p, kp_s, kp_g, vp_p, vp_s, vp_g, table_b,
    PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PITCH: tl.constexpr, PITCH_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_T: tl.constexpr, GATHER_BLOCK: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK_T keys and values of one request and KV head to the scratch [G, rows, pitch], then zeros."""
    gdc_wait()
    gdc_launch_dependents()
    program, kv_head = tl.program_id(0), tl.program_id(1)
    block = blocks + program // (GATHER_BLOCK // BLOCK_T) * 4
    offs_t = program % (GATHER_BLOCK // BLOCK_T) * BLOCK_T + tl.arange(0, BLOCK_T)
    request = tl.load(block).to(tl.int64)
    kv_pos = tl.load(block + 1) + offs_t
    scratch_row = kv_head.to(tl.int64) * rows + tl.load(block + 2) + offs_t
    page = tl.load(table + request * table_b + kv_pos // PAGE, mask=kv_pos < tl.load(block + 3), other=-1)
    page, page_offset = page.to(tl.int64), kv_pos % PAGE
    mask_t = page >= 0
    offs_d = tl.arange(0, BLOCK_D)
    kv_offset = page * kp_p + page_offset * kp_s + kv_head * kp_g
    x = tl.load(k_pool + kv_offset[:, None] + offs_d[None, :], mask=mask_t[:, None] & (offs_d < D)[None, :], other=0.0)
    mask = (offs_d < PITCH)[None, :] & (offs_t >= 0)[:, None]
    tl.store(k_scratch + scratch_row[:, None] * PITCH + offs_d[None, :], x.to(k_scratch.dtype.element_ty), mask=mask)
    if not VALUES_ARE_KEYS:
        offs_d = tl.arange(0, BLOCK_DV)
        kv_offset = page * vp_p + page_offset * vp_s + kv_head * vp_g
        x = tl.load(
            v_pool + kv_offset[:, None] + offs_d[None, :], mask=mask_t[:, None] & (offs_d < DV)[None, :], other=0.0
        )
        mask = (offs_d < PITCH_V)[None, :] & (offs_t >= 0)[:, None]
        tl.store(
            v_scratch + scratch_row[:, None] * PITCH_V + offs_d[None, :], x.to(v_scratch.dtype.element_ty), mask=mask
        )


@triton.jit
def _load_kv(pool, scratch_row, start, kv_len, table, offs_d, stride_p, stride_s, PAGE: tl.constexpr, D: tl.constexpr,
          BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GATHERED: tl.constexpr):  # fmt: skip
    """[BLOCK_N, BLOCK_D] keys or values from position `start` on; zeros from `kv_len` on."""
    if GATHERED:
        x = pool.load([scratch_row + start, 0])
    else:
        offs_n = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + offs_n // PAGE, mask=offs_n < kv_len, other=-1).to(tl.int64)
        kv_offset = page * stride_p + (offs_n % PAGE) * stride_s
        mask = (page >= 0)[:, None]
        if D != BLOCK_D:
            mask = mask & (offs_d < D)[None, :]
        x = tl.load(pool + kv_offset[:, None] + offs_d[None, :], mask=mask, other=0.0)
    return x


@triton.jit
def online_softmax(logits, m_i, l_i, scale, softcap, SOFTCAP: tl.constexpr):
    """One step of online softmax: p, the new m_i and l_i, and alpha, which rescales the accumulator."""
    if SOFTCAP:
        logits = logits_to_base_2(logits, scale, softcap, True)
        m_new = higher_of(m_i, highest(logits, 1))
        p = tl.exp2(logits - m_new[:, None])
    else:
        m_new = higher_of(m_i, highest(logits, 1) * (scale * LOG2E))
        p = tl.exp2(logits * (scale * LOG2E) - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    return p, m_new, l_i * alpha + tl.sum(p, 1), alpha


@pdl_jit
def prefill_kernel(
    q, k, v, table, records, sinks, out,
    scale, softcap, v_scale, window, rows,
    q_t, q_h, kp_p, kp_s, kp_g, vp_p, vp_s, vp_g, table_b, out_t, out_h,
    NUM_KV_HEADS: tl.constexpr, Q_PER_KV: tl.constexpr, HEADS_PER_TILE: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, VALUES_ARE_KEYS: tl.constexpr,
    GATHERED: tl.constexpr,
):  # fmt: skip
    """One tile: BLOCK_M // HEADS_PER_TILE tokens of HEADS_PER_TILE query heads of one KV head, over all of its keys.

    `k`, `v`: pools, or with GATHERED descriptors of the scratch [G * rows, D]. Blocks of keys that every row attends to
    need no mask. The partial blocks, at the window's edge and at the diagonal, come first.
    """
    gdc_wait()
    gdc_launch_dependents()
    head_tile = tl.program_id(0) % (NUM_KV_HEADS * (Q_PER_KV // HEADS_PER_TILE))
    record = records + tl.program_id(0) // (NUM_KV_HEADS * (Q_PER_KV // HEADS_PER_TILE)) * 5
    kv_head = head_tile // (Q_PER_KV // HEADS_PER_TILE)
    request = tl.load(record).to(tl.int64)
    first_token, num_tokens, first_pos = tl.load(record + 1).to(tl.int64), tl.load(record + 2), tl.load(record + 3)
    scratch_row = kv_head * rows + tl.load(record + 4)
    offs_m = tl.arange(0, BLOCK_M)
    head = head_tile * HEADS_PER_TILE + offs_m % HEADS_PER_TILE
    mask_m = offs_m // HEADS_PER_TILE < num_tokens
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_offset = (first_token + offs_m // HEADS_PER_TILE) * q_t + head * q_h
    mask_md = mask_m[:, None] & (offs_d < D)[None, :]
    queries = tl.load(q + q_offset[:, None] + offs_d[None, :], mask=mask_md, other=0.0)
    q_pos = first_pos + offs_m // HEADS_PER_TILE
    kv_len = first_pos + num_tokens
    table += request * table_b
    if not GATHERED:
        k += kv_head * kp_g
        v += kv_head * vp_g
    first_key = tl.maximum(first_pos + 1 - window, 0) // BLOCK_N * BLOCK_N
    # The full blocks reach from the start of the last row's window to the first row's own position.
    full_begin = tl.cdiv(tl.maximum(kv_len - window, 0), BLOCK_N) * BLOCK_N
    full_end = tl.maximum((first_pos + 1) // BLOCK_N * BLOCK_N, full_begin)
    window_blocks = (full_begin - first_key) // BLOCK_N
    partial_blocks = window_blocks + tl.cdiv(tl.maximum(kv_len - full_end, 0), BLOCK_N)
    m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for i in range(partial_blocks):
        start = tl.where(i < window_blocks, first_key + i * BLOCK_N, full_end + (i - window_blocks) * BLOCK_N)
        keys = _load_kv(k, scratch_row, start, kv_len, table, offs_d, kp_p, kp_s, PAGE, D, BLOCK_N, BLOCK_D, GATHERED)
        keys = keys.to(queries.dtype)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        distance = q_pos[:, None] - (start + tl.arange(0, BLOCK_N))[None, :]
        if SOFTCAP:
            logits = logits_to_base_2(logits, scale, softcap, True)
            logits = tl.where((distance >= 0) & (distance < window), logits, float("-inf"))
            p, m_i, l_i, alpha = online_softmax(logits, m_i, l_i, 1.0 / LOG2E, softcap, False)
        else:
            logits = tl.where((distance >= 0) & (distance < window), logits, float("-inf"))
            p, m_i, l_i, alpha = online_softmax(logits, m_i, l_i, scale, softcap, False)
        if VALUES_ARE_KEYS:
            values = keys
        else:
            values = _load_kv(
                v, scratch_row, start, kv_len, table, offs_dv, vp_p, vp_s, PAGE, DV, BLOCK_N, BLOCK_DV, GATHERED
            )
            values = values.to(queries.dtype)
        acc = tl.dot(p.to(queries.dtype), values, acc * alpha[:, None], input_precision="ieee")
    for start in range(full_begin, full_end, BLOCK_N):
        keys = _load_kv(k, scratch_row, start, kv_len, table, offs_d, kp_p, kp_s, PAGE, D, BLOCK_N, BLOCK_D, GATHERED)
        keys = keys.to(queries.dtype)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        p, m_i, l_i, alpha = online_softmax(logits, m_i, l_i, scale, softcap, SOFTCAP)
        if VALUES_ARE_KEYS:
            values = keys
        else:
            values = _load_kv(
                v, scratch_row, start, kv_len, table, offs_dv, vp_p, vp_s, PAGE, DV, BLOCK_N, BLOCK_DV, GATHERED
            )
            values = values.to(queries.dtype)
        acc = tl.dot(p.to(queries.dtype), values, acc * alpha[:, None], input_precision="ieee")
    if SINKS:
        sink = tl.load(sinks + head, mask=mask_m, other=0.0).to(tl.float32) * LOG2E
        m_new = higher_of(m_i, sink)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.exp2(sink - m_new)
        acc = acc * alpha[:, None]
    acc = acc * (v_scale / l_i)[:, None]
    out_offset = (first_token + offs_m // HEADS_PER_TILE) * out_t + head * out_h
    mask_md = mask_m[:, None] & (offs_dv < DV)[None, :]
    tl.store(out + out_offset[:, None] + offs_dv[None, :], acc.to(out.dtype.element_ty), mask=mask_md)


def heads_per_tile(spec: MhaSpec, block_m: int) -> int:
    """Query heads of one KV head that share a tile: all of them, or the largest divisor that fits."""
    repeat = spec.num_heads // spec.num_kv_heads
    return max(size for size in range(1, min(repeat, block_m) + 1) if repeat % size == 0)


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
    """Attend for every tile of `tiles`, whose tokens are at most `how.block_m // heads_per_tile`.

    `q`: [T, H, D]. `pools`: "k" [P, S, G, D], "v" [P, S, G, Dv]. `table`: [B, W] page table. `out`: [T, H, Dv]; the
    tokens of the tiles are overwritten.
    """
    num_kv_heads, dim, value_dim = spec.num_kv_heads, spec.head_dim, spec.value_dim
    q_per_kv = spec.num_heads // num_kv_heads
    tile_heads = heads_per_tile(spec, how.block_m)
    k_pool = pools["k"]
    v_pool = k_pool if spec.values_are_keys else pools["v"]
    page_size = k_pool.shape[1]
    block_d, block_dv = max(16, next_power_of_2(dim)), max(16, next_power_of_2(value_dim))
    k: Any = k_pool
    v: Any = v_pool
    if how.gather:
        k_scratch, v_scratch = gather(spec, tiles, k_pool, v_pool, table, q.dtype)
        k = _descriptor(k_scratch, dim, how.block_n, block_d)
        v = _descriptor(v_scratch, value_dim, how.block_n, block_dv)
    prefill_kernel[(len(tiles.records) * num_kv_heads * (q_per_kv // tile_heads),)](
        q, k, v, table, tiles.records, out if sinks is None else sinks, out,
        spec.scale * k_scale, spec.softcap or 1.0, k_scale if spec.values_are_keys else v_scale,
        NO_WINDOW if spec.window is None else spec.window, tiles.rows,
        q.stride(0), q.stride(1), *k_pool.stride()[:3], *v_pool.stride()[:3], table.stride(0), *out.stride()[:2],
        NUM_KV_HEADS=num_kv_heads, Q_PER_KV=q_per_kv, HEADS_PER_TILE=tile_heads, PAGE=page_size, D=dim, DV=value_dim,
        BLOCK_M=how.block_m, BLOCK_N=how.block_n, BLOCK_D=block_d, BLOCK_DV=block_dv, SOFTCAP=spec.softcap is not None,
        SINKS=sinks is not None, VALUES_ARE_KEYS=spec.values_are_keys, GATHERED=how.gather,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip


def fits_scratch(spec: MhaSpec, tiles: Tiles, dtype: torch.dtype) -> bool:
    """Whether the scratch of the gathered keys and values is small enough."""
    dims = spec.head_dim if spec.values_are_keys else spec.head_dim + spec.value_dim
    return tiles.rows * spec.num_kv_heads * dims * dtype.itemsize <= _MAX_SCRATCH_BYTES


def gather(
    spec: MhaSpec, tiles: Tiles, k_pool: torch.Tensor, v_pool: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the keys and values of every prompt to contiguous scratch, [G, rows, pitch] each, in `dtype`.

    The pitch is a multiple of 16 bytes. A request's rows are followed by zeros up to a multiple of `GATHER_BLOCK`.
    """
    num_kv_heads = spec.num_kv_heads
    pitch, pitch_v = (-(-dim // 8) * 8 for dim in (spec.head_dim, spec.value_dim))
    k_scratch = torch.empty((num_kv_heads, tiles.rows, pitch), dtype=dtype, device=table.device)
    v_scratch = (
        k_scratch
        if spec.values_are_keys
        else torch.empty((num_kv_heads, tiles.rows, pitch_v), dtype=dtype, device=table.device)
    )
    block_t = 32
    gather_kernel[(len(tiles.blocks) * (GATHER_BLOCK // block_t), num_kv_heads)](
        k_pool, v_pool, table, tiles.blocks, k_scratch, v_scratch, tiles.rows,
        *k_pool.stride()[:3], *v_pool.stride()[:3], table.stride(0),
        PAGE=k_pool.shape[1], D=spec.head_dim, DV=spec.value_dim, PITCH=pitch, PITCH_V=pitch_v,
        BLOCK_D=next_power_of_2(pitch), BLOCK_DV=next_power_of_2(pitch_v), BLOCK_T=block_t,
        GATHER_BLOCK=GATHER_BLOCK, VALUES_ARE_KEYS=spec.values_are_keys, num_warps=4,
    )  # fmt: skip
    return k_scratch, v_scratch


def _descriptor(rows: torch.Tensor, dim: int, block_n: int, block_d: int) -> TensorDescriptor:
    """The scratch as one matrix [G * rows, dim]."""
    flat = rows.flatten(0, 1)
    return TensorDescriptor(flat, [flat.shape[0], dim], [flat.stride(0), 1], [block_n, block_d])


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes: query heads, KV heads, head dim, sinks."""
    found = []
    sizes = [(64, 8, 128, False), (64, 8, 64, True), (32, 4, 512, False)]
    if chip.vendor == "nvidia" and not chip.has_wgmma:
        # Elsewhere these are another kernel's, or tiles as small as those of 512.
        sizes.append((16, 2, 256, True))
    for heads, groups, dim, sinks in sizes:
        spec = MhaSpec(num_heads=heads, num_kv_heads=groups, head_dim=dim, scale=1.0, kv_dtype=torch.bfloat16)
        how = config(chip, spec, torch.bfloat16)
        rows = f"tensordesc<bf16[{how.block_n},{dim}]>" if how.gather else "*bf16:16"
        signature = {"q": "*bf16:16", "k": rows, "v": rows, "table": "*i64", "records": "*i32", "sinks": "*fp32"}
        signature |= {"out": "*bf16:16"} | dict.fromkeys(("scale", "softcap", "v_scale"), "fp32")
        signature |= dict.fromkeys(("window", "table_b"), "i32")
        signature |= dict.fromkeys(("rows", "q_t", "q_h", "kp_p", "kp_s", "kp_g"), "i32:16")
        signature |= dict.fromkeys(("vp_p", "vp_s", "vp_g", "out_t", "out_h"), "i32:16")
        constants = {
            "NUM_KV_HEADS": groups,
            "Q_PER_KV": heads // groups,
            "HEADS_PER_TILE": heads_per_tile(spec, how.block_m),
            "PAGE": 64,
        }
        constants |= {"D": dim, "DV": dim, "BLOCK_M": how.block_m, "BLOCK_N": how.block_n, "BLOCK_D": dim}
        constants |= {
            "BLOCK_DV": dim,
            "SOFTCAP": False,
            "SINKS": sinks,
            "VALUES_ARE_KEYS": False,
            "GATHERED": how.gather,
        }
        name = f"mha prefill {heads}/{groups} x {dim}"
        found.append(Specialization(name, prefill_kernel, signature, constants, how.warps, how.stages))
    return found
