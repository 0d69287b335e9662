"""`rope_store` in one launch: the fused projection is read once, q is written contiguous, k and v go to their
pools.

A program owns some heads of one kind (q, k or v) of one token. Rows of the pools are addressed in 64 bits.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import clamped
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.qk_norm_rope.spec import HeadSpec, Rows
from allotrope.ops.rope import Rotation

_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _to_pool(x, scale, pool, FP8: tl.constexpr):
    """What a pool holds of `x`."""
    if FP8:
        x = clamped(x / scale, _FP8_MAX)
    return x.to(pool.dtype.element_ty)


@triton.jit
def _rotate(
    src, dst, mask_h, cos, sin, weight, floor, scale,
    DIM: tl.constexpr, ROTATED: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and write heads. `src`, `dst`: [BLOCK_H, 1] pointers to their starts; `mask_h`: heads to store.

    The sine carries the sign of its dim.
    """
    if ROTATED < DIM:
        _rotate_partial(
            src, dst, mask_h, cos, sin, weight, floor, scale,
            DIM, ROTATED, BLOCK_D, BLOCK_H, INTERLEAVED, NORM, FP8,
        )  # fmt: skip
    else:
        _rotate_full(
            src, dst, mask_h, cos, sin, weight, floor, scale, DIM, BLOCK_PAIRS, BLOCK_H, INTERLEAVED, NORM, FP8
        )  # fmt: skip


