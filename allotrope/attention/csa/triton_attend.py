"""Attention of each query over lists of cache slots: those of the sliding window, then those of the entries.

A program owns BLOCK_H heads of one query and one KV split of its lists. All its heads share the cached vectors, each of
which is key and value and is loaded once. The program adds the sink and the inverse rotation, unless the lists are
split: then `combine_kernel` merges the splits and adds both. FP8 is dequantized after the load.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from allotrope.attention.csa.rows import BLOCK
from allotrope.attention.csa.triton_store import BLOCK_SCALED, apply_rope, pair_angles
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import higher_of, highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.softmax import LOG2E
from allotrope.kernels.tiles import next_power_of_2

_SCALE_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _load_kv(
    values, rope_part, scales, slot, value_row, rope_row, scale_row, dtype,
    D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Dequantized vectors [BLOCK_N, BLOCK_D] at `slot` [BLOCK_N]; 0 for -1. Per-tensor FP8 is not scaled here."""
    valid = slot >= 0
    slot = tl.where(valid, slot, 0).to(tl.int64)
    if FORMAT == BLOCK_SCALED:
        nope_dim: tl.constexpr = D - R
        num_groups: tl.constexpr = BLOCK_D // _SCALE_BLOCK
        offs_g, offs_d = tl.arange(0, num_groups), tl.arange(0, _SCALE_BLOCK)
        mask_g = valid[:, None] & (offs_g < nope_dim // _SCALE_BLOCK)[None, :]
        at = (slot * value_row)[:, None, None] + (offs_g * _SCALE_BLOCK)[None, :, None] + offs_d[None, None, :]
        x = tl.load(values + at, mask=mask_g[:, :, None], other=0.0)
        exponent = tl.load(scales + (slot * scale_row)[:, None] + offs_g[None, :], mask=mask_g, other=0)
        scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        # The product with a power of two is exact in every type but fp16, whose range the reference assumes as well.
        x = (x.to(tl.float32) * scale[:, :, None]).to(dtype)
        at = (slot * rope_row)[:, None] + nope_dim // 2 + offs_d[None, :]
        rope = tl.load(rope_part + at, mask=valid[:, None] & (offs_d < R)[None, :], other=0.0).to(dtype)
        x = tl.where((offs_g == nope_dim // _SCALE_BLOCK)[None, :, None], rope[:, None, :], x)
        x = tl.reshape(x, [BLOCK_N, BLOCK_D])
    else:
        offs_d = tl.arange(0, BLOCK_D)
        at = values + (slot * value_row)[:, None] + offs_d[None, :]
        if D == BLOCK_D:
            x = tl.load(at, mask=valid[:, None], other=0.0)
        else:
            x = tl.load(at, mask=valid[:, None] & (offs_d < D)[None, :], other=0.0)
        x = x.to(dtype)
    return x


@triton.jit
def _online_softmax(q, k, valid, m_i, l_i, acc, scale, PRECISION: tl.constexpr):
    """One step of online softmax for queries `q` [h, D] and a tile `k` [n, D]. `scale`: of the logits, in base 2."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    logits = tl.where(valid[None, :], logits, float("-inf"))
    m_new = higher_of(m_i, highest(logits, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(logits - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    acc = tl.dot(p.to(k.dtype), k, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l_i, acc


@pdl_jit
def attend_kernel(
    q, out, partial, lse, sinks, cos, sin, window_list, window_lens, entry_list, entry_lens,
    w_values, w_rope, w_scales, wc_row, wt_row, wf_row, e_values, e_rope, e_scales, ec_row, et_row, ef_row,
    window_row, entry_row, scale, cache_scale,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, FORMAT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`q`: [T, H, D], rotated. `window_list`, `entry_list`: [T, .] int32 slots, -1 for none, of which the first
    `window_lens` and `entry_lens` [T] are valid. `cache_scale`: of a per-tensor FP8 cache.
    """
    gdc_wait()
    gdc_launch_dependents()
    token, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    window_len, entry_len = tl.load(window_lens + token), tl.load(entry_lens + token)
    window_tiles = tl.cdiv(window_len, BLOCK_N)
    tiles = window_tiles + tl.cdiv(entry_len, BLOCK_N)
    split_tiles = tl.cdiv(tiles, NUM_SPLITS)
    begin = split * split_tiles
    end = min(begin + split_tiles, tiles)
    head, offs_d, offs_n = block * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    mask_h = head < H
    mask_hd = mask_h[:, None] & (offs_d < D)[None, :]
    dtype = q.dtype.element_ty
    # Used as it is loaded, the tile stays in shared memory, where the products read it.
    q_tile = tl.load(q + (token.to(tl.int64) * H + head)[:, None] * D + offs_d[None, :], mask=mask_hd, other=0.0)
    qk_scale = scale * cache_scale * LOG2E
    m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    list_ptr = window_list + token.to(tl.int64) * window_row
    for tile in tl.range(begin, min(end, window_tiles), num_stages=STAGES):
        index = tile * BLOCK_N + offs_n
        slot = tl.load(list_ptr + index, mask=index < window_len, other=-1)
        k = _load_kv(w_values, w_rope, w_scales, slot, wc_row, wt_row, wf_row, dtype, D, R, BLOCK_D, BLOCK_N, FORMAT)
        m_i, l_i, acc = _online_softmax(q_tile, k, slot >= 0, m_i, l_i, acc, qk_scale, PRECISION)
    list_ptr = entry_list + token.to(tl.int64) * entry_row
    for tile in tl.range(max(begin - window_tiles, 0), end - window_tiles, num_stages=STAGES):
        index = tile * BLOCK_N + offs_n
        slot = tl.load(list_ptr + index, mask=index < entry_len, other=-1)
        k = _load_kv(e_values, e_rope, e_scales, slot, ec_row, et_row, ef_row, dtype, D, R, BLOCK_D, BLOCK_N, FORMAT)
        m_i, l_i, acc = _online_softmax(q_tile, k, slot >= 0, m_i, l_i, acc, qk_scale, PRECISION)
    if NUM_SPLITS > 1:
        # A split is stored normalized, so that it fits into fp16; an empty one is not stored.
        lse_offset = (token.to(tl.int64) * NUM_SPLITS + split) * H + head
        split_out = acc * (1.0 / tl.where(l_i > 0, l_i, 1.0))[:, None]
        mask = mask_hd & (begin < end)
        tl.store(partial + lse_offset[:, None] * D + offs_d[None, :], split_out.to(partial.dtype.element_ty), mask=mask)
        is_empty = l_i == 0
        tl.store(
            lse + lse_offset,
            tl.where(is_empty, float("-inf"), m_i + tl.log2(tl.where(is_empty, 1.0, l_i))),
            mask=mask_h,
        )
    else:
        sink = tl.load(sinks + head, mask=mask_h, other=float("-inf")).to(tl.float32) * LOG2E
        m_new = higher_of(m_i, sink)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_safe)
        denominator = l_i * alpha + tl.exp2(sink - m_safe)
        o = acc * (cache_scale * alpha / tl.where(denominator > 0, denominator, 1.0))[:, None]
        c, s = pair_angles(cos, sin, token, D, R, BLOCK_D)
        o = apply_rope(o, c, -s, BLOCK_H, BLOCK_D)
        out_ptrs = out + (token.to(tl.int64) * H + head)[:, None] * D + offs_d[None, :]
        tl.store(out_ptrs, o.to(dtype), mask=mask_hd)


@pdl_jit
def combine_kernel(
    partial, lse, sinks, cos, sin, out, cache_scale,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of BLOCK_H heads of one query."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0)
    head, offs_d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask_h = head < H
    mask_hd = mask_h[:, None] & (offs_d < D)[None, :]
    sink = tl.load(sinks + head, mask=mask_h, other=float("-inf")).to(tl.float32) * LOG2E
    m_i = sink
    for split in tl.static_range(NUM_SPLITS):
        lse_offset = (token.to(tl.int64) * NUM_SPLITS + split) * H + head
        m_i = higher_of(m_i, tl.load(lse + lse_offset, mask=mask_h, other=float("-inf")))
    m_safe = tl.where(m_i == float("-inf"), 0.0, m_i)
    denominator = tl.exp2(sink - m_safe)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        lse_offset = (token.to(tl.int64) * NUM_SPLITS + split) * H + head
        split_weight = tl.exp2(tl.load(lse + lse_offset, mask=mask_h, other=float("-inf")) - m_safe)
        mask = mask_hd & (split_weight > 0)[:, None]
        split_out = tl.load(partial + lse_offset[:, None] * D + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
        acc += split_weight[:, None] * split_out
        denominator += split_weight
    c, s = pair_angles(cos, sin, token, D, R, BLOCK_D)
    o = apply_rope(acc * (cache_scale / tl.where(denominator > 0, denominator, 1.0))[:, None], c, -s, BLOCK_H, BLOCK_D)
    out_ptrs = out + (token.to(tl.int64) * H + head)[:, None] * D + offs_d[None, :]
    tl.store(out_ptrs, o.to(out.dtype.element_ty), mask=mask_hd)


def config(chip: Chip, dim: int, heads: int, is_fp32: bool, plain: bool) -> dict[str, int]:
    """Launch parameters. `is_fp32`: cache and queries are fp32. `plain`: the cache needs no dequantization, so that the
    next tile is loaded meanwhile."""
    block_h = max(16, next_power_of_2(heads))
    if chip.vendor == "cpu":
        return {"BLOCK_H": min(block_h, 16), "BLOCK_N": 16, "STAGES": 1, "num_warps": 4}
    if not chip.has_wgmma:
        return {"BLOCK_H": 16, "BLOCK_N": 16, "STAGES": 1, "num_warps": 4}
    if is_fp32:
        return {"BLOCK_H": 16, "BLOCK_N": 16, "STAGES": 1, "num_warps": 4}
    block_h = min(block_h, 64)
    return {"BLOCK_H": block_h, "BLOCK_N": 64, "STAGES": 2 if plain else 1, "num_warps": 8 if block_h == 64 else 4}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """64 heads of 512, on each cache format, with KV splits; fp32 as `verify` runs it."""
    made = []
    for name, kind, row, plain in (
        ("bf16", "*bf16:16", ("*bf16:16",) * 3, True),
        ("fp8", "*bf16:16", ("*fp8e4nv:16",) * 3, False),
        ("scaled", "*bf16:16", ("*fp8e4nv:16", "*bf16:16", "*u8:16"), False),
        ("fp32", "*fp32:16", ("*fp32:16",) * 3, True),
    ):
        launch = config(chip, 512, 64, name == "fp32", plain)
        warps = launch.pop("num_warps")
        signature = dict.fromkeys(("q", "out"), kind) | {"partial": "*fp16:16"}
        signature |= dict.fromkeys(("lse", "sinks", "cos", "sin"), "*fp32:16")
        signature |= dict.fromkeys(("window_list", "window_lens", "entry_list", "entry_lens"), "*i32:16")
        for pool in ("w", "e"):
            signature |= dict(zip((f"{pool}_values", f"{pool}_rope", f"{pool}_scales"), row, strict=True))
            signature |= dict.fromkeys((f"{pool}{part}_row" for part in "ctf"), "i32:16")
        signature |= dict.fromkeys(("window_row", "entry_row"), "i32:16")
        signature |= dict.fromkeys(("scale", "cache_scale"), "fp32")
        precision = "tf32x3" if name == "fp32" and chip.has_tf32 else "ieee"
        constants = {"H": 64, "D": 512, "R": 64, "BLOCK_D": 512, "NUM_SPLITS": 2, "PRECISION": precision}
        constants |= {"FORMAT": {"fp8": 1, "scaled": 2}.get(name, 0)}
        # The fp32 kernel only serves proofs, and its speed does not matter.
        spills = {"bf16": 256, "fp8": 1200, "scaled": 1200, "fp32": 6400}[name]
        made.append(
            Specialization(f"csa attend {name}", attend_kernel, signature, constants | launch, warps, 3, spills)
        )
    signature = {"partial": "*fp16:16", "out": "*bf16:16", "cache_scale": "fp32"}
    signature |= dict.fromkeys(("lse", "sinks", "cos", "sin"), "*fp32:16")
    constants = {"H": 64, "D": 512, "R": 64, "BLOCK_H": 8, "BLOCK_D": 512, "NUM_SPLITS": 2}
    return [*made, Specialization("csa combine", combine_kernel, signature, constants, 4, 3)]
