"""New latent rows into their pages, in one launch: plain, FP8, or FP8 with a factor for every 128 channels.

A program owns a few tokens. Bytes moved: the new rows, read once and written once.
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

_LARGEST = tl.constexpr(FP8_MAX)
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def power_of_two(largest):
    """The least power of two f with largest <= 448 f; 448 is 1.75 * 2^8."""
    bits = at_least(largest, 1.0e-4).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True)


@pdl_jit
def store_kernel(
    c, k_pe, c_pool, pe_pool, factors, slots, tokens, inverse,
    c_t, pe_t, c_page, c_row, pe_page, pe_row, f_page, f_row, PAGE: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr,
    SCALED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Strides of pages and rows are in elements of each pool's own type; `inverse`: 1 / kv_scale."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = token < tokens
    slot = tl.load(slots + token, mask=real, other=-1).to(tl.int64)
    kept = slot >= 0
    page, offset = slot // PAGE, slot % PAGE
    token = token.to(tl.int64)
    channel, rope = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    in_c = kept[:, None] & (channel < C)[None, :]
    in_r = kept[:, None] & (rope < R)[None, :]
    latent = tl.load(c + token[:, None] * c_t + channel[None, :], mask=in_c, other=0.0)
    tail = tl.load(k_pe + token[:, None] * pe_t + rope[None, :], mask=in_r, other=0.0)
    if SCALED:
        blocks = tl.reshape(latent.to(tl.float32), (ROWS, BLOCK_C // _BLOCK, _BLOCK))
        factor = power_of_two(largest_of(blocks, 2))
        block = tl.arange(0, BLOCK_C // _BLOCK)
        to = factors + (page * f_page + offset * f_row + C // 4)
        tl.store(to[:, None] + block[None, :], factor, mask=kept[:, None] & (block < C // _BLOCK)[None, :])
        latent = tl.reshape(blocks / factor[:, :, None], (ROWS, BLOCK_C))
        pe_pool += (C + C // _BLOCK * 4) // 2
    elif FP8:
        latent = latent.to(tl.float32) * inverse
        tail = tail.to(tl.float32) * inverse
        tail = clamped(tail, _LARGEST)
    if SCALED or FP8:
        latent = clamped(latent, _LARGEST)
    c_to = c_pool + (page * c_page + offset * c_row)
    pe_to = pe_pool + (page * pe_page + offset * pe_row)
    tl.store(c_to[:, None] + channel[None, :], latent.to(c_pool.dtype.element_ty), mask=in_c)
    tl.store(pe_to[:, None] + rope[None, :], tail.to(pe_pool.dtype.element_ty), mask=in_r)


def planes(spec: MlaSpec, pools: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The latent, rope and factor parts of a pool, each of the type it is read in, as [P, S, n] views.

    Of a scaled row all three begin at the row's first byte; the kernels add where each part begins.
    """
    if spec.row_format == "plain":
        return pools["c"], pools["k_pe"], pools["c"]
    rows = pools["row"]
    return rows.view(torch.float8_e4m3fn), rows.view(torch.bfloat16), rows.view(torch.float32)


def store(
    spec: MlaSpec,
    pools: Mapping[str, torch.Tensor],
    slots: torch.Tensor,
    c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_scale: float,
) -> None:
    """Write rows [T, C] and [T, R] at `slots` [T]; negative slots are passed over."""
    latent, rope, factors = planes(spec, pools)
    rows = 4
    store_kernel[(cdiv(len(slots), rows),)](
        c, k_pe, latent, rope, factors, slots, len(slots), 1.0 / kv_scale,
        c.stride(0), k_pe.stride(0), *latent.stride()[:2], *rope.stride()[:2], *factors.stride()[:2],
        PAGE=latent.shape[1], C=spec.latent_dim, R=spec.rope_dim, BLOCK_C=next_power_of_2(spec.latent_dim),
        BLOCK_R=next_power_of_2(spec.rope_dim), ROWS=rows, SCALED=spec.row_format == "scaled",
        FP8=spec.row_format == "plain" and spec.kv_dtype == torch.float8_e4m3fn, num_warps=4,
    )  # fmt: skip


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Rows of the released sizes in bf16 and scaled."""
    made = []
    for name, kinds in (("bf16", ("*bf16",) * 3), ("scaled", ("*fp8e4nv", "*bf16", "*fp32"))):
        signature = {"c": "*bf16", "k_pe": "*bf16", "slots": "*i64", "tokens": "i32", "inverse": "fp32"}
        signature |= dict(zip(("c_pool", "pe_pool", "factors"), kinds, strict=True))
        signature |= dict.fromkeys(("c_t", "pe_t", "c_page", "c_row", "pe_page", "pe_row", "f_page", "f_row"), "i32")
        constants = {"PAGE": 16, "C": 512, "R": 64, "BLOCK_C": 512, "BLOCK_R": 64, "ROWS": 4}
        constants |= {"SCALED": name == "scaled", "FP8": False}
        made.append(Specialization(f"mla store {name}", store_kernel, signature, constants, 4, 1))
    return made
