"""Latents of keys gathered from their pages, before they are decompressed.

Owns: the kernel that gathers, its table and its launch. Must not know: which keys are wanted together.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton.language as tl

from allotrope.attention.batch import PageIndex
from allotrope.attention.mla.spec import MlaSpec
from allotrope.attention.mla.triton_latent import load_latent
from allotrope.attention.mla.triton_store import pool_views
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.tiles import next_power_of_2

# Keys of a block, by which keys are gathered.
GATHER_BLOCK = 64


def blocks_of(request: int, first: int, last: int, row: int) -> list[tuple[int, ...]]:
    """Entries for keys `first` to `last` of a request, from scratch row `row` on: of at most `GATHER_BLOCK` keys each,
    request, first key, number of keys, first scratch row."""
    return [
        (request, key, min(GATHER_BLOCK, last - key), row + key - first) for key in range(first, last, GATHER_BLOCK)
    ]


@pdl_jit
def gather_kernel(
    c_pool, pe_pool, scales, table, blocks, latent, rope, kv_scale,
    c_page, c_row, pe_page, pe_row, scale_page, scale_row, table_b,
    C: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_SCALED: tl.constexpr,
):  # fmt: skip
    """Dequantize BLOCK_T entries of a block to contiguous `latent` [rows, C] and `rope` [rows, R]."""
    gdc_wait()
    gdc_launch_dependents()
    block = tl.program_id(0).to(tl.int64)
    offs_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    request = tl.load(blocks + block * 4).to(tl.int64)
    key = tl.load(blocks + block * 4 + 1) + offs_t
    mask_t = offs_t < tl.load(blocks + block * 4 + 2)
    page = tl.load(table + request * table_b + key // PAGE, mask=mask_t, other=-1).to(tl.int64)
    c, pe = load_latent(
        c_pool, pe_pool, scales, page, key % PAGE, mask_t & (page >= 0), c_page, c_row, pe_page, pe_row, scale_page,
        scale_row, tl.float32, C, R, BLOCK_C, BLOCK_R, BLOCK_T, BLOCK_SCALED,
    )  # fmt: skip
    offs_c, offs_r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    row = tl.load(blocks + block * 4 + 3).to(tl.int64) + offs_t
    dtype: tl.constexpr = latent.dtype.element_ty
    tl.store(
        latent + row[:, None] * C + offs_c[None, :],
        (c * kv_scale).to(dtype),
        mask=mask_t[:, None] & (offs_c < C)[None, :],
    )
    tl.store(
        rope + row[:, None] * R + offs_r[None, :],
        (pe * kv_scale).to(dtype),
        mask=mask_t[:, None] & (offs_r < R)[None, :],
    )


def gather_latent(
    spec: MlaSpec,
    pools: Mapping[str, torch.Tensor],
    paged: PageIndex,
    blocks: torch.Tensor,
    into: Sequence[torch.Tensor],
    kv_scale: float,
) -> None:
    """Gather and dequantize c [rows, C] and k_pe [rows, R] `into` these tensors. `blocks`: [n, 4] int32, see
    `blocks_of`; other rows stay as they are."""
    latent, rope = into
    c_pool, pe_pool, scales = pool_views(spec, pools)
    block_t = GATHER_BLOCK if latent.device.type == "cpu" else 8
    gather_kernel[(len(blocks), GATHER_BLOCK // block_t)](
        c_pool, pe_pool, scales, paged.table, blocks, latent, rope, kv_scale,
        *c_pool.stride()[:2], *pe_pool.stride()[:2], *scales.stride()[:2], paged.table.stride(0),
        C=spec.latent_dim, R=spec.rope_dim, PAGE=paged.page_size, BLOCK_C=padded(spec.latent_dim),
        BLOCK_R=padded(spec.rope_dim), BLOCK_T=block_t, BLOCK_SCALED=spec.row_format == "scaled", num_warps=4,
    )  # fmt: skip


def padded(size: int) -> int:
    """The power of two, at least 16, that holds `size` columns of a tile."""
    return max(16, next_power_of_2(size))
