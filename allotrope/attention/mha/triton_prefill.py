"""Prompts against paged rows: tiles of queries, the keys first gathered where many tiles read them.

Owns: the kernels of a prefill and the lists of tiles, made on the host. Must not know: decodes.

The query heads of a key/value head are rows of one tile, token after token: a tile of 128 rows is 16 tokens of 8 heads.
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

from allotrope.attention.batch import BatchLayout
from allotrope.attention.mha.spec import MhaSpec
from allotrope.attention.mha.triton_decode import EVERYTHING
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import higher_of, highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.softmax import LOG2E, LOWEST, logits_to_base_2
from allotrope.kernels.tiles import next_power_of_2

# Rows of one gathered block: a request's region of the scratch begins at a multiple, and is zeros to the next one.
REGION = 128
# Bytes of gathered rows above which prompts read their pages instead: it is slower, and takes no memory.
_MOST_GATHERED = 2**29


@dataclass(frozen=True)
class Config:
    """`block_m`: rows of a tile. `block_n`: keys of one step. `gather`: copy a request's keys side by side first, so
    that the chip's copy engine can fetch whole tiles."""

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
    # Small tiles, so that several programs of a multiprocessor fill each other's gaps.
    if widest <= 128:
        how = Config(64, 64, 4, 2 if widest <= 64 else 3, True)
    else:
        how = Config(128, 64, 8, 2, True) if widest <= 256 else Config(64, 32, 8, 2, True)
    # Queries, and keys and values of each stage, two bytes a number; barriers take a little more.
    needed = 2 * widest * (how.block_m + 2 * how.block_n * how.stages) + 2048
    return how if chip.has_tma and needed <= chip.shared_memory else _by_pointers(widest)


def _by_pointers(widest: int) -> Config:
    """Launch parameters of NVIDIA's chips without Hopper's shared memory or its copy engine: within 99 KiB."""
    if widest <= 128:
        return Config(128, 32, 8, 5, False)
    return Config(64, 32, 8, 3, False) if widest <= 256 else Config(32, 32, 8, 2, False)


def paged(chip: Chip, spec: MhaSpec, how: Config) -> Config:
    """Launch parameters of the same layer without gathering."""
    widest = max(spec.head_dim, spec.value_dim)
    if how.gather and chip.vendor == "nvidia" and not chip.has_wgmma:
        return _by_pointers(next_power_of_2(widest))
    if not how.gather or widest > 256:
        return replace(how, gather=False)
    # Pages are looked up a stage ahead of their rows.
    return Config(128, 64, 8, 5 if widest <= 128 else 3, False)


@dataclass(frozen=True)
class Tiles:
    """`records`: [N, 5] int32 on the device, a tile each, those with the most keys first: request, its first token in
    the batch, tokens, position of the first, and where position 0 of the request would lie in the scratch.
    `blocks`: [M, 4] int32, a block of the scratch each: request, position, row of the scratch, tokens of the request.
    `rows`: of the scratch.
    """

    records: torch.Tensor
    blocks: torch.Tensor
    rows: int


