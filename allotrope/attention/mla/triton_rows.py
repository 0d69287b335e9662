"""Cached latent rows as numbers: what the kernels of a decode and of a prefill read by.

Must not know: which rows are read, and what for.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from allotrope.attention.mla.rows import BLOCK

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def load_rows(
    c_pool, pe_pool, factors, page, offset, there, c_page, c_row, pe_page, pe_row, f_page, f_row, dtype: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, KEYS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Rows `offset` [KEYS] of `page` as numbers: latent [KEYS, BLOCK_C], rope [KEYS, BLOCK_R]; 0 where not `there`."""
    channel, rope = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    in_c = there[:, None] if BLOCK_C == C else there[:, None] & (channel < C)[None, :]
    in_r = there[:, None] if BLOCK_R == R else there[:, None] & (rope < R)[None, :]
    if SCALED:
        pe_pool += (C + C // _BLOCK * 4) // 2
        block = tl.arange(0, BLOCK_C // _BLOCK)
        f_at = factors + page * f_page + offset * f_row + C // 4
        factor = tl.load(f_at[:, None] + block[None, :], mask=there[:, None], other=0.0)
    c_at = c_pool + (page * c_page + offset * c_row)
    pe_at = pe_pool + (page * pe_page + offset * pe_row)
    latent = tl.load(c_at[:, None] + channel[None, :], mask=in_c, other=0.0)
    tail = tl.load(pe_at[:, None] + rope[None, :], mask=in_r, other=0.0)
    if SCALED:
        blocks = tl.reshape(latent.to(tl.float32), (KEYS, BLOCK_C // _BLOCK, _BLOCK)) * factor[:, :, None]
        return tl.reshape(blocks, (KEYS, BLOCK_C)).to(dtype), tail.to(dtype)
    return latent.to(dtype), tail.to(dtype)
