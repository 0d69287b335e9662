"""MLA prefill in MHA form: keys and values of every head are decompressed for a bounded number of tokens at a time.

Owns: which tokens are decompressed together, the kernel that attends to them, and their launch. Must not know: which
requests are better absorbed.

A `Chunk` holds slices of the keys of one or several requests. The program that attends to a slice merges its result
with that of the slices before (chunked context with LSE merge), so that scratch does not grow with the context. Prompts
without context run by cuDNN where it is available and faster (`triton_cudnn.py`).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from allotrope.attention.batch import PageIndex, on_device
from allotrope.attention.mla import triton_cudnn
from allotrope.attention.mla.plan import Span
from allotrope.attention.mla.spec import MlaSpec
from allotrope.attention.mla.triton_gather import GATHER_BLOCK, blocks_of, gather_latent, padded
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_least, higher_of, highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.softmax import LOG2E, LOWEST
from allotrope.kernels.tiles import next_power_of_2

# Queries of a tile of a plan; several programs may share a tile.
TILE = 128
# Bytes of the keys and values of a chunk.
MAX_SCRATCH_BYTES = 1 << 29


@dataclass(frozen=True)
class Chunk:
    """Keys that are decompressed together, and the queries that attend to them.

    `rows`: scratch rows. `blocks`: [n, 4] int32, of at most `GATHER_BLOCK` keys each: request, first key, number of
    keys, first scratch row. `tiles`: [m, 8] int32 of each tile of queries: first token, number of tokens, position of
    the first, first key of the slice, keys of the slice, the slice's first scratch row, whether the slice is its
    request's first, whether the last.
    """

    rows: int
    blocks: torch.Tensor
    tiles: torch.Tensor


@dataclass(frozen=True)
class Decompressed:
    """Prompts in MHA form. `chunks`: in the order of their slices. `merged`: whether a request has several slices,
    whose results are merged. `cudnn`: of the prompts that cuDNN runs.
    """

    chunks: tuple[Chunk, ...]
    merged: bool
    cudnn: tuple[triton_cudnn.CudnnBatch, ...] = ()


@dataclass(frozen=True)
class Config:
    """`block_m`: queries of a program; it divides `TILE`. `block_n`: keys of one loop iteration."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def config(chip: Chip, spec: MlaSpec, dtype: torch.dtype) -> Config:
    """Launch parameters. `dtype`: of the queries."""
    if chip.vendor == "cpu":
        return Config(32, 32, 4, 1)
    if dtype == torch.float32:
        return Config(16, 32, 4, 1)
    wide = max(spec.nope_dim + spec.rope_dim, spec.v_head_dim) > 192
    if chip.vendor == "amd":
        return Config(64 if wide else 128, 32, 8, 1)
    if not chip.has_wgmma:
        # Two stages of keys and values beside the queries are less than 99 KiB.
        return Config(64, 32, 8, 2) if wide else Config(128, 64, 8, 2)
    return Config(128, 64, 8, 2) if wide else Config(128, 64, 8, 3)


