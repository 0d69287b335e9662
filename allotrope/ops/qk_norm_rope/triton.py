"""`rope_store` in one launch: the fused projection is read once, q is written contiguous, k and v to their pools.

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
from allotrope.ops.qk_norm_rope.reference import HeadSpec, Rows
from allotrope.ops.rope.reference import Rotation

_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _stored(x, scale, pool, FP8: tl.constexpr):
    """What a pool holds of `x`."""
    if FP8:
        x = clamped(x / scale, _FP8_MAX)
    return x.to(pool.dtype.element_ty)


@triton.jit
def _turn(
    source, place, inside, cos, sin, factors, floor, scale,
    DIM: tl.constexpr, ROTATED: tl.constexpr, HALF: tl.constexpr, WHOLE: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and write heads. `source`, `place`: [HEADS, 1] pointers to their starts; `inside`: to be written.

    The table's sine carries the sign of its place.
    """
    if ROTATED < DIM:
        _turn_partly(
            source, place, inside, cos, sin, factors, floor, scale,
            DIM, ROTATED, WHOLE, HEADS, INTERLEAVED, NORM, FP8,
        )  # fmt: skip
    else:
        _turn_whole(
            source, place, inside, cos, sin, factors, floor, scale, DIM, HALF, HEADS, INTERLEAVED, NORM, FP8
        )  # fmt: skip


