"""Latent attention of single queries, absorbed: all heads of a query read the same rows, split among programs.

Owns: the kernel that attends, the one that joins what splits found, and their launch. Must not know: how queries were
absorbed, who picked rows, how pages were filled.

How many splits a query has depends on how many queries there are, the bound of their lengths and the chip: equal for
an eager step and a captured one of the same sizes.
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
from allotrope.attention.mla.triton_rows import load_rows
from allotrope.attention.mla.triton_store import planes
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_least, higher_of, highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.softmax import LOG2E, LOWEST
from allotrope.kernels.split_kv import num_splits
from allotrope.kernels.tiles import cdiv, next_power_of_2

# Bytes of shared memory of a program with 16 heads and 16 keys of the largest rows.
_SMALL_TILES = 52 * 1024


@dataclass(frozen=True)
class Queries:
    """t queries that are attended with at once.

    `request`: [t] row of the page table. `seen`: [t] int32 rows that each sees, 0 for none. `bound`: of `seen`.
    """

    request: torch.Tensor
    seen: torch.Tensor
    bound: int


@dataclass(frozen=True)
class Config:
    """`heads`: of one program. `keys`: read in one step. `resident`: programs that one multiprocessor holds. `turned`:
    whether keys, and not heads, are the rows of products. `hopper`: whether `triton_hopper` has the kernel.
    """

    heads: int
    keys: int
    warps: int
    stages: int
    resident: int
    turned: bool = False
    hopper: bool = False


def config(chip: Chip, spec: MlaSpec, dtype: torch.dtype, picked: bool) -> Config:
    """Launch parameters. `dtype`: of the queries. `picked`: whether rows are picked one by one."""
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
    # Rows that are picked one by one are better fetched for heads that are not there than by fewer warps.
    if fits and (heads == 64 or picked):
        return Config(64, 128, 4, 1, 1, hopper=True)
    if heads == 64:
        return Config(64, 64, 8, 2, 1)
    return Config(heads, 64, 4 if heads == 16 else 8, 2, 2 if heads == 16 else 1)


@triton.jit
def _place(table, picks, start, end, many, KEYS: tl.constexpr, PAGE: tl.constexpr, PICKED: tl.constexpr):
    """Keys `start` and behind it, -1 for none, and their pages, -1 for none; one page where it holds them all."""
    key = start + tl.arange(0, KEYS)
    there = key < end
    if PICKED:
        picked = tl.load(picks + key, mask=there & many, other=-1).to(tl.int32)
        key = tl.where(many, picked, key)
        there = there & (key >= 0)
    key = tl.where(there, key, -1)
    if PICKED or PAGE % KEYS != 0:
        page = tl.load(table + key // PAGE, mask=there, other=-1).to(tl.int32)
    else:
        page = tl.load(table + start // PAGE, mask=start < end, other=-1).to(tl.int32)
    return key, page


@pdl_jit
def attend_kernel(
    q, q_pe, c_pool, pe_pool, factors, table, request, seen, picks, partial, lse, out,
    scale, kv_scale, topk, splits,
    q_t, q_h, pe_t, pe_h, c_page, c_row, pe_page, pe_row, f_page, f_row, table_b, picks_t, out_t, out_h,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    PICKED: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Some heads of one query over one split of its keys.

    TURNED, keys are the rows of every product and heads its columns: tensor cores want 64 rows, and few heads fill
    few of them.

    With PICKED the keys of a query that sees more than `topk` are `picks` [t, topk], -1 for none. With DIRECT (one
    split) the output is written, else the split's normalised result and base-2 log-sum-exp.
    """
    gdc_wait()
    gdc_launch_dependents()
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(1)
    query = tl.program_id(2).to(tl.int64)
    real = head < H
    channel, rope = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    in_c, in_r = channel < C, rope < R
    n = tl.load(seen + query)
    many = n > topk
    if PICKED:
        n = tl.minimum(n, topk)
    size = tl.cdiv(tl.cdiv(n, KEYS), splits) * KEYS
    begin = split * size
    end = tl.minimum(begin + size, n)
    if begin < end or DIRECT:
        table += tl.load(request + query).to(tl.int64) * table_b
        latent_q = tl.load(
            q + query * q_t + head[:, None] * q_h + channel[None, :], mask=real[:, None] & in_c[None, :], other=0.0
        )
        rope_q = tl.load(
            q_pe + query * pe_t + head[:, None] * pe_h + rope[None, :], mask=real[:, None] & in_r[None, :], other=0.0
        )
        top = tl.full([HEADS], LOWEST, tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        if TURNED:
            mixed = tl.zeros([BLOCK_C, HEADS], tl.float32)
        else:
            mixed = tl.zeros([HEADS, BLOCK_C], tl.float32)
        factor = scale * kv_scale * LOG2E
        picks += query * picks_t
        # Where rows lie is known a step before they are read.
        key, page = _place(table, picks, begin, end, many, KEYS, PAGE, PICKED)
        for start in range(begin, end, KEYS):
            next_key, next_page = _place(table, picks, start + KEYS, end, many, KEYS, PAGE, PICKED)
            if not PICKED:
                key = start + tl.arange(0, KEYS)
                key = tl.where(key < end, key, -1)
            there = key >= 0
            latent, tail = load_rows(
                c_pool, pe_pool, factors, page.to(tl.int64), key % PAGE, there & (page >= 0), c_page, c_row, pe_page,
                pe_row, f_page, f_row, latent_q.dtype, C, R, BLOCK_C, BLOCK_R, KEYS, SCALED,
            )  # fmt: skip
            if TURNED:
                logits = tl.dot(latent, tl.trans(latent_q), input_precision="ieee")
                logits = tl.dot(tail, tl.trans(rope_q), logits, input_precision="ieee")
                logits = tl.where(there[:, None], logits * factor, float("-inf"))
                higher = higher_of(top, highest(logits, 0))
                weights = tl.exp2(logits - higher[None, :])
                fade = tl.exp2(top - higher)
                total = total * fade + tl.sum(weights, 0)
                mixed = mixed * fade[None, :]
                mixed = tl.dot(tl.trans(latent), weights.to(latent.dtype), mixed, input_precision="ieee")
            else:
                logits = tl.dot(latent_q, tl.trans(latent), input_precision="ieee")
                logits = tl.dot(rope_q, tl.trans(tail), logits, input_precision="ieee")
                logits = tl.where(there[None, :], logits * factor, float("-inf"))
                higher = higher_of(top, highest(logits, 1))
                weights = tl.exp2(logits - higher[:, None])
                fade = tl.exp2(top - higher)
                total = total * fade + tl.sum(weights, 1)
                mixed = mixed * fade[:, None]
                mixed = tl.dot(weights.to(latent.dtype), latent, mixed, input_precision="ieee")
            top = higher
            key, page = next_key, next_page
        # The largest logit of a row adds 1, so the bound touches only queries that see nothing.
        if TURNED:
            mixed = tl.trans(mixed)
        mixed = mixed * (kv_scale / at_least(total, 1.0))[:, None]
        kept = real[:, None] & in_c[None, :]
        if DIRECT:
            to = out + query * out_t + head[:, None] * out_h + channel[None, :]
            tl.store(to, mixed.to(out.dtype.element_ty), mask=kept)
        else:
            place = (query * splits + split) * H + head
            tl.store(partial + place[:, None] * C + channel[None, :], mixed, mask=kept)
            # A split whose picks are all -1 has found nothing, and weighs nothing.
            found = tl.where(total == 0.0, LOWEST, top + tl.log2(at_least(total, 1.0)))
            tl.store(lse + place, found, mask=real)


@pdl_jit
def join_kernel(
    partial, lse, seen, out, topk, splits, out_t, out_h,
    H: tl.constexpr, C: tl.constexpr, KEYS: tl.constexpr, BLOCK_C: tl.constexpr, STEP: tl.constexpr,
    PICKED: tl.constexpr,
):  # fmt: skip
    """One head of one query: the splits that have keys, weighed by their log-sum-exp; zero where none has."""
    gdc_wait()
    gdc_launch_dependents()
    head = tl.program_id(0)
    query = tl.program_id(1).to(tl.int64)
    n = tl.load(seen + query)
    if PICKED:
        n = tl.minimum(n, topk)
    size = tl.cdiv(tl.cdiv(n, KEYS), splits) * KEYS
    used = tl.cdiv(n, tl.maximum(size, 1))
    channel = tl.arange(0, BLOCK_C)
    in_c = channel < C
    top = LOWEST
    total = 0.0
    mixed = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, used, STEP):
        split = first + tl.arange(0, STEP)
        place = (query * splits + split) * H + head
        found = tl.load(lse + place, mask=split < used, other=LOWEST)
        higher = higher_of(top, highest(found, 0))
        weight = tl.where(found == LOWEST, 0.0, tl.exp2(found - higher))
        part = tl.load(
            partial + place[:, None] * C + channel[None, :], mask=(split < used)[:, None] & in_c[None, :], other=0.0
        )
        fade = tl.exp2(top - higher)
        mixed = mixed * fade + tl.sum(part * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        top = higher
    mixed = mixed / at_least(total, 1.0e-30)
    tl.store(out + query * out_t + head * out_h + channel, mixed.to(out.dtype.element_ty), mask=in_c)


def split_count(queries: int, groups: int, steps: int, slots: int) -> int:
    """Splits of each query: the fewest that keep the chip's `slots` programs about as busy as any number would.

    `groups`: programs of one split of a query. `steps`: of the longest query.
    """
    most = min(64, max(1, steps // 4), max(1, 2 * slots // max(1, queries * groups)))
    return num_splits(queries * groups, steps, slots, most, start=2.0, merge=4.0, per_split=0.25)


def attend(
    spec: MlaSpec,
    pools: Mapping[str, torch.Tensor],
    paged: PageIndex,
    queries: Queries,
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv_scale: float,
    picks: torch.Tensor | None = None,
    topk: int = 0,
) -> torch.Tensor:
    """Attention in the latent. `q`: [H, t, C] absorbed. `q_pe`: [t, H, R]. `picks`: [t, K] int64.

    Returns z [H, t, C] in `q`'s type.
    """
    heads, count, latent = q.shape
    device = q.device
    chosen = config(chip_of(device), spec, q.dtype, picks is not None)
    groups = cdiv(heads, chosen.heads)
    bound = queries.bound if picks is None else min(queries.bound, topk)
    steps = next_power_of_2(cdiv(max(1, bound), chosen.keys))
    splits = split_count(count, groups, steps, chip_of(device).num_sms * chosen.resident)
    out = torch.empty(heads, count, latent, dtype=q.dtype, device=device)
    direct = splits == 1
    partial, lse = out, out
    if not direct:
        partial = torch.empty(count, splits, heads, latent, dtype=torch.float32, device=device)
        lse = torch.empty(count, splits, heads, dtype=torch.float32, device=device)
    c_pool, pe_pool, factors = planes(spec, pools)
    block_c, block_r = next_power_of_2(latent), next_power_of_2(spec.rope_dim)
    kernel, flags = attend_kernel, {
        "C": latent, "R": spec.rope_dim, "HEADS": chosen.heads, "KEYS": chosen.keys, "BLOCK_C": max(16, block_c),
        "BLOCK_R": max(16, block_r), "TURNED": chosen.turned,
    }  # fmt: skip
    if chosen.hopper:
        from allotrope.attention.mla import triton_hopper

        kernel, flags = triton_hopper.attend_kernel, {}
    kernel[(groups, splits, count)](
        q, q_pe, c_pool, pe_pool, factors, paged.table, queries.request, queries.seen,
        queries.seen if picks is None else picks, partial, lse, out,
        spec.scale, kv_scale, topk, splits,
        q.stride(1), q.stride(0), q_pe.stride(0), q_pe.stride(1),
        *c_pool.stride()[:2], *pe_pool.stride()[:2], *factors.stride()[:2], paged.table.stride(0),
        0 if picks is None else picks.stride(0), out.stride(1), out.stride(0),
        H=heads, PAGE=paged.page_size, PICKED=picks is not None, SCALED=spec.row_format == "scaled", DIRECT=direct,
        num_warps=chosen.warps, num_stages=chosen.stages, **flags,
    )  # fmt: skip
    if not direct:
        join_kernel[(heads, count)](
            partial, lse, queries.seen, out, topk, splits, out.stride(1), out.stride(0),
            H=heads, C=latent, KEYS=chosen.keys, BLOCK_C=block_c, STEP=4, PICKED=picks is not None, num_warps=4,
        )  # fmt: skip
    return out


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes: few and many heads, bf16, FP8 and scaled rows, all rows and picked ones, and fp32."""
    made = []
    # What goes to the stack was measured to cost less than smaller tiles.
    for name, heads, kinds, picked, stack in (
        ("16 heads bf16", 16, "bf16", False, 32),
        ("128 heads bf16", 128, "bf16", False, 0),
        ("128 heads fp8", 128, "fp8", False, 320),
        ("128 heads scaled picked", 128, "scaled", True, 0),
        ("4 heads fp32", 4, "fp32", False, 0),
    ):
        made.append(_variant(chip, name, heads, kinds, picked, stack if chip.has_wgmma else 0))
    strides = dict.fromkeys(("topk", "splits", "out_t", "out_h"), "i32")
    signature = {"partial": "*fp32", "lse": "*fp32", "seen": "*i32", "out": "*bf16", **strides}
    constants = {"H": 128, "C": 512, "KEYS": 64, "BLOCK_C": 512, "STEP": 4, "PICKED": False}
    return [*made, Specialization("mla join", join_kernel, signature, constants, 4, 1)]


def _variant(chip: Chip, name: str, heads: int, kinds: str, picked: bool, spills: int) -> Specialization:
    dtype = torch.float32 if kinds == "fp32" else torch.bfloat16
    kv_dtype = {"fp8": torch.float8_e4m3fn, "scaled": torch.float8_e4m3fn}.get(kinds, dtype)
    row_format = "scaled" if kinds == "scaled" else "plain"
    spec = MlaSpec(
        num_heads=heads, latent_dim=512, rope_dim=64, nope_dim=128, v_head_dim=128, scale=0.07, kv_dtype=kv_dtype,
        row_format=row_format,
    )  # fmt: skip
    chosen = config(chip, spec, dtype, picked)
    plain = "*fp32" if kinds == "fp32" else "*bf16"
    pool = "*fp8e4nv" if kv_dtype == torch.float8_e4m3fn else plain
    signature = {
        "q": plain, "q_pe": plain, "c_pool": pool, "pe_pool": "*bf16" if kinds == "scaled" else pool,
        "factors": "*fp32" if kinds == "scaled" else pool, "table": "*i64", "request": "*i64", "seen": "*i32",
        "picks": "*i64" if picked else "*i32", "partial": "*fp32", "lse": "*fp32", "out": plain,
        "scale": "fp32", "kv_scale": "fp32",
    }  # fmt: skip
    strides = ["q_t", "q_h", "pe_t", "pe_h", "c_page", "c_row", "pe_page", "pe_row", "f_page", "f_row"]
    signature |= dict.fromkeys(("topk", "splits", *strides, "table_b", "picks_t", "out_t", "out_h"), "i32")
    constants = {"H": heads, "PAGE": 16, "PICKED": picked, "SCALED": kinds == "scaled", "DIRECT": False}
    kernel: Any = attend_kernel
    if chosen.hopper:
        from allotrope.attention.mla import triton_hopper

        # Sums of 64 heads leave no register free: what is needed once in a while waits in memory.
        kernel, spills = triton_hopper.attend_kernel, 208
    else:
        constants |= {"C": 512, "R": 64, "HEADS": chosen.heads, "KEYS": chosen.keys, "BLOCK_C": 512, "BLOCK_R": 64}
        constants |= {"TURNED": chosen.turned}
    loose = ("topk", "splits", "scale", "kv_scale")
    signature = {argument: kind if argument in loose else f"{kind}:16" for argument, kind in signature.items()}
    return Specialization(f"mla decode {name}", kernel, signature, constants, chosen.warps, chosen.stages, spills)
