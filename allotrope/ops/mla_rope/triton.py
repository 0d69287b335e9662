"""The heads of a layer, and one more of another tensor, rotated in one launch; the last one may be normed before.

A program turns some heads of one token. Bytes moved: the heads, read and written once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.mla_rope.reference import LayerNorm
from allotrope.ops.rope.reference import Rotation

# Numbers that a program has.
_PROGRAM = 1024


@triton.jit
def _pairs(source, column, inside, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where the other number of each one's pair is; the numbers, and the others."""
    if INTERLEAVED:
        other = column ^ 1
    else:
        other = tl.where(column < ROTATED // 2, column + ROTATED // 2, column - ROTATED // 2)
    x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    return other, x, tl.load(source + other, mask=inside & (column < ROTATED), other=0.0).to(tl.float32)


@triton.jit
def _normed(x, mean, root, weight, bias, column, inside, dtype: tl.constexpr):
    """Rounded, as if the norm were a layer of its own."""
    w, b = tl.load(weight + column, mask=inside, other=0.0), tl.load(bias + column, mask=inside, other=0.0)
    return ((x - mean) * root * w + b).to(dtype).to(tl.float32)


@triton.jit
def _last(
    source, place, cosine, sine, column, weight, bias, eps,
    DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    inside = column < DIM
    dtype: tl.constexpr = place.dtype.element_ty
    other, x, pair = _pairs(source, column, inside, ROTATED, INTERLEAVED)
    if NORM:
        mean = tl.sum(x, axis=1)[:, None] / DIM
        away = tl.where(inside, x - mean, 0.0)
        root = tl.rsqrt(tl.sum(away * away, axis=1)[:, None] / DIM + eps)
        x = _normed(x, mean, root, weight, bias, column, inside, dtype)
        pair = _normed(pair, mean, root, weight, bias, other, column < ROTATED, dtype)
    tl.store(place + column, (x * cosine + pair * sine).to(dtype), mask=inside)


@pdl_jit
def turn_kernel(
    heads, last, out, cos, sin, weight, bias, eps,
    count, blocks, head_token, head_row, last_token, cos_token,
    DIM: tl.constexpr, WHOLE: tl.constexpr, ROTATED: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """`out` [T, count + 1, DIM]: `count` heads, then the last one, which is normed first with `NORM`. Of a token's
    `blocks` programs the last has the last head.

    A number's pair is read again from where it lies. The table's sine carries the sign of its place.
    """
    gdc_wait()
    gdc_launch_dependents()
    token, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    column = tl.arange(0, WHOLE)[None, :]
    cosine = tl.load(cos + token * cos_token + column, mask=column < ROTATED, other=1.0).to(tl.float32)
    sine = tl.load(sin + token * cos_token + column, mask=column < ROTATED, other=0.0).to(tl.float32)
    place = out + token * (count + 1) * DIM
    if block == blocks - 1:
        _last(last + token * last_token, place + count * DIM, cosine, sine, column, weight, bias, eps,
              DIM, ROTATED, INTERLEAVED, NORM)  # fmt: skip
    else:
        head = block * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < count) & (column < DIM)
        _, x, pair = _pairs(heads + token * head_token + head * head_row, column, inside, ROTATED, INTERLEAVED)
        tl.store(place + head * DIM + column, (x * cosine + pair * sine).to(out.dtype.element_ty), mask=inside)


def turn(heads: torch.Tensor, last: torch.Tensor, rotation: Rotation, norm: LayerNorm | None = None) -> torch.Tensor:
    """As `allotrope.ops.mla_rope.reference.turn`, with a rotation."""
    tokens, count, dim = heads.shape
    assert heads.stride(2) == 1 and last.stride(1) == 1 and last.dtype == heads.dtype
    out = heads.new_empty(tokens, count + 1, dim)
    if tokens:
        launch = _launch(count, dim)
        blocks = cdiv(count, launch["HEADS"]) + 1
        weight, bias, eps = (rotation.cos, rotation.cos, 0.0) if norm is None else norm
        turn_kernel[(tokens * blocks,)](
            heads, last, out, rotation.cos, rotation.sin, weight, bias, eps,
            count, blocks, heads.stride(0), heads.stride(1), last.stride(0), rotation.cos.stride(0),
            DIM=dim, ROTATED=rotation.cos.shape[-1], INTERLEAVED=rotation.interleaved, NORM=norm is not None,
            **launch, num_warps=4,
        )  # fmt: skip
    return out


def _launch(count: int, dim: int) -> dict[str, int]:
    whole = next_power_of_2(dim)
    return {"WHOLE": whole, "HEADS": max(1, min(_PROGRAM // whole, next_power_of_2(count)))}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Heads of latent attention, and of its indexer."""
    made = []
    for name, count, dim, interleaved, norm in (("latent", 128, 64, True, False), ("indexer", 64, 128, False, True)):
        signature = dict.fromkeys(("heads", "last", "out", "cos", "sin"), "*bf16")
        signature |= {"weight": "*fp32", "bias": "*fp32", "eps": "fp32"}
        signature |= dict.fromkeys("count blocks head_token head_row last_token cos_token".split(), "i32")
        constants = {"DIM": dim, "ROTATED": 64, "INTERLEAVED": interleaved, "NORM": norm, **_launch(count, dim)}
        made.append(Specialization(f"turn {name}", turn_kernel, signature, constants, 4, 1))
    return made
