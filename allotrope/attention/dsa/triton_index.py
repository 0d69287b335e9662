"""The lightning indexer in Triton: new keys into their pages, and scores of queries against the keys they see.

Owns: three kernels and their launch. Must not know: who picks by the scores.

    score_t(s) = d^-1/2 sum_h w_t,h relu(q_t,h . k_s)

With scaled keys, q_t,h and k_s are FP8 codes times a power of two each: w_t,h takes in the
query's factor, and the sum the key's. A decode packs its heads into a product; a prefill packs queries and
goes from head to head. Scores are written once, 4 bytes a key; nothing else grows with the context.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from allotrope.attention.batch import PageIndex
from allotrope.attention.dsa.spec import IndexerSpec
from allotrope.attention.mla.rows import FP8_MAX
from allotrope.attention.mla.triton_decode import Queries
from allotrope.attention.mla.triton_store import pow2_scale
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_least, clamped, largest_of
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2

_LARGEST = tl.constexpr(FP8_MAX)

# Programs of a decode: a chip of today has room for about as many.
_PROGRAMS = 528

# Queries of a tile of a prefill; a kernel may share it out among several programs.
TILE = 64


@dataclass(frozen=True)
class Config:
    """`keys`: of one product. `span`: of one program of a decode at most, a multiple of `keys`. `queries`: of one
    program of a prefill; divides `TILE`. `native`: whether a decode multiplies FP8 codes as they are.
    """

    keys: int
    span: int
    queries: int
    warps: int
    stages: int
    native: bool = False


def config(chip: Chip, dtype: torch.dtype) -> Config:
    """Launch parameters of a decode. `dtype`: of the queries."""
    if chip.vendor == "cpu":
        return Config(32, 64, 16, 4, 1)
    if dtype == torch.float32:
        return Config(32, 1024, 16, 4, 1)
    return Config(64, 1024, 64, 4, 3, True) if chip.has_wgmma else Config(128, 1024, 64, 4, 1)


def prefill_config(chip: Chip, dtype: torch.dtype, scaled: bool) -> Config:
    """As `config`, of a prefill: each tile of keys reads, and for scaled ones rounds, the queries of every head."""
    chosen = config(chip, dtype)
    if not chip.has_wgmma or dtype == torch.float32:
        return chosen
    return replace(chosen, keys=256, warps=8) if scaled else replace(chosen, keys=128)


@triton.jit
def _codes(x, factor):
    """x / factor on the grid of e4m3, saturated."""
    return clamped(x / factor, _LARGEST).to(tl.float8e4nv)


@pdl_jit
def store_kernel(
    k, pool, factors, slots, tokens, k_t, k_page, k_row, f_page, f_row,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """ROWS new keys to their slots."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
    kept = slot >= 0
    page, offset = slot // PAGE, slot % PAGE
    dim = tl.arange(0, BLOCK_D)
    there = kept[:, None] & (dim < D)[None, :]
    keys = tl.load(k + token.to(tl.int64)[:, None] * k_t + dim[None, :], mask=there, other=0.0)
    to = pool + (page * k_page + offset * k_row)
    if SCALED:
        keys = keys.to(tl.float32)
        factor = pow2_scale(largest_of(keys, 1))
        tl.store(factors + (page * f_page + offset * f_row), factor, mask=kept)
        tl.store(to[:, None] + dim[None, :], _codes(keys, factor[:, None]), mask=there)
    else:
        if pool.dtype.element_ty == tl.float8e4nv:
            keys = _codes(keys.to(tl.float32), 1.0)
        tl.store(to[:, None] + dim[None, :], keys.to(pool.dtype.element_ty), mask=there)