@triton.jit
def _rotate_full(
    src, dst, mask_h, cos, sin, weight, floor, scale,
    DIM: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_H: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """As `_rotate`; the pairs are held as two halves a and b."""
    dtype = src.dtype.element_ty
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    both = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
    paired = pair < DIM // 2
    if INTERLEAVED:
        x = tl.load(src + both, mask=mask_h & (both < DIM), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [BLOCK_H, BLOCK_PAIRS, 2]))
    else:
        a = tl.load(src + pair, mask=mask_h & paired, other=0.0).to(tl.float32)
        b = tl.load(src + DIM // 2 + pair, mask=mask_h & paired, other=0.0).to(tl.float32)
    # Which of a head's numbers are first and second of a pair.
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + DIM // 2
    if NORM:
        rstd = tl.rsqrt(floor + tl.sum(a * a + b * b, axis=1))[:, None]
        a *= rstd * tl.load(weight + first, mask=paired, other=0.0)
        b *= rstd * tl.load(weight + second, mask=paired, other=0.0)
    cosine = tl.load(cos + first, mask=paired, other=0.0).to(tl.float32)
    sine = tl.load(sin + first, mask=paired, other=0.0).to(tl.float32)
    rotated_a = _to_pool((a * cosine + b * sine).to(dtype).to(tl.float32), scale, dst, FP8)
    rotated_b = _to_pool((b * cosine - a * sine).to(dtype).to(tl.float32), scale, dst, FP8)
    if INTERLEAVED:
        interleaved = tl.reshape(tl.join(rotated_a, rotated_b), [BLOCK_H, 2 * BLOCK_PAIRS])
        tl.store(dst + both, interleaved, mask=mask_h & (both < DIM))
    else:
        tl.store(dst + pair, rotated_a, mask=mask_h & paired)
        tl.store(dst + DIM // 2 + pair, rotated_b, mask=mask_h & paired)


@triton.jit
def _rotate_partial(
    src, dst, mask_h, cos, sin, weight, floor, scale,
    DIM: tl.constexpr, ROTATED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """As `_rotate`; a head is one tile, and so are the partners of its numbers, read again where pairs lie apart:
    tiles of different widths would be exchanged through shared memory."""
    dtype = src.dtype.element_ty
    column = tl.arange(0, BLOCK_D)[None, :]
    mask_d = column < DIM
    x = tl.load(src + column, mask=mask_h & mask_d, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(floor + tl.sum(x * x, axis=1))[:, None]
        x *= rstd * tl.load(weight + column, mask=mask_d, other=0.0)
    if ROTATED > 0:
        is_rotated = column < ROTATED
        if INTERLEAVED:
            a, b = tl.split(tl.reshape(x, [BLOCK_H, BLOCK_D // 2, 2]))
            partner = tl.reshape(tl.join(b, a), [BLOCK_H, BLOCK_D])
        else:
            partner_column = tl.where(column < ROTATED // 2, column + ROTATED // 2, column - ROTATED // 2)
            if ROTATED % 16 == 0:
                # Runs of 8 stay runs.
                partner_column = tl.max_contiguous(tl.multiple_of(partner_column, [1, 8]), [1, 8])
            partner = tl.load(src + partner_column, mask=mask_h & is_rotated, other=0.0).to(tl.float32)
            if NORM:
                partner *= rstd * tl.load(weight + partner_column, mask=is_rotated, other=0.0)
        cosine = tl.load(cos + column, mask=is_rotated, other=1.0).to(tl.float32)
        sine = tl.load(sin + column, mask=is_rotated, other=0.0).to(tl.float32)
        x = x * cosine + partner * sine
    tl.store(dst + column, _to_pool(x.to(dtype).to(tl.float32), scale, dst, FP8), mask=mask_h & mask_d)


@pdl_jit
def rope_store_kernel(
    projected, cos, sin, q_weight, k_weight, slots, q, k_pool, v_pool,
    heads, kv_heads, q_blocks, kv_blocks, blocks, programs, v_start,
    row_stride, cos_stride, q_row, k_row, k_head, v_row, v_head,
    k_scale, v_scale, floor, v_floor, v_factor,
    DIM: tl.constexpr, ROTATED: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_D: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, V_NORM: tl.constexpr, FP8: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """`programs` programs share the `blocks` of heads of a token: those of q, then of k, then of v.

    Without `SLOTS`, row t of the pools is token t's. `floor`, `v_floor`: size * eps; `v_factor`: factor of the values,
    with sqrt(size) where they are normed.
    """
    gdc_wait()
    gdc_launch_dependents()
    program = tl.program_id(0)
    token, index = (program // programs).to(tl.int64), program % programs
    src = projected + token * row_stride
    head_offset = tl.arange(0, BLOCK_H)[:, None]
    cos += token * cos_stride
    sin += token * cos_stride
    row = tl.load(slots + token) if SLOTS else token
    is_stored = row >= 0
    row = tl.maximum(row, 0)
    for block in range(index, blocks, programs):
        if block < q_blocks:
            head = block * BLOCK_H + head_offset
            _rotate(src + head * DIM, q + token * q_row + head * DIM, head < heads, cos, sin, q_weight, floor, 1.0,
                  DIM, ROTATED, BLOCK_PAIRS, BLOCK_D, BLOCK_H, INTERLEAVED, NORM, False)  # fmt: skip
        elif block < q_blocks + kv_blocks:
            head = (block - q_blocks) * BLOCK_H + head_offset
            _rotate(src + (heads + head) * DIM, k_pool + row * k_row + head * k_head, (head < kv_heads) & is_stored,
                  cos, sin, k_weight, floor, k_scale,
                  DIM, ROTATED, BLOCK_PAIRS, BLOCK_D, BLOCK_H, INTERLEAVED, NORM, FP8)  # fmt: skip
        else:
            head = (block - q_blocks - kv_blocks) * BLOCK_H + head_offset
            column = tl.arange(0, BLOCK_V)[None, :]
            mask_d = (head < kv_heads) & is_stored & (column < V_DIM)
            v = tl.load(src + v_start + head * V_DIM + column, mask=mask_d, other=0.0).to(tl.float32)
            if V_NORM:
                v *= tl.rsqrt(tl.sum(v * v, axis=1)[:, None] + v_floor)
            v = (v * v_factor).to(projected.dtype.element_ty).to(tl.float32)
            tl.store(v_pool + row * v_row + head * v_head + column, _to_pool(v, v_scale, v_pool, FP8), mask=mask_d)


def config(chip: Chip, spec: HeadSpec, rotated: int) -> dict[str, int]:
    """About a thousand numbers at a time, a head within a warp where it fits. Heads that rotate partly take half of
    that in one warp: more warps would exchange their tiles through shared memory."""
    dim = next_power_of_2(max(spec.dim, spec.v_dim))
    max_heads = next_power_of_2(spec.heads)
    if rotated < spec.dim:
        return {"BLOCK_H": max(1, min(512 // dim, max_heads)), "num_warps": 1, "num_stages": 1}
    heads = max(1, min(1024 // dim, max_heads))
    warp_size = 64 if chip.vendor == "amd" else 32
    return {
        "BLOCK_H": heads,
        "num_warps": max(1, heads * dim // ((8 if dim <= 256 else 16) * warp_size)),
        "num_stages": 1,
    }


# Programs that keep a chip busy; where tokens alone are as many, one program takes all heads of its token.
_MIN_PROGRAMS = 4096


def rope_store(
    spec: HeadSpec,
    projected: torch.Tensor,
    rotation: Rotation | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    rows: Rows | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As `reference.rope_store`."""
    assert projected.stride(1) == 1 and projected.shape[1] >= spec.width
    tokens, heads, kv_heads = len(projected), spec.heads, spec.kv_heads
    q = projected.new_empty(tokens, heads, spec.dim)
    k = v = None
    # Without pools, as pools of one row a page.
    k_pool, v_pool = q[:, None], None
    if rows is not None:
        k_pool, v_pool = rows.k, rows.v
    elif kv_heads:
        k, v = projected.new_empty(tokens, kv_heads, spec.dim), projected.new_empty(tokens, kv_heads, spec.v_dim)
        k_pool, v_pool = k[:, None], v[:, None]
    if not tokens:
        return q, k, v
    if rows is not None:
        for pool in (k_pool, k_pool if v_pool is None else v_pool):
            assert pool.stride(3) == 1 and pool.stride(0) == pool.shape[1] * pool.stride(1)
    constants = _constants(spec, rotation)
    launch = config(chip_of(projected.device), spec, constants["ROTATED"])
    q_blocks, kv_blocks = cdiv(heads, launch["BLOCK_H"]), cdiv(kv_heads, launch["BLOCK_H"])
    v_blocks = 0 if v_pool is None else kv_blocks
    v_pool = k_pool if v_pool is None else v_pool
    v_factor = spec.value_scale * (math.sqrt(spec.v_dim) if spec.v_norm else 1.0)
    v_start = (heads if spec.values_from_keys else heads + kv_heads) * spec.dim
    cos, sin = (projected, projected) if rotation is None else (rotation.cos, rotation.sin)
    blocks = q_blocks + kv_blocks + v_blocks
    programs = min(blocks, cdiv(_MIN_PROGRAMS, tokens))
    rope_store_kernel[(tokens * programs,)](
        projected, cos, sin,
        projected if q_weight is None else q_weight, projected if k_weight is None else k_weight,
        projected if rows is None else rows.slots, q, k_pool, v_pool,
        heads, kv_heads, q_blocks, kv_blocks, blocks, programs, v_start,
        projected.stride(0), cos.stride(0), q.stride(0),
        k_pool.stride(1 if k is None else 0), k_pool.stride(2), v_pool.stride(1 if k is None else 0), v_pool.stride(2),
        1.0 if rows is None else rows.k_scale, 1.0 if rows is None else rows.v_scale,
        spec.dim * spec.eps, spec.v_dim * spec.eps, v_factor,
        FP8=k_pool.dtype == torch.float8_e4m3fn, SLOTS=rows is not None,
        **constants, **launch,
    )  # fmt: skip
    return q, k, v


def _constants(spec: HeadSpec, rotation: Rotation | None) -> dict[str, Any]:
    rotated = 0 if rotation is None else rotation.cos.shape[-1]
    return {
        "DIM": spec.dim,
        "ROTATED": rotated,
        "BLOCK_PAIRS": next_power_of_2(max(1, rotated // 2)),
        "BLOCK_D": next_power_of_2(spec.dim),
        "V_DIM": spec.v_dim,
        "BLOCK_V": next_power_of_2(spec.v_dim),
        "INTERLEAVED": rotation is not None and rotation.interleaved,
        "NORM": spec.qk_norm,
        "V_NORM": spec.v_norm,
    }


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released heads: plain, normed and half rotated, interleaved, and FP8 rows where the chip has the type."""
    listed = []
    plain = HeadSpec(heads=64, kv_heads=8, dim=128, v_dim=128, qk_norm=True)
    wide = HeadSpec(heads=16, kv_heads=2, dim=256, v_dim=256, qk_norm=True)
    for name, spec, kind, pool, rotated, interleaved in (
        ("rope store 128 normed", plain, "*bf16", "*bf16", 128, False),
        ("rope store 256 partial", wide, "*bf16", "*bf16", 64, False),
        ("rope store 128 interleaved", plain, "*fp16", "*fp16", 128, True),
        ("rope store 128 fp8", plain, "*bf16", "*fp8e4nv", 128, False),
    ):
        if pool == "*fp8e4nv" and chip.has_e4m3fnuz:
            continue
        table = torch.empty(1, 1, rotated)
        launch = config(chip, spec, rotated)
        signature = dict.fromkeys(("projected", "cos", "sin", "q"), kind) | dict.fromkeys(("k_pool", "v_pool"), pool)
        signature |= dict.fromkeys(("q_weight", "k_weight"), "*fp32") | {"slots": "*i64"}
        counts = "heads kv_heads q_blocks kv_blocks blocks programs v_start"
        strides = "row_stride cos_stride q_row k_row k_head v_row v_head"
        signature |= dict.fromkeys((*counts.split(), *strides.split()), "i32")
        signature |= dict.fromkeys("k_scale v_scale floor v_floor v_factor".split(), "fp32")
        constants = _constants(spec, Rotation(table, table, interleaved)) | {
            "BLOCK_H": launch["BLOCK_H"],
            "SLOTS": True,
        }
        constants["FP8"] = pool == "*fp8e4nv"
        listed.append(
            Specialization(name, rope_store_kernel, signature, constants, launch["num_warps"], launch["num_stages"])
        )
    return listed
