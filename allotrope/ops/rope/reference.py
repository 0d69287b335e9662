"""Rotary position embedding in PyTorch: what kernels are held against."""

from __future__ import annotations

import torch

from allotrope.ops.rope.spec import Rotation


def rope_cos_sin(
    positions: torch.Tensor, freq: torch.Tensor, sign: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos(p f) * factor and sin(p f) * sign, [T, 1, R] each. Angles are fp32; the results are rounded to `dtype` once.

    `positions`: [T]. `freq`: [R] fp32 radians per position of each dim. `sign`: [R] fp32, of the sine, with `factor`.
    """
    angle = positions.float()[:, None, None] * freq
    cos, sin = angle.cos() * factor, angle.sin() * sign
    return cos.to(dtype), sin.to(dtype)


def apply_rope(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the first R dims of every head; the others pass through. `x`: [T, heads, D]. Returns a new tensor."""
    dim = rotation.cos.shape[-1]
    head = x if dim == x.shape[-1] else x[..., :dim]
    if rotation.interleaved:
        swapped = head.unflatten(-1, (dim // 2, 2)).flip(-1).flatten(-2)
        rotated = torch.addcmul(head * rotation.cos, swapped, rotation.sin).to(x.dtype)
    else:
        rotated = head * rotation.cos
        half = dim // 2
        rotated[..., :half].addcmul_(head[..., half:], rotation.sin[..., :half])
        rotated[..., half:].addcmul_(head[..., :half], rotation.sin[..., half:])
        rotated = rotated.to(x.dtype)
    return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), dim=-1)
