"""Absorbed MLA decode: all heads of a query attend to the same latent KV cache, split among programs (split-KV).

Owns: the kernel that attends, the one that merges the splits, and their launch. Must not know: how queries were
absorbed, who chose the sparse indices, how pages were filled.

The number of splits follows from the number of queries, the bound of their KV lengths and the chip. So it is the same
in an eager step and in a captured one of the same sizes.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from allotrope.attention.batch import PageIndex
from allotrope.attention.mla.spec import MlaSpec
from allotrope.attention.mla.triton_latent import load_latent
from allotrope.attention.mla.triton_store import pool_views
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_least, higher_of, highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.softmax import LOG2E, LOWEST
from allotrope.kernels.split_kv import num_splits
from allotrope.kernels.tiles import cdiv, next_power_of_2

# Bytes of shared memory of a program with 16 heads and 16 keys of the largest cache entries.
_SMALL_TILES = 52 * 1024


@dataclass(frozen=True)
class Queries:
    """t query tokens of one launch.

    `request`: [t] row of the page table. `kv_lens`: [t] int32 KV length of each, 0 for none. `max_kv_len`: an upper
    bound of `kv_lens`.
    """

    request: torch.Tensor
    kv_lens: torch.Tensor
    max_kv_len: int


@dataclass(frozen=True)
class Config:
    """`block_h`: heads of a program. `block_n`: keys of one loop iteration. `resident`: programs that one
    multiprocessor holds. `swap_ab`: whether keys, and not heads, are the rows of the products. `gluon`: whether
    `gluon_decode` has the kernel.
    """

    block_h: int
    block_n: int
    warps: int
    stages: int
    resident: int
    swap_ab: bool = False
    gluon: bool = False


def config(chip: Chip, spec: MlaSpec, dtype: torch.dtype, sparse: bool) -> Config:
    """Launch parameters. `dtype`: type of the queries. `sparse`: whether queries have sparse indices."""
    heads = min(64, max(16, next_power_of_2(spec.num_heads)))
    if chip.vendor == "cpu":
        return Config(heads, 32, 4, 1, 1, heads < 64)
    if dtype == torch.float32:
        return Config(16, 16, 4, 1, 1)
    if chip.vendor == "amd":
        return Config(16, 32 if chip.arch == "gfx950" else 16, 4, 1, 2)
    if not chip.has_wgmma:
        # Small tiles, which leave registers free; a program takes about 50 KiB.
        return Config(16, 16, 4, 1, 2 if chip.shared_memory >= 2 * _SMALL_TILES else 1)
    fits = (spec.latent_dim, spec.rope_dim) == (512, 64) and (spec.kv_dtype == dtype or spec.row_format == "scaled")
    # With sparse indices, the asynchronous loads of the Gluon kernel win even where it pads the heads to 64.
    if fits and (heads == 64 or sparse):
        return Config(64, 128, 4, 1, 1, gluon=True)
    if heads == 64:
        return Config(64, 64, 8, 2, 1)
    return Config(heads, 64, 4 if heads == 16 else 8, 2, 2 if heads == 16 else 1)


@triton.jit
def _locate(
    table, topk_indices, start, end, is_sparse, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, SPARSE: tl.constexpr
):
    """Positions of the BLOCK_N keys from `start` on, and their pages, -1 for none; one page if it holds all of them."""
    key = start + tl.arange(0, BLOCK_N)
    mask_n = key < end
    if SPARSE:
        topk_index = tl.load(topk_indices + key, mask=mask_n & is_sparse, other=-1).to(tl.int32)
        key = tl.where(is_sparse, topk_index, key)
        mask_n = mask_n & (key >= 0)
    key = tl.where(mask_n, key, -1)
    if SPARSE or PAGE % BLOCK_N != 0:
        page = tl.load(table + key // PAGE, mask=mask_n, other=-1).to(tl.int32)
    else:
        page = tl.load(table + start // PAGE, mask=start < end, other=-1).to(tl.int32)
    return key, page


@pdl_jit
def attend_kernel(
    q, q_pe, c_pool, pe_pool, scales, table, request, kv_lens, topk_indices, partial, lse, out,
    scale, kv_scale, topk, num_splits,
    q_t, q_h, pe_t, pe_h, c_page, c_row, pe_page, pe_row, scale_page, scale_row, table_b, topk_t, out_t, out_h,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    SPARSE: tl.constexpr, BLOCK_SCALED: tl.constexpr, DIRECT: tl.constexpr, SWAP_AB: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one query over one split of its keys.

    With SWAP_AB keys are the rows of every product and heads its columns: a tensor core multiplies 64 rows, which few
    heads would not fill.

    With SPARSE the keys of a query whose KV length is above `topk` are `topk_indices` [t, topk], -1 for none. With
    DIRECT (one split) the kernel writes the output, else the split's normalized output and base-2 log-sum-exp.
    """
    gdc_wait()
    gdc_launch_dependents()
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    query = tl.program_id(2).to(tl.int64)
    mask_h = head < H
    offs_c, offs_r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    mask_c, mask_r = offs_c < C, offs_r < R
    kv_len = tl.load(kv_lens + query)
    is_sparse = kv_len > topk
    if SPARSE:
        kv_len = tl.minimum(kv_len, topk)
    split_size = tl.cdiv(tl.cdiv(kv_len, BLOCK_N), num_splits) * BLOCK_N
    begin = split * split_size
    end = tl.minimum(begin + split_size, kv_len)
    if begin < end or DIRECT:
        table += tl.load(request + query).to(tl.int64) * table_b
        q_latent = tl.load(
            q + query * q_t + head[:, None] * q_h + offs_c[None, :], mask=mask_h[:, None] & mask_c[None, :], other=0.0
        )
        q_rope = tl.load(
            q_pe + query * pe_t + head[:, None] * pe_h + offs_r[None, :],
            mask=mask_h[:, None] & mask_r[None, :],
            other=0.0,
        )
        m_i = tl.full([BLOCK_H], LOWEST, tl.float32)
        l_i = tl.zeros([BLOCK_H], tl.float32)
        if SWAP_AB:
            acc = tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
        else:
            acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
        qk_scale = scale * kv_scale * LOG2E
        topk_indices += query * topk_t
        # The page table is read one iteration before the keys.
        key, page = _locate(table, topk_indices, begin, end, is_sparse, BLOCK_N, PAGE, SPARSE)
        for start in range(begin, end, BLOCK_N):
            next_key, next_page = _locate(table, topk_indices, start + BLOCK_N, end, is_sparse, BLOCK_N, PAGE, SPARSE)
            if not SPARSE:
                key = start + tl.arange(0, BLOCK_N)
                key = tl.where(key < end, key, -1)
            mask_n = key >= 0
            latent, k_pe = load_latent(
                c_pool, pe_pool, scales, page.to(tl.int64), key % PAGE, mask_n & (page >= 0), c_page, c_row, pe_page,
                pe_row, scale_page, scale_row, q_latent.dtype, C, R, BLOCK_C, BLOCK_R, BLOCK_N, BLOCK_SCALED,
            )  # fmt: skip
            if SWAP_AB:
                logits = tl.dot(latent, tl.trans(q_latent), input_precision="ieee")
                logits = tl.dot(k_pe, tl.trans(q_rope), logits, input_precision="ieee")
                logits = tl.where(mask_n[:, None], logits * qk_scale, float("-inf"))
                m_new = higher_of(m_i, highest(logits, 0))
                p = tl.exp2(logits - m_new[None, :])
                alpha = tl.exp2(m_i - m_new)
                l_i = l_i * alpha + tl.sum(p, 0)
                acc = acc * alpha[None, :]
                acc = tl.dot(tl.trans(latent), p.to(latent.dtype), acc, input_precision="ieee")
            else:
                logits = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
                logits = tl.dot(q_rope, tl.trans(k_pe), logits, input_precision="ieee")
                logits = tl.where(mask_n[None, :], logits * qk_scale, float("-inf"))
                m_new = higher_of(m_i, highest(logits, 1))
                p = tl.exp2(logits - m_new[:, None])
                alpha = tl.exp2(m_i - m_new)
                l_i = l_i * alpha + tl.sum(p, 1)
                acc = acc * alpha[:, None]
                acc = tl.dot(p.to(latent.dtype), latent, acc, input_precision="ieee")
            m_i = m_new
            key, page = next_key, next_page
        # The row max itself adds 1 to the row sum, so the bound changes only queries without keys.
        if SWAP_AB:
            acc = tl.trans(acc)
        acc = acc * (kv_scale / at_least(l_i, 1.0))[:, None]
        mask_hc = mask_h[:, None] & mask_c[None, :]
        if DIRECT:
            out_ptrs = out + query * out_t + head[:, None] * out_h + offs_c[None, :]
            tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=mask_hc)
        else:
            lse_offset = (query * num_splits + split) * H + head
            tl.store(partial + lse_offset[:, None] * C + offs_c[None, :], acc, mask=mask_hc)
            # A split whose indices are all -1 has no keys, and gets weight 0.
            split_lse = tl.where(l_i == 0.0, LOWEST, m_i + tl.log2(at_least(l_i, 1.0)))
            tl.store(lse + lse_offset, split_lse, mask=mask_h)


