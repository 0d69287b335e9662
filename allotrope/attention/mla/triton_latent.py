"""Latents as the KV cache has them, dequantized: what the decode and the prefill kernel load keys by.

Must not know: which cache entries are loaded, and what for.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from allotrope.attention.mla.rows import BLOCK

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def load_latent(
    c_pool, pe_pool, scales, page, offset, mask_n, c_page, c_row, pe_page, pe_row, scale_page, scale_row,
    dtype: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SCALED: tl.constexpr,
):  # fmt: skip
    """Dequantized c [BLOCK_N, BLOCK_C] and k_pe [BLOCK_N, BLOCK_R] at `offset` of `page`; 0 where `mask_n` is false."""
    offs_c, offs_r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    mask_c = mask_n[:, None] if BLOCK_C == C else mask_n[:, None] & (offs_c < C)[None, :]
    mask_r = mask_n[:, None] if BLOCK_R == R else mask_n[:, None] & (offs_r < R)[None, :]
    if BLOCK_SCALED:
        pe_pool += (C + C // _BLOCK * 4) // 2
        offs_b = tl.arange(0, BLOCK_C // _BLOCK)
        scale_ptrs = scales + page * scale_page + offset * scale_row + C // 4
        block_scale = tl.load(scale_ptrs[:, None] + offs_b[None, :], mask=mask_n[:, None], other=0.0)
    c_ptrs = c_pool + (page * c_page + offset * c_row)
    pe_ptrs = pe_pool + (page * pe_page + offset * pe_row)
    latent = tl.load(c_ptrs[:, None] + offs_c[None, :], mask=mask_c, other=0.0)
    k_pe = tl.load(pe_ptrs[:, None] + offs_r[None, :], mask=mask_r, other=0.0)
    if BLOCK_SCALED:
        blocks = tl.reshape(latent.to(tl.float32), (BLOCK_N, BLOCK_C // _BLOCK, _BLOCK)) * block_scale[:, :, None]
        return tl.reshape(blocks, (BLOCK_N, BLOCK_C)).to(dtype), k_pe.to(dtype)
    return latent.to(dtype), k_pe.to(dtype)