def tiles(batch: BatchLayout, window: int | None, tokens: int) -> Tiles:
    """Cut the prompts of a batch into tiles of at most `tokens` tokens."""
    records: list[np.ndarray] = []
    blocks: list[np.ndarray] = []
    rows = 0
    for b in range(batch.num_decodes, batch.num_requests):
        context, n, count = batch.context_lens[b], batch.seq_lens[b], batch.query_lens[b]
        base = 0 if window is None else max(0, context + 1 - window) // REGION * REGION
        begin = np.arange(0, count, tokens)
        record = np.empty((len(begin), 5), dtype=np.int32)
        record[:, 0] = b
        record[:, 1] = batch.query_start[b] + begin
        record[:, 2] = np.minimum(count - begin, tokens)
        record[:, 3] = context + begin
        record[:, 4] = rows - base
        records.append(record)
        position = np.arange(base, n, REGION)
        block = np.empty((len(position), 4), dtype=np.int32)
        block[:, 0] = b
        block[:, 1] = position
        block[:, 2] = rows + position - base
        block[:, 3] = n
        blocks.append(block)
        rows += len(position) * REGION
    all_records, all_blocks = np.concatenate(records), np.concatenate(blocks)
    last = all_records[:, 3] + all_records[:, 2]
    order = np.argsort(-(last if window is None else np.minimum(last, window)), kind="stable")
    return Tiles(_to_device(all_records[order], batch.device), _to_device(all_blocks, batch.device), rows)


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@pdl_jit
def gather_kernel(
    k_pool, v_pool, table, blocks, k_rows, v_rows, rows, kp_p, kp_s, kp_g, vp_p, vp_s, vp_g, table_b,
    PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PITCH: tl.constexpr, PITCH_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_T: tl.constexpr, REGION: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Rows of one request and head into the scratch [G, rows, pitch]; zeros where the request has none."""
    gdc_wait()
    gdc_launch_dependents()
    part, head = tl.program_id(0), tl.program_id(1)
    block = blocks + part // (REGION // BLOCK_T) * 4
    shift = part % (REGION // BLOCK_T) * BLOCK_T + tl.arange(0, BLOCK_T)
    request = tl.load(block).to(tl.int64)
    position = tl.load(block + 1) + shift
    to = head.to(tl.int64) * rows + tl.load(block + 2) + shift
    page = tl.load(table + request * table_b + position // PAGE, mask=position < tl.load(block + 3), other=-1)
    page, offset = page.to(tl.int64), position % PAGE
    held = page >= 0
    dim = tl.arange(0, BLOCK_D)
    row = page * kp_p + offset * kp_s + head * kp_g
    x = tl.load(k_pool + row[:, None] + dim[None, :], mask=held[:, None] & (dim < D)[None, :], other=0.0)
    mask = (dim < PITCH)[None, :] & (shift >= 0)[:, None]
    tl.store(k_rows + to[:, None] * PITCH + dim[None, :], x.to(k_rows.dtype.element_ty), mask=mask)
    if not SHARED:
        dim = tl.arange(0, BLOCK_DV)
        row = page * vp_p + offset * vp_s + head * vp_g
        x = tl.load(v_pool + row[:, None] + dim[None, :], mask=held[:, None] & (dim < DV)[None, :], other=0.0)
        mask = (dim < PITCH_V)[None, :] & (shift >= 0)[:, None]
        tl.store(v_rows + to[:, None] * PITCH_V + dim[None, :], x.to(v_rows.dtype.element_ty), mask=mask)


@triton.jit
def _rows(pool, scratch_row, start, n, table, dim, stride_p, stride_s, PAGE: tl.constexpr, D: tl.constexpr,
          BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GATHERED: tl.constexpr):  # fmt: skip
    """[BLOCK_N, BLOCK_D] keys or values from position `start` on; zeros from n on."""
    if GATHERED:
        x = pool.load([scratch_row + start, 0])
    else:
        key = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + key // PAGE, mask=key < n, other=-1).to(tl.int64)
        row = page * stride_p + (key % PAGE) * stride_s
        mask = (page >= 0)[:, None]
        if D != BLOCK_D:
            mask = mask & (dim < D)[None, :]
        x = tl.load(pool + row[:, None] + dim[None, :], mask=mask, other=0.0)
    return x


@triton.jit
def _softmax(logits, top, total, scale, softcap, SOFTCAP: tl.constexpr):
    """Weights of one tile against the running maximum; returns them, the new maximum and sum, and how the old fade."""
    if SOFTCAP:
        logits = logits_to_base_2(logits, scale, softcap, True)
        higher = higher_of(top, highest(logits, 1))
        weights = tl.exp2(logits - higher[:, None])
    else:
        higher = higher_of(top, highest(logits, 1) * (scale * LOG2E))
        weights = tl.exp2(logits * (scale * LOG2E) - higher[:, None])
    fade = tl.exp2(top - higher)
    return weights, higher, total * fade + tl.sum(weights, 1), fade


@pdl_jit
def prefill_kernel(
    q, k, v, table, records, sinks, out,
    scale, softcap, v_scale, window, rows,
    q_t, q_h, kp_p, kp_s, kp_g, vp_p, vp_s, vp_g, table_b, out_t, out_h,
    GROUPS: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """One tile: BLOCK_M // HEADS tokens of HEADS query heads that share a key/value head, over all keys they see.

    `k`, `v`: pools, or with GATHERED descriptors of the scratch [G * rows, D]. Key blocks that every row sees wholly
    need no mask; the others, at the window's edge and at the diagonal, come first.
    """
    gdc_wait()
    gdc_launch_dependents()
    part = tl.program_id(0) % (GROUPS * (R // HEADS))
    record = records + tl.program_id(0) // (GROUPS * (R // HEADS)) * 5
    group = part // (R // HEADS)
    request = tl.load(record).to(tl.int64)
    token, count, position = tl.load(record + 1).to(tl.int64), tl.load(record + 2), tl.load(record + 3)
    scratch_row = group * rows + tl.load(record + 4)
    lane = tl.arange(0, BLOCK_M)
    head = part * HEADS + lane % HEADS
    real = lane // HEADS < count
    dim, value_dim = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    here = (token + lane // HEADS) * q_t + head * q_h
    mask = real[:, None] & (dim < D)[None, :]
    queries = tl.load(q + here[:, None] + dim[None, :], mask=mask, other=0.0)
    at = position + lane // HEADS
    n = position + count
    table += request * table_b
    if not GATHERED:
        k += group * kp_g
        v += group * vp_g
    first = tl.maximum(position + 1 - window, 0) // BLOCK_N * BLOCK_N
    # Blocks that every row sees wholly: from the last row's window on, to the first row's own position.
    low = tl.cdiv(tl.maximum(n - window, 0), BLOCK_N) * BLOCK_N
    high = tl.maximum((position + 1) // BLOCK_N * BLOCK_N, low)
    ahead = (low - first) // BLOCK_N
    masked = ahead + tl.cdiv(tl.maximum(n - high, 0), BLOCK_N)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for i in range(masked):
        start = tl.where(i < ahead, first + i * BLOCK_N, high + (i - ahead) * BLOCK_N)
        keys = _rows(k, scratch_row, start, n, table, dim, kp_p, kp_s, PAGE, D, BLOCK_N, BLOCK_D, GATHERED)
        keys = keys.to(queries.dtype)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        behind = at[:, None] - (start + tl.arange(0, BLOCK_N))[None, :]
        if SOFTCAP:
            logits = logits_to_base_2(logits, scale, softcap, True)
            logits = tl.where((behind >= 0) & (behind < window), logits, float("-inf"))
            weights, top, total, fade = _softmax(logits, top, total, 1.0 / LOG2E, softcap, False)
        else:
            logits = tl.where((behind >= 0) & (behind < window), logits, float("-inf"))
            weights, top, total, fade = _softmax(logits, top, total, scale, softcap, False)
        if SHARED:
            values = keys
        else:
            values = _rows(
                v, scratch_row, start, n, table, value_dim, vp_p, vp_s, PAGE, DV, BLOCK_N, BLOCK_DV, GATHERED
            )
            values = values.to(queries.dtype)
        mixed = tl.dot(weights.to(queries.dtype), values, mixed * fade[:, None], input_precision="ieee")
    for start in range(low, high, BLOCK_N):
        keys = _rows(k, scratch_row, start, n, table, dim, kp_p, kp_s, PAGE, D, BLOCK_N, BLOCK_D, GATHERED)
        keys = keys.to(queries.dtype)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        weights, top, total, fade = _softmax(logits, top, total, scale, softcap, SOFTCAP)
        if SHARED:
            values = keys
        else:
            values = _rows(
                v, scratch_row, start, n, table, value_dim, vp_p, vp_s, PAGE, DV, BLOCK_N, BLOCK_DV, GATHERED
            )
            values = values.to(queries.dtype)
        mixed = tl.dot(weights.to(queries.dtype), values, mixed * fade[:, None], input_precision="ieee")
    if SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        higher = higher_of(top, sink)
        fade = tl.exp2(top - higher)
        total = total * fade + tl.exp2(sink - higher)
        mixed = mixed * fade[:, None]
    mixed = mixed * (v_scale / total)[:, None]
    to = (token + lane // HEADS) * out_t + head * out_h
    mask = real[:, None] & (value_dim < DV)[None, :]
    tl.store(out + to[:, None] + value_dim[None, :], mixed.to(out.dtype.element_ty), mask=mask)


def heads_of_a_tile(spec: MhaSpec, block_m: int) -> int:
    """Query heads of one key/value head that share a tile: all, or as many as divide them."""
    repeat = spec.num_heads // spec.num_kv_heads
    return max(size for size in range(1, min(repeat, block_m) + 1) if repeat % size == 0)


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
    """Attend for every tile of `cut`, whose tokens are at most `how.block_m // heads_of_a_tile`.

    `q`: [T, H, D]. `pools`: "k" [P, S, G, D], "v" [P, S, G, Dv]. `table`: [B, W]. `out`: [T, H, Dv], overwritten where
    a tile is.
    """
    groups, dim, value_dim = spec.num_kv_heads, spec.head_dim, spec.value_dim
    repeat = spec.num_heads // groups
    heads = heads_of_a_tile(spec, how.block_m)
    k_pool = pools["k"]
    v_pool = k_pool if spec.values_are_keys else pools["v"]
    page = k_pool.shape[1]
    block_d, block_dv = max(16, next_power_of_2(dim)), max(16, next_power_of_2(value_dim))
    k: Any = k_pool
    v: Any = v_pool
    if how.gather:
        k_rows, v_rows = gathered(spec, cut, k_pool, v_pool, table, q.dtype)
        k = _descriptor(k_rows, dim, how.block_n, block_d)
        v = _descriptor(v_rows, value_dim, how.block_n, block_dv)
    prefill_kernel[(len(cut.records) * groups * (repeat // heads),)](
        q, k, v, table, cut.records, out if sinks is None else sinks, out,
        spec.scale * k_scale, spec.softcap or 1.0, k_scale if spec.values_are_keys else v_scale,
        EVERYTHING if spec.window is None else spec.window, cut.rows,
        q.stride(0), q.stride(1), *k_pool.stride()[:3], *v_pool.stride()[:3], table.stride(0), *out.stride()[:2],
        GROUPS=groups, R=repeat, HEADS=heads, PAGE=page, D=dim, DV=value_dim, BLOCK_M=how.block_m,
        BLOCK_N=how.block_n, BLOCK_D=block_d, BLOCK_DV=block_dv, SOFTCAP=spec.softcap is not None,
        SINKS=sinks is not None, SHARED=spec.values_are_keys, GATHERED=how.gather,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip


def fits(spec: MhaSpec, cut: Tiles, dtype: torch.dtype) -> bool:
    """Whether the prompts' rows may be gathered."""
    fields = spec.head_dim if spec.values_are_keys else spec.head_dim + spec.value_dim
    return cut.rows * spec.num_kv_heads * fields * dtype.itemsize <= _MOST_GATHERED


def gathered(
    spec: MhaSpec, cut: Tiles, k_pool: torch.Tensor, v_pool: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of every prompt, [G, rows, pitch] each in `dtype`, copied side by side.

    The pitch is a multiple of 16 bytes. A request's rows end with zeros up to a multiple of `REGION`.
    """
    groups = spec.num_kv_heads
    pitch, pitch_v = (-(-dim // 8) * 8 for dim in (spec.head_dim, spec.value_dim))
    k_rows = torch.empty((groups, cut.rows, pitch), dtype=dtype, device=table.device)
    v_rows = (
        k_rows if spec.values_are_keys else torch.empty((groups, cut.rows, pitch_v), dtype=dtype, device=table.device)
    )
    block_t = 32
    gather_kernel[(len(cut.blocks) * (REGION // block_t), groups)](
        k_pool, v_pool, table, cut.blocks, k_rows, v_rows, cut.rows,
        *k_pool.stride()[:3], *v_pool.stride()[:3], table.stride(0),
        PAGE=k_pool.shape[1], D=spec.head_dim, DV=spec.value_dim, PITCH=pitch, PITCH_V=pitch_v,
        BLOCK_D=next_power_of_2(pitch), BLOCK_DV=next_power_of_2(pitch_v), BLOCK_T=block_t,
        REGION=REGION, SHARED=spec.values_are_keys, num_warps=4,
    )  # fmt: skip
    return k_rows, v_rows


def _descriptor(rows: torch.Tensor, dim: int, block_n: int, block_d: int) -> TensorDescriptor:
    """The scratch as one matrix [G * rows, dim]."""
    flat = rows.flatten(0, 1)
    return TensorDescriptor(flat, [flat.shape[0], dim], [flat.stride(0), 1], [block_n, block_d])


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes: heads, key/value heads, head size, whether there are sinks and a window; and the gathering."""
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
        constants = {"GROUPS": groups, "R": heads // groups, "HEADS": heads_of_a_tile(spec, how.block_m), "PAGE": 64}
        constants |= {"D": dim, "DV": dim, "BLOCK_M": how.block_m, "BLOCK_N": how.block_n, "BLOCK_D": dim}
        constants |= {"BLOCK_DV": dim, "SOFTCAP": False, "SINKS": sinks, "SHARED": False, "GATHERED": how.gather}
        name = f"mha prefill {heads}/{groups} x {dim}"
        found.append(Specialization(name, prefill_kernel, signature, constants, how.warps, how.stages))
    return found