@triton.jit
def _turn_whole(
    source, place, inside, cos, sin, factors, floor, scale,
    DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """As `_turn`; the pairs are held as two halves a and b."""
    dtype = source.dtype.element_ty
    pair = tl.arange(0, HALF)[None, :]
    both = tl.arange(0, 2 * HALF)[None, :]
    paired = pair < DIM // 2
    if INTERLEAVED:
        whole = tl.load(source + both, mask=inside & (both < DIM), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(whole, [HEADS, HALF, 2]))
    else:
        a = tl.load(source + pair, mask=inside & paired, other=0.0).to(tl.float32)
        b = tl.load(source + DIM // 2 + pair, mask=inside & paired, other=0.0).to(tl.float32)
    # Which of a head's numbers are first and second of a pair.
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + DIM // 2
    if NORM:
        root = tl.rsqrt(floor + tl.sum(a * a + b * b, axis=1))[:, None]
        a *= root * tl.load(factors + first, mask=paired, other=0.0)
        b *= root * tl.load(factors + second, mask=paired, other=0.0)
    cosine = tl.load(cos + first, mask=paired, other=0.0).to(tl.float32)
    sine = tl.load(sin + first, mask=paired, other=0.0).to(tl.float32)
    turned_a = _stored((a * cosine + b * sine).to(dtype).to(tl.float32), scale, place, FP8)
    turned_b = _stored((b * cosine - a * sine).to(dtype).to(tl.float32), scale, place, FP8)
    if INTERLEAVED:
        joined = tl.reshape(tl.join(turned_a, turned_b), [HEADS, 2 * HALF])
        tl.store(place + both, joined, mask=inside & (both < DIM))
    else:
        tl.store(place + pair, turned_a, mask=inside & paired)
        tl.store(place + DIM // 2 + pair, turned_b, mask=inside & paired)


@triton.jit
def _turn_partly(
    source, place, inside, cos, sin, factors, floor, scale,
    DIM: tl.constexpr, ROTATED: tl.constexpr, WHOLE: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """As `_turn`; a head is one tile, and so are the other numbers of its pairs, read again where they lie apart:
    tiles of other widths would meet in shared memory."""
    dtype = source.dtype.element_ty
    column = tl.arange(0, WHOLE)[None, :]
    there = column < DIM
    x = tl.load(source + column, mask=inside & there, other=0.0).to(tl.float32)
    if NORM:
        root = tl.rsqrt(floor + tl.sum(x * x, axis=1))[:, None]
        x *= root * tl.load(factors + column, mask=there, other=0.0)
    if ROTATED > 0:
        turning = column < ROTATED
        if INTERLEAVED:
            a, b = tl.split(tl.reshape(x, [HEADS, WHOLE // 2, 2]))
            other = tl.reshape(tl.join(b, a), [HEADS, WHOLE])
        else:
            partner = tl.where(column < ROTATED // 2, column + ROTATED // 2, column - ROTATED // 2)
            if ROTATED % 16 == 0:
                # Runs of 8 stay runs.
                partner = tl.max_contiguous(tl.multiple_of(partner, [1, 8]), [1, 8])
            other = tl.load(source + partner, mask=inside & turning, other=0.0).to(tl.float32)
            if NORM:
                other *= root * tl.load(factors + partner, mask=turning, other=0.0)
        cosine = tl.load(cos + column, mask=turning, other=1.0).to(tl.float32)
        sine = tl.load(sin + column, mask=turning, other=0.0).to(tl.float32)
        x = x * cosine + other * sine
    tl.store(place + column, _stored(x.to(dtype).to(tl.float32), scale, place, FP8), mask=inside & there)


@pdl_jit
def rope_store_kernel(
    projected, cos, sin, q_factors, k_factors, slots, q, k_pool, v_pool,
    heads, kv_heads, q_blocks, kv_blocks, blocks, parts, v_start,
    row_stride, cos_stride, q_row, k_row, k_head, v_row, v_head,
    k_scale, v_scale, floor, v_floor, v_unit,
    DIM: tl.constexpr, ROTATED: tl.constexpr, HALF: tl.constexpr, WHOLE: tl.constexpr,
    V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, V_NORM: tl.constexpr, FP8: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """`parts` programs share a token's `blocks` of heads: those of q, then of k, then of v.

    Without `SLOTS`, row t of the pools is token t's. `floor`, `v_floor`: size * eps; `v_unit`: factor of the values,
    with sqrt(size) where they are normed.
    """
    gdc_wait()
    gdc_launch_dependents()
    program = tl.program_id(0)
    token, part = (program // parts).to(tl.int64), program % parts
    source = projected + token * row_stride
    lane = tl.arange(0, HEADS)[:, None]
    cos += token * cos_stride
    sin += token * cos_stride
    row = tl.load(slots + token) if SLOTS else token
    written = row >= 0
    row = tl.maximum(row, 0)
    for block in range(part, blocks, parts):
        if block < q_blocks:
            head = block * HEADS + lane
            _turn(source + head * DIM, q + token * q_row + head * DIM, head < heads, cos, sin, q_factors, floor, 1.0,
                  DIM, ROTATED, HALF, WHOLE, HEADS, INTERLEAVED, NORM, False)  # fmt: skip
        elif block < q_blocks + kv_blocks:
            head = (block - q_blocks) * HEADS + lane
            _turn(source + (heads + head) * DIM, k_pool + row * k_row + head * k_head, (head < kv_heads) & written,
                  cos, sin, k_factors, floor, k_scale,
                  DIM, ROTATED, HALF, WHOLE, HEADS, INTERLEAVED, NORM, FP8)  # fmt: skip
        else:
            head = (block - q_blocks - kv_blocks) * HEADS + lane
            column = tl.arange(0, V_BLOCK)[None, :]
            there = (head < kv_heads) & written & (column < V_DIM)
            v = tl.load(source + v_start + head * V_DIM + column, mask=there, other=0.0).to(tl.float32)
            if V_NORM:
                v *= tl.rsqrt(tl.sum(v * v, axis=1)[:, None] + v_floor)
            v = (v * v_unit).to(projected.dtype.element_ty).to(tl.float32)
            tl.store(v_pool + row * v_row + head * v_head + column, _stored(v, v_scale, v_pool, FP8), mask=there)


def config(chip: Chip, spec: HeadSpec, rotated: int) -> dict[str, int]:
    """About a thousand numbers at a time, a head within a wave where it fits. Of heads that turn partly, half of that
    in one wave: tiles that meet in more waves would be exchanged through shared memory."""
    dim = next_power_of_2(max(spec.dim, spec.v_dim))
    most = next_power_of_2(spec.heads)
    if rotated < spec.dim:
        return {"HEADS": max(1, min(512 // dim, most)), "num_warps": 1, "num_stages": 1}
    heads = max(1, min(1024 // dim, most))
    wave = 64 if chip.vendor == "amd" else 32
    return {"HEADS": heads, "num_warps": max(1, heads * dim // ((8 if dim <= 256 else 16) * wave)), "num_stages": 1}


# Programs that keep a chip busy; where tokens alone are as many, one program takes all heads of its token.
_PROGRAMS = 4096


def rope_store(
    spec: HeadSpec,
    projected: torch.Tensor,
    rotation: Rotation | None,
    q_factors: torch.Tensor | None,
    k_factors: torch.Tensor | None,
    rows: Rows | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As `allotrope.ops.qk_norm_rope.reference.rope_store`."""
    assert projected.stride(1) == 1 and projected.shape[1] >= spec.width
    tokens, heads, groups = len(projected), spec.heads, spec.kv_heads
    q = projected.new_empty(tokens, heads, spec.dim)
    k = v = None
    # Without pools, as pools of one row a page.
    k_pool, v_pool = q[:, None], None
    if rows is not None:
        k_pool, v_pool = rows.k, rows.v
    elif groups:
        k, v = projected.new_empty(tokens, groups, spec.dim), projected.new_empty(tokens, groups, spec.v_dim)
        k_pool, v_pool = k[:, None], v[:, None]
    if not tokens:
        return q, k, v
    if rows is not None:
        for pool in (k_pool, k_pool if v_pool is None else v_pool):
            assert pool.stride(3) == 1 and pool.stride(0) == pool.shape[1] * pool.stride(1)
    constants = _constants(spec, rotation)
    launch = config(chip_of(projected.device), spec, constants["ROTATED"])
    q_blocks, kv_blocks = cdiv(heads, launch["HEADS"]), cdiv(groups, launch["HEADS"])
    v_blocks = 0 if v_pool is None else kv_blocks
    v_pool = k_pool if v_pool is None else v_pool
    v_unit = spec.value_scale * (math.sqrt(spec.v_dim) if spec.v_norm else 1.0)
    v_start = (heads if spec.values_from_keys else heads + groups) * spec.dim
    cos, sin = (projected, projected) if rotation is None else (rotation.cos, rotation.sin)
    blocks = q_blocks + kv_blocks + v_blocks
    parts = min(blocks, cdiv(_PROGRAMS, tokens))
    rope_store_kernel[(tokens * parts,)](
        projected, cos, sin,
        projected if q_factors is None else q_factors, projected if k_factors is None else k_factors,
        projected if rows is None else rows.slots, q, k_pool, v_pool,
        heads, groups, q_blocks, kv_blocks, blocks, parts, v_start,
        projected.stride(0), cos.stride(0), q.stride(0),
        k_pool.stride(1 if k is None else 0), k_pool.stride(2), v_pool.stride(1 if k is None else 0), v_pool.stride(2),
        1.0 if rows is None else rows.k_scale, 1.0 if rows is None else rows.v_scale,
        spec.dim * spec.eps, spec.v_dim * spec.eps, v_unit,
        FP8=k_pool.dtype == torch.float8_e4m3fn, SLOTS=rows is not None,
        **constants, **launch,
    )  # fmt: skip
    return q, k, v


def _constants(spec: HeadSpec, rotation: Rotation | None) -> dict[str, Any]:
    rotated = 0 if rotation is None else rotation.cos.shape[-1]
    return {
        "DIM": spec.dim,
        "ROTATED": rotated,
        "HALF": next_power_of_2(max(1, rotated // 2)),
        "WHOLE": next_power_of_2(spec.dim),
        "V_DIM": spec.v_dim,
        "V_BLOCK": next_power_of_2(spec.v_dim),
        "INTERLEAVED": rotation is not None and rotation.interleaved,
        "NORM": spec.qk_norm,
        "V_NORM": spec.v_norm,
    }


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released heads: plain, normed and half rotated, interleaved, and FP8 rows."""
    made = []
    plain = HeadSpec(heads=64, kv_heads=8, dim=128, v_dim=128, qk_norm=True)
    wide = HeadSpec(heads=16, kv_heads=2, dim=256, v_dim=256, qk_norm=True)
    for name, spec, kind, pool, rotated, interleaved in (
        ("rope store 128 normed", plain, "*bf16", "*bf16", 128, False),
        ("rope store 256 partial", wide, "*bf16", "*bf16", 64, False),
        ("rope store 128 interleaved", plain, "*fp16", "*fp16", 128, True),
        ("rope store 128 fp8", plain, "*bf16", "*fp8e4nv", 128, False),
    ):
        table = torch.empty(1, 1, rotated)
        launch = config(chip, spec, rotated)
        signature = dict.fromkeys(("projected", "cos", "sin", "q"), kind) | dict.fromkeys(("k_pool", "v_pool"), pool)
        signature |= dict.fromkeys(("q_factors", "k_factors"), "*fp32") | {"slots": "*i64"}
        counts = "heads kv_heads q_blocks kv_blocks blocks parts v_start"
        strides = "row_stride cos_stride q_row k_row k_head v_row v_head"
        signature |= dict.fromkeys((*counts.split(), *strides.split()), "i32")
        signature |= dict.fromkeys("k_scale v_scale floor v_floor v_unit".split(), "fp32")
        constants = _constants(spec, Rotation(table, table, interleaved)) | {"HEADS": launch["HEADS"], "SLOTS": True}
        constants["FP8"] = pool == "*fp8e4nv"
        made.append(
            Specialization(name, rope_store_kernel, signature, constants, launch["num_warps"], launch["num_stages"])
        )
    return made