@pdl_jit
def merge_kernel(
    partial, lse, kv_lens, out, topk, num_splits, out_t, out_h,
    H: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    SPARSE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one head of one query by their log-sum-exp; zero where no split has keys."""
    gdc_wait()
    gdc_launch_dependents()
    head = tl.program_id(0)
    query = tl.program_id(1).to(tl.int64)
    kv_len = tl.load(kv_lens + query)
    if SPARSE:
        kv_len = tl.minimum(kv_len, topk)
    split_size = tl.cdiv(tl.cdiv(kv_len, BLOCK_N), num_splits) * BLOCK_N
    used_splits = tl.cdiv(kv_len, tl.maximum(split_size, 1))
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    m_i = LOWEST
    l_i = 0.0
    acc = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, used_splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        lse_offset = (query * num_splits + split) * H + head
        split_lse = tl.load(lse + lse_offset, mask=split < used_splits, other=LOWEST)
        m_new = higher_of(m_i, highest(split_lse, 0))
        split_weight = tl.where(split_lse == LOWEST, 0.0, tl.exp2(split_lse - m_new))
        split_out = tl.load(
            partial + lse_offset[:, None] * C + offs_c[None, :],
            mask=(split < used_splits)[:, None] & mask_c[None, :],
            other=0.0,
        )
        alpha = tl.exp2(m_i - m_new)
        acc = acc * alpha + tl.sum(split_out * split_weight[:, None], 0)
        l_i = l_i * alpha + tl.sum(split_weight, 0)
        m_i = m_new
    acc = acc / at_least(l_i, 1.0e-30)
    tl.store(out + query * out_t + head * out_h + offs_c, acc.to(out.dtype.element_ty), mask=mask_c)


def split_count(queries: int, head_blocks: int, key_blocks: int, max_programs: int) -> int:
    """KV splits of each query: the fewest whose cost is lowest on a chip that holds `max_programs` programs.

    `head_blocks`: programs of one split of a query. `key_blocks`: blocks of keys of the longest query.
    """
    max_splits = min(64, max(1, key_blocks // 4), max(1, 2 * max_programs // max(1, queries * head_blocks)))
    return num_splits(queries * head_blocks, key_blocks, max_programs, max_splits, start=2.0, merge=4.0, per_split=0.25)


def attend(
    spec: MlaSpec,
    pools: Mapping[str, torch.Tensor],
    paged: PageIndex,
    queries: Queries,
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv_scale: float,
    topk_indices: torch.Tensor | None = None,
    topk: int = 0,
) -> torch.Tensor:
    """Absorbed attention. `q`: [H, t, C] absorbed. `q_pe`: [t, H, R]. `topk_indices`: [t, K] int64 sparse indices.

    Returns z [H, t, C] in `q`'s type.
    """
    heads, num_queries, latent = q.shape
    device = q.device
    chosen = config(chip_of(device), spec, q.dtype, topk_indices is not None)
    head_blocks = cdiv(heads, chosen.block_h)
    max_kv_len = queries.max_kv_len if topk_indices is None else min(queries.max_kv_len, topk)
    key_blocks = next_power_of_2(cdiv(max(1, max_kv_len), chosen.block_n))
    num_splits = split_count(num_queries, head_blocks, key_blocks, chip_of(device).num_sms * chosen.resident)
    out = torch.empty(heads, num_queries, latent, dtype=q.dtype, device=device)
    direct = num_splits == 1
    partial, lse = out, out
    if not direct:
        partial = torch.empty(num_queries, num_splits, heads, latent, dtype=torch.float32, device=device)
        lse = torch.empty(num_queries, num_splits, heads, dtype=torch.float32, device=device)
    c_pool, pe_pool, scales = pool_views(spec, pools)
    block_c, block_r = next_power_of_2(latent), next_power_of_2(spec.rope_dim)
    kernel, flags = attend_kernel, {
        "C": latent, "R": spec.rope_dim, "BLOCK_H": chosen.block_h, "BLOCK_N": chosen.block_n,
        "BLOCK_C": max(16, block_c), "BLOCK_R": max(16, block_r), "SWAP_AB": chosen.swap_ab,
    }  # fmt: skip
    if chosen.gluon:
        from allotrope.attention.mla import gluon_decode

        kernel, flags = gluon_decode.attend_kernel, {}
    kernel[(head_blocks, num_splits, num_queries)](
        q, q_pe, c_pool, pe_pool, scales, paged.table, queries.request, queries.kv_lens,
        queries.kv_lens if topk_indices is None else topk_indices, partial, lse, out,
        spec.scale, kv_scale, topk, num_splits,
        q.stride(1), q.stride(0), q_pe.stride(0), q_pe.stride(1),
        *c_pool.stride()[:2], *pe_pool.stride()[:2], *scales.stride()[:2], paged.table.stride(0),
        0 if topk_indices is None else topk_indices.stride(0), out.stride(1), out.stride(0),
        H=heads, PAGE=paged.page_size, SPARSE=topk_indices is not None, BLOCK_SCALED=spec.row_format == "scaled",
        DIRECT=direct, num_warps=chosen.warps, num_stages=chosen.stages, **flags,
    )  # fmt: skip
    if not direct:
        merge_kernel[(heads, num_queries)](
            partial, lse, queries.kv_lens, out, topk, num_splits, out.stride(1), out.stride(0),
            H=heads, C=latent, BLOCK_N=chosen.block_n, BLOCK_C=block_c, BLOCK_S=4, SPARSE=topk_indices is not None,
            num_warps=4,
        )  # fmt: skip
    return out


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes: few and many heads; fp32, bf16, FP8 and block-scaled FP8 caches; dense and sparse."""
    made = []
    # These spills were measured to cost less than smaller tiles.
    for name, heads, formats, sparse, stack in (
        ("16 heads bf16", 16, "bf16", False, 32),
        ("128 heads bf16", 128, "bf16", False, 0),
        ("128 heads fp8", 128, "fp8", False, 320),
        ("128 heads block-scaled sparse", 128, "scaled", True, 0),
        ("4 heads fp32", 4, "fp32", False, 0),
    ):
        made.append(_specialization(chip, name, heads, formats, sparse, stack if chip.has_wgmma else 0))
    strides = dict.fromkeys(("topk", "num_splits", "out_t", "out_h"), "i32")
    signature = {"partial": "*fp32", "lse": "*fp32", "kv_lens": "*i32", "out": "*bf16", **strides}
    constants = {"H": 128, "C": 512, "BLOCK_N": 64, "BLOCK_C": 512, "BLOCK_S": 4, "SPARSE": False}
    return [*made, Specialization("mla merge", merge_kernel, signature, constants, 4, 1)]


def _specialization(chip: Chip, name: str, heads: int, formats: str, sparse: bool, spills: int) -> Specialization:
    dtype = torch.float32 if formats == "fp32" else torch.bfloat16
    kv_dtype = {"fp8": torch.float8_e4m3fn, "scaled": torch.float8_e4m3fn}.get(formats, dtype)
    row_format = "scaled" if formats == "scaled" else "plain"
    spec = MlaSpec(
        num_heads=heads, latent_dim=512, rope_dim=64, nope_dim=128, v_head_dim=128, scale=0.07, kv_dtype=kv_dtype,
        row_format=row_format,
    )  # fmt: skip
    chosen = config(chip, spec, dtype, sparse)
    plain = "*fp32" if formats == "fp32" else "*bf16"
    pool = "*fp8e4nv" if kv_dtype == torch.float8_e4m3fn else plain
    signature = {
        "q": plain, "q_pe": plain, "c_pool": pool, "pe_pool": "*bf16" if formats == "scaled" else pool,
        "scales": "*fp32" if formats == "scaled" else pool, "table": "*i64", "request": "*i64", "kv_lens": "*i32",
        "topk_indices": "*i64" if sparse else "*i32", "partial": "*fp32", "lse": "*fp32", "out": plain,
        "scale": "fp32", "kv_scale": "fp32",
    }  # fmt: skip
    strides = ["q_t", "q_h", "pe_t", "pe_h", "c_page", "c_row", "pe_page", "pe_row", "scale_page", "scale_row"]
    signature |= dict.fromkeys(("topk", "num_splits", *strides, "table_b", "topk_t", "out_t", "out_h"), "i32")
    constants = {"H": heads, "PAGE": 16, "SPARSE": sparse, "BLOCK_SCALED": formats == "scaled", "DIRECT": False}
    kernel: Any = attend_kernel
    if chosen.gluon:
        from allotrope.attention.mla import gluon_decode

        # The accumulator of 64 heads fills the registers: values that are rarely used are spilled.
        kernel, spills = gluon_decode.attend_kernel, 208
    else:
        constants |= {
            "C": 512,
            "R": 64,
            "BLOCK_H": chosen.block_h,
            "BLOCK_N": chosen.block_n,
            "BLOCK_C": 512,
            "BLOCK_R": 64,
        }
        constants |= {"SWAP_AB": chosen.swap_ab}
    loose = ("topk", "num_splits", "scale", "kv_scale")
    signature = {argument: kind if argument in loose else f"{kind}:16" for argument, kind in signature.items()}
    return Specialization(f"mla decode {name}", kernel, signature, constants, chosen.warps, chosen.stages, spills)