@triton.jit
def _keys(
    pool, factors, table, start, end, k_page, k_row, f_page, f_row, dtype: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Keys `start` and behind it as numbers [n, BLOCK_D], and their factors [n]; `table`: the request's pages."""
    dim = tl.arange(0, BLOCK_D)
    key = start + tl.arange(0, KEYS)
    there = key < end
    if PAGE % KEYS == 0:
        page = tl.load(table + start // PAGE).to(tl.int64)
        offset = start % PAGE + tl.arange(0, KEYS)
    else:
        page = tl.load(table + key // PAGE, mask=there, other=-1).to(tl.int64)
        offset = key % PAGE
    there = there & (page >= 0)
    at = pool + (page * k_page + offset * k_row)
    in_d = there[:, None] if BLOCK_D == D else there[:, None] & (dim < D)[None, :]
    found = tl.load(at[:, None] + dim[None, :], mask=in_d, other=0.0).to(dtype)
    factor = 1.0
    if SCALED:
        factor = tl.load(factors + (page * f_page + offset * f_row), mask=there, other=0.0)
    return found, factor


@pdl_jit
def decode_kernel(
    q, weights, pool, factors, table, request, seen, scores,
    root, topk, span, q_t, q_h, w_t, k_page, k_row, f_page, f_row, table_b, scores_t,
    HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr, SCALED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`span` keys of one query. Queries that see at most `topk` rows are not scored. NATIVE: codes are multiplied."""
    gdc_wait()
    gdc_launch_dependents()
    query = tl.program_id(1).to(tl.int64)
    n = tl.load(seen + query)
    begin = tl.program_id(0) * span
    end = tl.minimum(begin + span, n)
    if (begin < end) & (n > topk):
        head, dim = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
        there = (head < HEADS)[:, None] & (dim < D)[None, :]
        queries = tl.load(q + query * q_t + head[:, None] * q_h + dim[None, :], mask=there, other=0.0)
        share = tl.load(weights + query * w_t + head, mask=head < HEADS, other=0.0).to(tl.float32)
        if SCALED:
            wide = queries.to(tl.float32)
            factor = pow2_scale(largest_of(wide, 1))
            codes = _codes(wide, factor[:, None])
            queries = codes if NATIVE else codes.to(queries.dtype)
            share = share * factor
        table += tl.load(request + query).to(tl.int64) * table_b
        for start in range(begin, end, KEYS):
            keys, lengths = _keys(
                pool, factors, table, start, end, k_page, k_row, f_page, f_row, queries.dtype,
                D, PAGE, BLOCK_D, KEYS, SCALED,
            )  # fmt: skip
            hits = tl.dot(keys, tl.trans(queries), input_precision="ieee")
            found = tl.sum(at_least(hits, 0.0) * share[None, :], 1) * root
            if SCALED:
                found = found * lengths
            key = start + tl.arange(0, KEYS)
            tl.store(scores + query * scores_t + key, found, mask=key < end)


@pdl_jit
def prefill_kernel(
    q, weights, pool, factors, table, tiles, scores,
    root, q_t, q_h, w_t, k_page, k_row, f_page, f_row, table_b, scores_t,
    HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One of PARTS of a tile of queries of one request against KEYS keys, head after head.

    `tiles`: [m, 5] int32: first row of `scores`, queries, first token, its position, request.
    """
    gdc_wait()
    gdc_launch_dependents()
    tile = tiles + tl.program_id(1) // PARTS * 5
    part = tl.program_id(1) % PARTS * QUERIES
    begin = tl.program_id(0) * KEYS
    row = tl.load(tile) + part
    count = tl.minimum(tl.load(tile + 1) - part, QUERIES)
    position = tl.load(tile + 3) + part
    if (count > 0) & (begin < position + count):
        inner = tl.arange(0, QUERIES)
        real = inner < count
        token = (tl.load(tile + 2) + part + inner).to(tl.int64)
        key = begin + tl.arange(0, KEYS)
        dim = tl.arange(0, BLOCK_D)
        kind: tl.constexpr = q.dtype.element_ty
        keys, lengths = _keys(
            pool, factors, table + tl.load(tile + 4).to(tl.int64) * table_b, begin, position + count,
            k_page, k_row, f_page, f_row, kind, D, PAGE, BLOCK_D, KEYS, SCALED,
        )  # fmt: skip
        keys = tl.trans(keys)
        found = tl.zeros([QUERIES, KEYS], tl.float32)
        there = real[:, None] & (dim < D)[None, :]
        for head in range(HEADS):
            queries = tl.load(q + token[:, None] * q_t + head * q_h + dim[None, :], mask=there, other=0.0)
            share = tl.load(weights + token * w_t + head, mask=real, other=0.0).to(tl.float32)
            if SCALED:
                wide = queries.to(tl.float32)
                factor = pow2_scale(largest_of(wide, 1))
                queries = _codes(wide, factor[:, None]).to(kind)
                share = share * factor
            hits = tl.dot(queries, keys, input_precision="ieee")
            found += at_least(hits, 0.0) * share[:, None]
        found = found * root
        if SCALED:
            found = found * lengths[None, :]
        at = scores + (row + inner).to(tl.int64)[:, None] * scores_t + key[None, :]
        tl.store(at, found, mask=real[:, None] & (key < position + count)[None, :])


def store(spec: IndexerSpec, pools: Mapping[str, torch.Tensor], slots: torch.Tensor, k: torch.Tensor) -> None:
    """Write keys [T, d] at `slots` [T]; negative slots are passed over."""
    pool, factors = pools["k"], pools.get("factor", pools["k"])
    rows = 8
    store_kernel[(cdiv(len(slots), rows),)](
        k, pool, factors, slots, len(slots), k.stride(0), *pool.stride()[:2], *factors.stride()[:2],
        D=spec.head_dim, PAGE=pool.shape[1], BLOCK_D=next_power_of_2(spec.head_dim), ROWS=rows,
        SCALED=spec.key_format == "scaled", num_warps=4,
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
    """Scores [t, bound] fp32 of t single queries; what a query does not see, or need not be scored, is not written.

    `q`: [t, heads, d]. `weights`: [t, heads].
    """
    chosen = config(chip_of(q.device), q.dtype)
    scores = torch.empty(len(q), _width(queries.max_kv_len), dtype=torch.float32, device=q.device)
    pool, factors = pools["k"], pools.get("factor", pools["k"])
    span = _span(chosen, len(q), queries.max_kv_len)
    decode_kernel[(cdiv(queries.max_kv_len, span), len(q))](
        q, weights, pool, factors, paged.table, queries.request, queries.kv_lens, scores,
        spec.head_dim**-0.5, topk, span, q.stride(0), q.stride(1), weights.stride(0), *pool.stride()[:2],
        *factors.stride()[:2], paged.table.stride(0), scores.stride(0),
        HEADS=spec.num_heads, D=spec.head_dim, PAGE=paged.page_size, BLOCK_H=_padded(spec.num_heads),
        BLOCK_D=_padded(spec.head_dim), KEYS=chosen.keys, SCALED=spec.key_format == "scaled",
        NATIVE=chosen.native, num_warps=chosen.warps, num_stages=chosen.stages,
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
    """Scores [rows, bound] fp32 of the queries of `tiles` (`prefill_kernel`), of which `q` [T, heads, d] has all."""
    chosen = prefill_config(chip_of(q.device), q.dtype, spec.key_format == "scaled")
    scores = torch.empty(rows, _width(bound), dtype=torch.float32, device=q.device)
    pool, factors = pools["k"], pools.get("factor", pools["k"])
    parts = TILE // chosen.queries
    prefill_kernel[(cdiv(bound, chosen.keys), len(tiles) * parts)](
        q, weights, pool, factors, paged.table, tiles, scores,
        spec.head_dim**-0.5, q.stride(0), q.stride(1), weights.stride(0), *pool.stride()[:2],
        *factors.stride()[:2], paged.table.stride(0), scores.stride(0),
        HEADS=spec.num_heads, D=spec.head_dim, PAGE=paged.page_size, BLOCK_D=_padded(spec.head_dim),
        PARTS=parts, QUERIES=chosen.queries, KEYS=chosen.keys, SCALED=spec.key_format == "scaled",
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return scores


def _span(chosen: Config, queries: int, bound: int) -> int:
    """Keys of a program: fewer where programs would be too few to keep a chip busy."""
    span = chosen.span
    while span >= 8 * chosen.keys and queries * cdiv(bound, span) < _PROGRAMS:
        span //= 2
    return span


def _padded(size: int) -> int:
    return max(16, next_power_of_2(size))


def _width(bound: int) -> int:
    """Row length of scores: rows begin at multiples of 64 bytes."""
    return -(-bound // 16) * 16


@specializations
def released(chip: Chip) -> list[Specialization]:
    """64 heads of 128: plain keys in bf16, and scaled ones."""
    made = []
    chosen = config(chip, torch.bfloat16)
    numbers = ("q_t", "q_h", "w_t", "k_page", "k_row", "f_page", "f_row", "table_b", "scores_t")
    for name, pool, factors in (("bf16", "*bf16:16", "*bf16:16"), ("scaled", "*fp8e4nv:16", "*fp32:16")):
        signature = {"q": "*bf16:16", "weights": "*fp32:16", "pool": pool, "factors": factors, "table": "*i64:16"}
        signature |= {"request": "*i64:16", "seen": "*i32:16", "tiles": "*i32:16", "scores": "*fp32:16"}
        signature |= {"root": "fp32", "topk": "i32", "span": "i32:16"}
        signature |= {**dict.fromkeys(numbers, "i32:16"), "f_row": "i32"}
        constants = {"HEADS": 64, "D": 128, "PAGE": 16, "BLOCK_D": 128, "KEYS": chosen.keys}
        constants |= {"SCALED": name == "scaled"}
        decode = {**constants, "BLOCK_H": 64, "NATIVE": chosen.native}
        made.append(
            Specialization(f"dsa scores decode {name}", decode_kernel, signature, decode, chosen.warps, chosen.stages)
        )
        wide = prefill_config(chip, torch.bfloat16, name == "scaled")
        prefill = {**constants, "KEYS": wide.keys, "PARTS": TILE // wide.queries, "QUERIES": wide.queries}
        made.append(
            Specialization(f"dsa scores prefill {name}", prefill_kernel, signature, prefill, wide.warps, wide.stages)
        )
    return made
