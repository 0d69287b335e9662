"""The lightning indexer in Triton: the write of new index keys, and the scores of queries.

Owns: three kernels and their launch. Must not know: the top-k.

    I_t,s = d^-1/2 sum_h w_t,h relu(q_t,h . k_s)

With block-scaled keys, q_t,h and k_s are FP8 values times a power of two each. The query's scale is multiplied into
w_t,h, and the key's scale into the sum. A decode multiplies all heads of one query at once; a prefill multiplies a tile
of queries, head after head. A score takes 4 bytes; nothing else grows with the context.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from allotrope.attention.batch import PageIndex
from allotrope.attention.dsa.family import INDEX_KEYS
from allotrope.attention.dsa.spec import IndexerSpec
from allotrope.attention.mla.rows import FP8_MAX
from allotrope.attention.mla.triton_decode import Queries
from allotrope.attention.mla.triton_store import pow2_scale
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_least, clamped, largest_of
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2

_FP8_MAX = tl.constexpr(FP8_MAX)

# Programs of a decode that fill a large chip.
_PROGRAMS = 528

# Queries of a tile of a prefill; several programs may share a tile.
TILE = 64


@dataclass(frozen=True)
class Config:
    """`block_n`: keys of one product. `span`: most keys of a program of a decode, a multiple of `block_n`. `block_m`:
    queries of a program of a prefill; it divides `TILE`. `fp8_dot`: whether a decode multiplies FP8 values as they are.
    """

    block_n: int
    span: int
    block_m: int
    warps: int
    stages: int
    fp8_dot: bool = False


def config(chip: Chip, dtype: torch.dtype) -> Config:
    """Launch parameters of a decode. `dtype`: type of the queries."""
    if chip.vendor == "cpu":
        return Config(32, 64, 16, 4, 1)
    if dtype == torch.float32:
        return Config(32, 1024, 16, 4, 1)
    return Config(64, 1024, 64, 4, 3, True) if chip.has_wgmma else Config(INDEX_KEYS, 1024, 64, 4, 1)


def prefill_config(chip: Chip, dtype: torch.dtype, scaled: bool) -> Config:
    """As `config`, for a prefill: each tile of keys loads, and with `scaled` quantizes, the queries of every head."""
    chosen = config(chip, dtype)
    if not chip.has_wgmma or dtype == torch.float32:
        return chosen
    return replace(chosen, block_n=256, warps=8) if scaled else replace(chosen, block_n=128)


@triton.jit
def _quantize(x, scale):
    """x / scale as e4m3, clamped to its range."""
    return clamped(x / scale, _FP8_MAX).to(tl.float8e4nv)


@pdl_jit
def store_kernel(
    k, pool, scales, slot_mapping, tokens, k_t, k_page, k_row, scale_page, scale_row,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_SCALED: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_T new keys to their slots."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1).to(tl.int64)
    mask_t = slot >= 0
    page, page_offset = slot // PAGE, slot % PAGE
    offs_d = tl.arange(0, BLOCK_D)
    mask_td = mask_t[:, None] & (offs_d < D)[None, :]
    keys = tl.load(k + token.to(tl.int64)[:, None] * k_t + offs_d[None, :], mask=mask_td, other=0.0)
    k_ptrs = pool + (page * k_page + page_offset * k_row)
    if BLOCK_SCALED:
        keys = keys.to(tl.float32)
        scale = pow2_scale(largest_of(keys, 1))
        tl.store(scales + (page * scale_page + page_offset * scale_row), scale, mask=mask_t)
        tl.store(k_ptrs[:, None] + offs_d[None, :], _quantize(keys, scale[:, None]), mask=mask_td)
    else:
        if pool.dtype.element_ty == tl.float8e4nv:
            keys = _quantize(keys.to(tl.float32), 1.0)
        tl.store(k_ptrs[:, None] + offs_d[None, :], keys.to(pool.dtype.element_ty), mask=mask_td)


@triton.jit
def _load_keys(
    pool, scales, table, start, end, k_page, k_row, scale_page, scale_row, dtype: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SCALED: tl.constexpr,
):  # fmt: skip
    """The keys from `start` on, [BLOCK_N, BLOCK_D], and their scales [BLOCK_N]. `table`: the request's page table."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = start + tl.arange(0, BLOCK_N)
    mask_n = offs_n < end
    if PAGE % BLOCK_N == 0:
        page = tl.load(table + start // PAGE).to(tl.int64)
        page_offset = start % PAGE + tl.arange(0, BLOCK_N)
    else:
        page = tl.load(table + offs_n // PAGE, mask=mask_n, other=-1).to(tl.int64)
        page_offset = offs_n % PAGE
    mask_n = mask_n & (page >= 0)
    k_ptrs = pool + (page * k_page + page_offset * k_row)
    mask_nd = mask_n[:, None] if BLOCK_D == D else mask_n[:, None] & (offs_d < D)[None, :]
    k = tl.load(k_ptrs[:, None] + offs_d[None, :], mask=mask_nd, other=0.0).to(dtype)
    k_scale = 1.0
    if BLOCK_SCALED:
        k_scale = tl.load(scales + (page * scale_page + page_offset * scale_row), mask=mask_n, other=0.0)
    return k, k_scale


@pdl_jit
def decode_kernel(
    q, weights, pool, scales, table, request, kv_lens, scores,
    softmax_scale, topk, span, q_t, q_h, w_t, k_page, k_row, scale_page, scale_row, table_b, scores_t,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SCALED: tl.constexpr, FP8_DOT: tl.constexpr,
):  # fmt: skip
    """Score `span` keys of one query. Queries with at most `topk` keys are skipped. FP8_DOT: products are FP8."""
    gdc_wait()
    gdc_launch_dependents()
    query = tl.program_id(1).to(tl.int64)
    kv_len = tl.load(kv_lens + query)
    begin = tl.program_id(0) * span
    end = tl.minimum(begin + span, kv_len)
    if (begin < end) & (kv_len > topk):
        head, offs_d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
        mask_hd = (head < H)[:, None] & (offs_d < D)[None, :]
        queries = tl.load(q + query * q_t + head[:, None] * q_h + offs_d[None, :], mask=mask_hd, other=0.0)
        w = tl.load(weights + query * w_t + head, mask=head < H, other=0.0).to(tl.float32)
        if BLOCK_SCALED:
            q_fp32 = queries.to(tl.float32)
            q_scale = pow2_scale(largest_of(q_fp32, 1))
            q_fp8 = _quantize(q_fp32, q_scale[:, None])
            queries = q_fp8 if FP8_DOT else q_fp8.to(queries.dtype)
            w = w * q_scale
        table += tl.load(request + query).to(tl.int64) * table_b
        for start in range(begin, end, BLOCK_N):
            keys, k_scales = _load_keys(
                pool, scales, table, start, end, k_page, k_row, scale_page, scale_row, queries.dtype,
                D, PAGE, BLOCK_D, BLOCK_N, BLOCK_SCALED,
            )  # fmt: skip
            logits = tl.dot(keys, tl.trans(queries), input_precision="ieee")
            score = tl.sum(at_least(logits, 0.0) * w[None, :], 1) * softmax_scale
            if BLOCK_SCALED:
                score = score * k_scales
            offs_n = start + tl.arange(0, BLOCK_N)
            tl.store(scores + query * scores_t + offs_n, score, mask=offs_n < end)


@pdl_jit
def prefill_kernel(
    q, weights, pool, scales, table, tiles, scores,
    softmax_scale, q_t, q_h, w_t, k_page, k_row, scale_page, scale_row, table_b, scores_t,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SCALED: tl.constexpr,
):  # fmt: skip
    """One of the TILE_SPLITS programs of a tile: BLOCK_M queries of one request against BLOCK_N keys, head after head.

    `tiles`: [m, 5] int32: first row of `scores`, number of queries, first token, its position, request.
    """
    gdc_wait()
    gdc_launch_dependents()
    tile = tiles + tl.program_id(1) // TILE_SPLITS * 5
    first_query = tl.program_id(1) % TILE_SPLITS * BLOCK_M
    begin = tl.program_id(0) * BLOCK_N
    row = tl.load(tile) + first_query
    num_queries = tl.minimum(tl.load(tile + 1) - first_query, BLOCK_M)
    first_pos = tl.load(tile + 3) + first_query
    if (num_queries > 0) & (begin < first_pos + num_queries):
        offs_m = tl.arange(0, BLOCK_M)
        mask_m = offs_m < num_queries
        token = (tl.load(tile + 2) + first_query + offs_m).to(tl.int64)
        offs_n = begin + tl.arange(0, BLOCK_N)
        offs_d = tl.arange(0, BLOCK_D)
        dtype: tl.constexpr = q.dtype.element_ty
        keys, k_scales = _load_keys(
            pool, scales, table + tl.load(tile + 4).to(tl.int64) * table_b, begin, first_pos + num_queries,
            k_page, k_row, scale_page, scale_row, dtype, D, PAGE, BLOCK_D, BLOCK_N, BLOCK_SCALED,
        )  # fmt: skip
        keys = tl.trans(keys)
        score = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        mask_md = mask_m[:, None] & (offs_d < D)[None, :]
        for head in range(H):
            queries = tl.load(q + token[:, None] * q_t + head * q_h + offs_d[None, :], mask=mask_md, other=0.0)
            w = tl.load(weights + token * w_t + head, mask=mask_m, other=0.0).to(tl.float32)
            if BLOCK_SCALED:
                q_fp32 = queries.to(tl.float32)
                q_scale = pow2_scale(largest_of(q_fp32, 1))
                queries = _quantize(q_fp32, q_scale[:, None]).to(dtype)
                w = w * q_scale
            logits = tl.dot(queries, keys, input_precision="ieee")
            score += at_least(logits, 0.0) * w[:, None]
        score = score * softmax_scale
        if BLOCK_SCALED:
            score = score * k_scales[None, :]
        score_ptrs = scores + (row + offs_m).to(tl.int64)[:, None] * scores_t + offs_n[None, :]
        tl.store(score_ptrs, score, mask=mask_m[:, None] & (offs_n < first_pos + num_queries)[None, :])


def store(spec: IndexerSpec, pools: Mapping[str, torch.Tensor], slot_mapping: torch.Tensor, k: torch.Tensor) -> None:
    """Write keys `k` [T, d] to `slot_mapping` [T]; tokens with a negative slot are skipped."""
    pool, scales = pools["k"], pools.get("factor", pools["k"])
    block_t = 8
    store_kernel[(cdiv(len(slot_mapping), block_t),)](
        k, pool, scales, slot_mapping, len(slot_mapping), k.stride(0), *pool.stride()[:2], *scales.stride()[:2],
        D=spec.head_dim, PAGE=pool.shape[1], BLOCK_D=next_power_of_2(spec.head_dim), BLOCK_T=block_t,
        BLOCK_SCALED=spec.key_format == "scaled", num_warps=4,
    )  # fmt: skip


def score_decodes(
    spec: IndexerSpec,
    pools: Mapping[str, torch.Tensor],
    paged: PageIndex,
    queries: Queries,
    topk: int,
    q: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Scores [t, bound] fp32 of t decodes; those beyond a query's KV length, and of skipped queries, are unwritten.

    `q`: [t, heads, d]. `weights`: [t, heads].
    """
    chosen = config(chip_of(q.device), q.dtype)
    scores = torch.empty(len(q), _width(queries.max_kv_len), dtype=torch.float32, device=q.device)
    pool, scales = pools["k"], pools.get("factor", pools["k"])
    span = _span(chosen, len(q), queries.max_kv_len)
    decode_kernel[(cdiv(queries.max_kv_len, span), len(q))](
        q, weights, pool, scales, paged.table, queries.request, queries.kv_lens, scores,
        spec.head_dim**-0.5, topk, span, q.stride(0), q.stride(1), weights.stride(0), *pool.stride()[:2],
        *scales.stride()[:2], paged.table.stride(0), scores.stride(0),
        H=spec.num_heads, D=spec.head_dim, PAGE=paged.page_size, BLOCK_H=_padded(spec.num_heads),
        BLOCK_D=_padded(spec.head_dim), BLOCK_N=chosen.block_n, BLOCK_SCALED=spec.key_format == "scaled",
        FP8_DOT=chosen.fp8_dot, num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return scores


def score_tiles(
    spec: IndexerSpec,
    pools: Mapping[str, torch.Tensor],
    paged: PageIndex,
    tiles: torch.Tensor,
    rows: int,
    bound: int,
    q: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Scores [rows, bound] fp32 of the queries of `tiles` (see `prefill_kernel`). `q`: [T, heads, d] of all tokens."""
    chosen = prefill_config(chip_of(q.device), q.dtype, spec.key_format == "scaled")
    scores = torch.empty(rows, _width(bound), dtype=torch.float32, device=q.device)
    pool, scales = pools["k"], pools.get("factor", pools["k"])
    tile_splits = TILE // chosen.block_m
    prefill_kernel[(cdiv(bound, chosen.block_n), len(tiles) * tile_splits)](
        q, weights, pool, scales, paged.table, tiles, scores,
        spec.head_dim**-0.5, q.stride(0), q.stride(1), weights.stride(0), *pool.stride()[:2],
        *scales.stride()[:2], paged.table.stride(0), scores.stride(0),
        H=spec.num_heads, D=spec.head_dim, PAGE=paged.page_size, BLOCK_D=_padded(spec.head_dim),
        TILE_SPLITS=tile_splits, BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n,
        BLOCK_SCALED=spec.key_format == "scaled", num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return scores


def _span(chosen: Config, queries: int, bound: int) -> int:
    """Keys of a program: fewer where too few programs would leave the chip idle."""
    span = chosen.span
    while span >= 8 * chosen.block_n and queries * cdiv(bound, span) < _PROGRAMS:
        span //= 2
    return span


def _padded(size: int) -> int:
    return max(16, next_power_of_2(size))


def _width(bound: int) -> int:
    """Row length of scores, so that rows begin at multiples of 64 bytes."""
    return -(-bound // 16) * 16


@specializations
def released(chip: Chip) -> list[Specialization]:
    """64 index heads of 128: keys in bf16, and block-scaled ones."""
    made = []
    chosen = config(chip, torch.bfloat16)
    numbers = ("q_t", "q_h", "w_t", "k_page", "k_row", "scale_page", "scale_row", "table_b", "scores_t")
    for name, pool, scales in (("bf16", "*bf16:16", "*bf16:16"), ("scaled", "*fp8e4nv:16", "*fp32:16")):
        signature = {"q": "*bf16:16", "weights": "*fp32:16", "pool": pool, "scales": scales, "table": "*i64:16"}
        signature |= {"request": "*i64:16", "kv_lens": "*i32:16", "tiles": "*i32:16", "scores": "*fp32:16"}
        signature |= {"softmax_scale": "fp32", "topk": "i32", "span": "i32:16"}
        signature |= {**dict.fromkeys(numbers, "i32:16"), "scale_row": "i32"}
        constants = {"H": 64, "D": 128, "PAGE": 16, "BLOCK_D": 128, "BLOCK_N": chosen.block_n}
        constants |= {"BLOCK_SCALED": name == "scaled"}
        decode = {**constants, "BLOCK_H": 64, "FP8_DOT": chosen.fp8_dot}
        made.append(
            Specialization(f"dsa scores decode {name}", decode_kernel, signature, decode, chosen.warps, chosen.stages)
        )
        wide = prefill_config(chip, torch.bfloat16, name == "scaled")
        prefill = {**constants, "BLOCK_N": wide.block_n, "TILE_SPLITS": TILE // wide.block_m, "BLOCK_M": wide.block_m}
        made.append(
            Specialization(f"dsa scores prefill {name}", prefill_kernel, signature, prefill, wide.warps, wide.stages)
        )
    return made
