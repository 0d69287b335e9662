"""cos and sin of a step's positions in Triton, in one launch. A program makes the table's rows of a few tokens."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2

_HALF_PI = tl.constexpr(1.5707963267948966)
_TWO_OVER_PI = tl.constexpr(0.6366197723675814)
# Numbers of a program.
_BLOCK = 256


@triton.jit
def cos_sin(angle):
    """cos and sin of fp32 radians. Whole quarters of a turn are taken off in fp64, so that positions of any size keep
    the digits of fp32; the rest, at most an eighth of a turn, goes through Taylor's series.
    """
    angle_fp64 = angle.to(tl.float64)
    quadrants = tl.floor(angle_fp64 * _TWO_OVER_PI + 0.5)
    x = angle_fp64 - quadrants * _HALF_PI
    s = x * x
    sine = x * (1.0 + s * (-1 / 6 + s * (1 / 120 + s * (-1 / 5040 + s * (1 / 362880 - s * (1 / 39916800))))))
    cosine = 1.0 + s * (-1 / 2 + s * (1 / 24 + s * (-1 / 720 + s * (1 / 40320 - s * (1 / 3628800)))))
    quadrant = quadrants.to(tl.int64) & 3
    odd = (quadrant & 1) == 1
    cos = tl.where(odd, sine, cosine)
    cos = tl.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    sin = tl.where(odd, cosine, sine)
    sin = tl.where(quadrant >= 2, -sin, sin)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def rotation(position, freq, sign, factor, dim, R: tl.constexpr):
    """What a table holds of dims `dim` at a position, in fp32: `freq`, `sign`, `factor` as in `RopeTable`."""
    c, s = cos_sin(position.to(tl.float32) * tl.load(freq + dim, mask=dim < R, other=0.0))
    return c * factor, s * tl.load(sign + dim, mask=dim < R, other=0.0)


@pdl_jit
def cos_sin_kernel(
    positions, freq, sign, cos, sin, tokens, factor, R: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """`freq`, `sign`: [R] fp32, the sign with the factor. `cos`, `sin`: [T, R]."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_R)
    position = tl.load(positions + token, mask=token < tokens, other=0)
    c, s = rotation(position[:, None], freq, sign, factor, dim[None, :], R)
    offset = token.to(tl.int64)[:, None] * R + dim[None, :]
    mask = (token < tokens)[:, None] & (dim < R)[None, :]
    tl.store(cos + offset, c.to(cos.dtype.element_ty), mask=mask)
    tl.store(sin + offset, s.to(sin.dtype.element_ty), mask=mask)


def rope_cos_sin(
    positions: torch.Tensor, freq: torch.Tensor, sign: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.rope_cos_sin`."""
    cos = torch.empty(len(positions), 1, len(freq), dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    if len(positions):
        block = next_power_of_2(len(freq))
        rows = max(1, _BLOCK // block)
        cos_sin_kernel[(cdiv(len(positions), rows),)](
            positions, freq, sign, cos, sin, len(positions), factor,
            R=len(freq), BLOCK_R=block, ROWS=rows, num_warps=4,
        )  # fmt: skip
    return cos, sin


@specializations
def released(chip: Chip) -> list[Specialization]:
    """A table of 64 in bf16 and fp32."""
    listed = []
    for name, kind in (("bf16", "*bf16"), ("fp32", "*fp32")):
        signature = {"positions": "*i64", "freq": "*fp32", "sign": "*fp32", "cos": kind, "sin": kind}
        signature |= {"tokens": "i32", "factor": "fp32"}
        constants = {"R": 64, "BLOCK_R": 64, "ROWS": _BLOCK // 64}
        listed.append(Specialization(f"angles {name}", cos_sin_kernel, signature, constants, 4, 1))
    return listed