def plan_decompressed(
    spec: MlaSpec, spans: Sequence[Span], device: torch.device, scratch: int = MAX_SCRATCH_BYTES
) -> Decompressed:
    """Partition the keys of `spans` into chunks of at most `scratch` bytes, and their queries into tiles."""
    size = spec.num_heads * (spec.nope_dim + spec.v_head_dim) * (4 if spec.kv_dtype == torch.float32 else 2)
    max_rows = max(1, scratch // size // GATHER_BLOCK) * GATHER_BLOCK
    cudnn = [span for span in spans if triton_cudnn.suits(span, max_rows) and triton_cudnn.supports(spec, device)]
    chunks: list[Chunk] = []
    blocks: list[tuple[int, ...]] = []
    tiles: list[tuple[int, ...]] = []
    merged, row = False, 0
    for span in (span for span in spans if span not in cudnn):
        end = span.position + span.queries
        first = 0
        while first < end:
            last = min(end, first + max_rows - row)
            blocks += blocks_of(span.request, first, last, row)
            merged |= last - first < end
            for q in reversed(range(0, span.queries, TILE)):
                num_tokens = min(TILE, span.queries - q)
                if span.position + q + num_tokens > first:
                    is_last = last >= span.position + q + num_tokens
                    tile = (
                        span.token + q,
                        num_tokens,
                        span.position + q,
                        first,
                        last - first,
                        row,
                        first == 0,
                        is_last,
                    )
                    tiles.append(tile)
            row += last - first
            first = last
            if row >= max_rows:
                chunks.append(Chunk(row, on_device(blocks, torch.int32, device), on_device(tiles, torch.int32, device)))
                blocks, tiles, row = [], [], 0
    if blocks:
        chunks.append(Chunk(row, on_device(blocks, torch.int32, device), on_device(tiles, torch.int32, device)))
    return Decompressed(tuple(chunks), merged, tuple(triton_cudnn.batches_of(cudnn, max_rows, device)))


@triton.jit
def _load_tile(base, row, stride, offs_d, SIZE: tl.constexpr, mask, FULL: tl.constexpr):
    """[rows, BLOCK] of a matrix; zeros from column `SIZE` on and, unless FULL, where `mask` is false."""
    ptrs = base + row[:, None].to(tl.int64) * stride + offs_d[None, :]
    if FULL:
        if offs_d.shape[0] == SIZE:
            return tl.load(ptrs)
        return tl.load(ptrs, mask=(offs_d < SIZE)[None, :], other=0.0)
    return tl.load(ptrs, mask=mask[:, None] & (offs_d < SIZE)[None, :], other=0.0)


@triton.jit
def _attend_keys(
    acc, m_i, l_i, q_a, q_b, q_pe, k, rope, v, k_row, r_row, v_row, begin, end, limit, first, q_pos, qk_scale,
    A: tl.constexpr, B: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to keys `begin` to `end` of a slice of `limit` keys, the first at position `first`."""
    for start in range(begin, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < limit
        k_a = _load_tile(k, offs_n, k_row, tl.arange(0, BLOCK_A), A, mask_n, not MASKED)
        logits = tl.dot(q_a, tl.trans(k_a), input_precision=PRECISION)
        if B > 0:
            k_b = _load_tile(k + A, offs_n, k_row, tl.arange(0, BLOCK_B), B, mask_n, not MASKED)
            logits = tl.dot(q_b, tl.trans(k_b), logits, input_precision=PRECISION)
        k_pe = _load_tile(rope, offs_n, r_row, tl.arange(0, BLOCK_R), R, mask_n, not MASKED)
        logits = tl.dot(q_pe, tl.trans(k_pe), logits, input_precision=PRECISION) * qk_scale
        if MASKED:
            mask_mn = mask_n[None, :] & ((first + offs_n)[None, :] <= q_pos[:, None])
            logits = tl.where(mask_mn, logits, float("-inf"))
        m_new = higher_of(m_i, highest(logits, 1))
        p = tl.exp2(logits - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        values = _load_tile(v, offs_n, v_row, tl.arange(0, BLOCK_V), V, mask_n, not MASKED)
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
        m_i = m_new
    return acc, m_i, l_i


@pdl_jit
def prefill_kernel(
    q, q_pe, k, rope, v, tiles, partial, lse, out, scale, q_t, q_h, pe_t, pe_h, out_t, out_h,
    H: tl.constexpr, A: tl.constexpr, B: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    TILE_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MERGED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One of the TILE_SPLITS programs of a tile: BLOCK_M queries of one head over one slice of keys.

    `k`: [rows, H, A + B]. `rope`: [rows, R]. `v`: [rows, H, V]. With MERGED, `partial` [T, H, V] fp32 and `lse` [T, H]
    (base 2) hold the merged result of the slices so far.
    """
    gdc_wait()
    gdc_launch_dependents()
    tile = tiles + tl.program_id(0) // TILE_SPLITS * 8
    first_query = tl.program_id(0) % TILE_SPLITS * BLOCK_M
    head = tl.program_id(1)
    first_token = tl.load(tile) + first_query
    num_tokens = tl.minimum(tl.load(tile + 1) - first_query, BLOCK_M)
    first_pos = tl.load(tile + 2) + first_query
    first_key = tl.load(tile + 3)
    slice_len = tl.load(tile + 4)
    scratch_row = tl.load(tile + 5).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < num_tokens
    q_pos = first_pos + offs_m
    row = (first_token + offs_m).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V)
    q += head * q_h
    q_a = _load_tile(q, row, q_t, tl.arange(0, BLOCK_A), A, mask_m, False)
    q_b = q_a
    if B > 0:
        q_b = _load_tile(q + A, row, q_t, tl.arange(0, BLOCK_B), B, mask_m, False)
    q_rope = _load_tile(q_pe + head * pe_h, row, pe_t, tl.arange(0, BLOCK_R), R, mask_m, False)
    k += scratch_row * (H * (A + B)) + head * (A + B)
    v += scratch_row * (H * V) + head * V
    rope += scratch_row * R
    m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # Up to `full_end` every query attends to every key.
    end = tl.minimum(slice_len, first_pos + num_tokens - first_key)
    full_end = tl.maximum(0, tl.minimum(slice_len, first_pos + 1 - first_key)) // BLOCK_N * BLOCK_N
    acc, m_i, l_i = _attend_keys(
        acc, m_i, l_i, q_a, q_b, q_rope, k, rope, v, H * (A + B), R, H * V, 0, full_end, slice_len,
        first_key, q_pos, scale * LOG2E, A, B, R, V, BLOCK_A, BLOCK_B, BLOCK_R, BLOCK_V, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    acc, m_i, l_i = _attend_keys(
        acc, m_i, l_i, q_a, q_b, q_rope, k, rope, v, H * (A + B), R, H * V, full_end, end, slice_len,
        first_key, q_pos, scale * LOG2E, A, B, R, V, BLOCK_A, BLOCK_B, BLOCK_R, BLOCK_V, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    mask_mv = mask_m[:, None] & (offs_v < V)[None, :]
    acc = acc / at_least(l_i, 1.0e-30)[:, None]
    out_ptrs = out + row[:, None] * out_t + head * out_h + offs_v[None, :]
    if MERGED:
        slice_lse = tl.where(l_i == 0.0, LOWEST, m_i + tl.log2(at_least(l_i, 1.0e-30)))
        partial_ptrs = partial + (row[:, None] * H + head) * V + offs_v[None, :]
        if tl.load(tile + 6) == 0:
            prev_lse = tl.load(lse + row * H + head, mask=mask_m, other=LOWEST)
            lse_max = higher_of(prev_lse, slice_lse)
            prev_weight, slice_weight = tl.exp2(prev_lse - lse_max), tl.exp2(slice_lse - lse_max)
            acc = acc * (slice_weight / (prev_weight + slice_weight))[:, None]
            acc += (
                tl.load(partial_ptrs, mask=mask_mv, other=0.0) * (prev_weight / (prev_weight + slice_weight))[:, None]
            )
            slice_lse = lse_max + tl.log2(prev_weight + slice_weight)
        if tl.load(tile + 7) == 0:
            tl.store(partial_ptrs, acc, mask=mask_mv)
            tl.store(lse + row * H + head, slice_lse, mask=mask_m)
        else:
            tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=mask_mv)
    else:
        tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=mask_mv)


def attend(
    spec: MlaSpec,
    pools: Mapping[str, torch.Tensor],
    paged: PageIndex,
    plan: Decompressed,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_scale: float,
    out: torch.Tensor,
) -> None:
    """Attend for the queries of `plan`, and write their tokens of `out` [T, H, V]."""
    for batch in plan.cudnn:
        triton_cudnn.attend(spec, pools, paged, batch, q_nope, q_pe, w_uk, w_uv, kv_scale, out)
    partial = lse = out
    if plan.merged:
        partial = torch.empty(len(out), *out.shape[1:], dtype=torch.float32, device=out.device)
        lse = torch.empty(len(out), out.shape[1], dtype=torch.float32, device=out.device)
    chosen = config(chip_of(out.device), spec, q_nope.dtype)
    for chunk in plan.chunks:
        latent, rope = q_nope.new_empty(chunk.rows, spec.latent_dim), q_nope.new_empty(chunk.rows, spec.rope_dim)
        gather_latent(spec, pools, paged, chunk.blocks, (latent, rope), kv_scale)
        k = torch.mm(latent, w_uk.flatten(0, 1).t())
        v = torch.mm(latent, w_uv.flatten(0, 1).t())
        tile_splits = TILE // chosen.block_m
        prefill_kernel[(len(chunk.tiles) * tile_splits, spec.num_heads)](
            q_nope, q_pe, k, rope, v, chunk.tiles, partial, lse, out, spec.scale,
            q_nope.stride(0), q_nope.stride(1), q_pe.stride(0), q_pe.stride(1), out.stride(0), out.stride(1),
            H=spec.num_heads, V=spec.v_head_dim, R=spec.rope_dim, **_nope_dims(spec),
            BLOCK_R=padded(spec.rope_dim), BLOCK_V=padded(spec.v_head_dim),
            TILE_SPLITS=tile_splits, BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, MERGED=plan.merged,
            PRECISION="ieee",
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip


def _nope_dims(spec: MlaSpec) -> dict[str, int]:
    """The nope dim as a power of two and a rest, so that few products are with padding."""
    size = spec.nope_dim
    a = size if size == next_power_of_2(size) else next_power_of_2(size) // 2
    return {"A": a, "B": size - a, "BLOCK_A": padded(a), "BLOCK_B": padded(size - a)}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes in bf16: nope dim 128 with v_head_dim 128, and 192 with 256; rope dim 64."""
    found = []
    for name, nope, values, merged in (("192/128", 128, 128, True), ("256/256", 192, 256, False)):
        spec = MlaSpec(
            num_heads=128, latent_dim=512, rope_dim=64, nope_dim=nope, v_head_dim=values, scale=0.07,
            kv_dtype=torch.bfloat16,
        )  # fmt: skip
        chosen = config(chip, spec, torch.bfloat16)
        signature = dict.fromkeys(("q", "q_pe", "k", "rope", "v", "out"), "*bf16")
        signature |= {"tiles": "*i32", "partial": "*fp32", "lse": "*fp32", "scale": "fp32"}
        signature |= dict.fromkeys(("q_t", "q_h", "pe_t", "pe_h", "out_t", "out_h"), "i32")
        signature = {argument: dtype if dtype == "fp32" else f"{dtype}:16" for argument, dtype in signature.items()}
        constants = {
            "H": 128, **_nope_dims(spec), "R": 64, "V": values, "BLOCK_R": 64, "BLOCK_V": values,
            "TILE_SPLITS": TILE // chosen.block_m, "BLOCK_M": chosen.block_m, "BLOCK_N": chosen.block_n,
            "MERGED": merged, "PRECISION": "ieee",
        }  # fmt: skip
        found.append(
            Specialization(f"mla prefill {name}", prefill_kernel, signature, constants, chosen.warps, chosen.stages)
        )
    return found
