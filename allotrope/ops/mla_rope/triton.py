"""The heads of q, and the one key, rotated in one launch; the key may be normed before.

A program rotates some heads of one token. Bytes moved: q and k, read and written once.
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
from allotrope.ops.mla_rope.spec import LayerNorm
from allotrope.ops.rope import Rotation

# Numbers of a program.
_BLOCK = 1024


@triton.jit
def _load_pairs(src, column, mask, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Columns of the partners in each pair; the numbers; the partners."""
    if INTERLEAVED:
        partner = column ^ 1
    else:
        partner = tl.where(column < ROTATED // 2, column + ROTATED // 2, column - ROTATED // 2)
    x = tl.load(src + column, mask=mask, other=0.0).to(tl.float32)
    return partner, x, tl.load(src + partner, mask=mask & (column < ROTATED), other=0.0).to(tl.float32)


@triton.jit
def _normed(x, mean, rstd, weight, bias, column, mask, dtype: tl.constexpr):
    """Rounded as the output of a separate norm is."""
    w, b = tl.load(weight + column, mask=mask, other=0.0), tl.load(bias + column, mask=mask, other=0.0)
    return ((x - mean) * rstd * w + b).to(dtype).to(tl.float32)


@triton.jit
def _norm_and_rotate_k(
    src, dst, cosine, sine, column, weight, bias, eps,
    DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    mask = column < DIM
    dtype: tl.constexpr = dst.dtype.element_ty
    partner, x, pair = _load_pairs(src, column, mask, ROTATED, INTERLEAVED)
    if NORM:
        mean = tl.sum(x, axis=1)[:, None] / DIM
        centered = tl.where(mask, x - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centered * centered, axis=1)[:, None] / DIM + eps)
        x = _normed(x, mean, rstd, weight, bias, column, mask, dtype)
        pair = _normed(pair, mean, rstd, weight, bias, partner, column < ROTATED, dtype)
    tl.store(dst + column, (x * cosine + pair * sine).to(dtype), mask=mask)


@pdl_jit
def mla_rope_kernel(
    q, k, out, cos, sin, weight, bias, eps,
    heads, blocks, q_token, q_head, k_token, cos_token,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTATED: tl.constexpr, BLOCK_H: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """`out` [T, heads + 1, DIM]: the heads of q, then k, normed first with `NORM`. The last of a token's `blocks`
    programs has k.

    A number's partner is read again from memory. The sine carries the sign of its dim.
    """
    gdc_wait()
    gdc_launch_dependents()
    token, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    column = tl.arange(0, BLOCK_D)[None, :]
    cosine = tl.load(cos + token * cos_token + column, mask=column < ROTATED, other=1.0).to(tl.float32)
    sine = tl.load(sin + token * cos_token + column, mask=column < ROTATED, other=0.0).to(tl.float32)
    dst = out + token * (heads + 1) * DIM
    if block == blocks - 1:
        _norm_and_rotate_k(k + token * k_token, dst + heads * DIM, cosine, sine, column, weight, bias, eps,
                           DIM, ROTATED, INTERLEAVED, NORM)  # fmt: skip
    else:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        mask = (head < heads) & (column < DIM)
        _, x, pair = _load_pairs(q + token * q_token + head * q_head, column, mask, ROTATED, INTERLEAVED)
        tl.store(dst + head * DIM + column, (x * cosine + pair * sine).to(out.dtype.element_ty), mask=mask)


def mla_rope(q: torch.Tensor, k: torch.Tensor, rotation: Rotation, norm: LayerNorm | None = None) -> torch.Tensor:
    """As `reference.mla_rope`, with a rotation."""
    tokens, heads, dim = q.shape
    assert q.stride(2) == 1 and k.stride(1) == 1 and k.dtype == q.dtype
    out = q.new_empty(tokens, heads + 1, dim)
    if tokens:
        launch = _launch(heads, dim)
        blocks = cdiv(heads, launch["BLOCK_H"]) + 1
        weight, bias, eps = (rotation.cos, rotation.cos, 0.0) if norm is None else norm
        mla_rope_kernel[(tokens * blocks,)](
            q, k, out, rotation.cos, rotation.sin, weight, bias, eps,
            heads, blocks, q.stride(0), q.stride(1), k.stride(0), rotation.cos.stride(0),
            DIM=dim, ROTATED=rotation.cos.shape[-1], INTERLEAVED=rotation.interleaved, NORM=norm is not None,
            **launch, num_warps=4,
        )  # fmt: skip
    return out


def _launch(heads: int, dim: int) -> dict[str, int]:
    block_d = next_power_of_2(dim)
    return {"BLOCK_D": block_d, "BLOCK_H": max(1, min(_BLOCK // block_d, next_power_of_2(heads)))}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Heads of latent attention, and of its indexer."""
    listed = []
    for name, heads, dim, interleaved, norm in (("latent", 128, 64, True, False), ("indexer", 64, 128, False, True)):
        signature = dict.fromkeys(("q", "k", "out", "cos", "sin"), "*bf16")
        signature |= {"weight": "*fp32", "bias": "*fp32", "eps": "fp32"}
        signature |= dict.fromkeys("heads blocks q_token q_head k_token cos_token".split(), "i32")
        constants = {"DIM": dim, "ROTATED": 64, "INTERLEAVED": interleaved, "NORM": norm, **_launch(heads, dim)}
        listed.append(Specialization(f"turn {name}", mla_rope_kernel, signature, constants, 4, 1))
    return listed
