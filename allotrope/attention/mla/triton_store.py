"""Write new entries to the latent KV cache in one launch: unquantized, FP8, or FP8 with a scale for each 128 channels.

A program owns a few tokens. The new entries are read once and written once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from allotrope.attention.mla.rows import BLOCK, FP8_MAX
from allotrope.attention.mla.spec import MlaSpec
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_least, clamped, largest_of
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2

_FP8_MAX = tl.constexpr(FP8_MAX)
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def pow2_scale(absmax):
    """The smallest power of two s with absmax <= 448 s; 448 is 1.75 * 2^8."""
    bits = at_least(absmax, 1.0e-4).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True)


@pdl_jit
def store_kernel(
    c, k_pe, c_pool, pe_pool, scales, slot_mapping, tokens, inv_scale,
    c_t, pe_t, c_page, c_row, pe_page, pe_row, scale_page, scale_row, PAGE: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_SCALED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Write c and k_pe of BLOCK_T tokens to their slots. Strides are in elements of each pool's own type."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_in = token < tokens
    slot = tl.load(slot_mapping + token, mask=mask_in, other=-1).to(tl.int64)
    mask_t = slot >= 0
    page, page_offset = slot // PAGE, slot % PAGE
    token = token.to(tl.int64)
    offs_c, offs_r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    mask_c = mask_t[:, None] & (offs_c < C)[None, :]
    mask_r = mask_t[:, None] & (offs_r < R)[None, :]
    latent = tl.load(c + token[:, None] * c_t + offs_c[None, :], mask=mask_c, other=0.0)
    pe = tl.load(k_pe + token[:, None] * pe_t + offs_r[None, :], mask=mask_r, other=0.0)
    if BLOCK_SCALED:
        blocks = tl.reshape(latent.to(tl.float32), (BLOCK_T, BLOCK_C // _BLOCK, _BLOCK))
        scale = pow2_scale(largest_of(blocks, 2))
        offs_b = tl.arange(0, BLOCK_C // _BLOCK)
        scale_ptrs = scales + (page * scale_page + page_offset * scale_row + C // 4)
        tl.store(scale_ptrs[:, None] + offs_b[None, :], scale, mask=mask_t[:, None] & (offs_b < C // _BLOCK)[None, :])
        latent = tl.reshape(blocks / scale[:, :, None], (BLOCK_T, BLOCK_C))
        pe_pool += (C + C // _BLOCK * 4) // 2
    elif FP8:
        latent = latent.to(tl.float32) * inv_scale
        pe = pe.to(tl.float32) * inv_scale
        pe = clamped(pe, _FP8_MAX)
    if BLOCK_SCALED or FP8:
        latent = clamped(latent, _FP8_MAX)
    c_ptrs = c_pool + (page * c_page + page_offset * c_row)
    pe_ptrs = pe_pool + (page * pe_page + page_offset * pe_row)
    tl.store(c_ptrs[:, None] + offs_c[None, :], latent.to(c_pool.dtype.element_ty), mask=mask_c)
    tl.store(pe_ptrs[:, None] + offs_r[None, :], pe.to(pe_pool.dtype.element_ty), mask=mask_r)


def pool_views(spec: MlaSpec, pools: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The latent, rope and scale parts of a pool as [P, S, n] views, each of the type that it is read in.

    The views of a block-scaled cache all begin at an entry's first byte; the kernels add each part's offset.
    """
    if spec.row_format == "plain":
        return pools["c"], pools["k_pe"], pools["c"]
    rows = pools["row"]
    return rows.view(torch.float8_e4m3fn), rows.view(torch.bfloat16), rows.view(torch.float32)


def store(
    spec: MlaSpec,
    pools: Mapping[str, torch.Tensor],
    slot_mapping: torch.Tensor,
    c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_scale: float,
) -> None:
    """Write `c` [T, C] and `k_pe` [T, R] to `slot_mapping` [T]; tokens with a negative slot are skipped."""
    latent, rope, scales = pool_views(spec, pools)
    block_t = 4
    store_kernel[(cdiv(len(slot_mapping), block_t),)](
        c, k_pe, latent, rope, scales, slot_mapping, len(slot_mapping), 1.0 / kv_scale,
        c.stride(0), k_pe.stride(0), *latent.stride()[:2], *rope.stride()[:2], *scales.stride()[:2],
        PAGE=latent.shape[1], C=spec.latent_dim, R=spec.rope_dim, BLOCK_C=next_power_of_2(spec.latent_dim),
        BLOCK_R=next_power_of_2(spec.rope_dim), BLOCK_T=block_t, BLOCK_SCALED=spec.row_format == "scaled",
        FP8=spec.row_format == "plain" and spec.kv_dtype == torch.float8_e4m3fn, num_warps=4,
    )  # fmt: skip


@specializations
def released(chip: Chip) -> list[Specialization]:
    """The released sizes, for a cache of bf16 and for the block-scaled one."""
    made = []
    for name, dtypes in (("bf16", ("*bf16",) * 3), ("scaled", ("*fp8e4nv", "*bf16", "*fp32"))):
        signature = {"c": "*bf16", "k_pe": "*bf16", "slot_mapping": "*i64", "tokens": "i32", "inv_scale": "fp32"}
        signature |= dict(zip(("c_pool", "pe_pool", "scales"), dtypes, strict=True))
        signature |= dict.fromkeys(
            ("c_t", "pe_t", "c_page", "c_row", "pe_page", "pe_row", "scale_page", "scale_row"), "i32"
        )
        constants = {"PAGE": 16, "C": 512, "R": 64, "BLOCK_C": 512, "BLOCK_R": 64, "BLOCK_T": 4}
        constants |= {"BLOCK_SCALED": name == "scaled", "FP8": False}
        made.append(Specialization(f"mla store {name}", store_kernel, signature, constants, 4, 1))
    return made
