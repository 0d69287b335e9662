"""Norm, rotation and store in PyTorch: what kernels are held against. The package's docstring has the equations."""

from __future__ import annotations

import torch

from allotrope.ops.qk_norm_rope.spec import HeadSpec, Rows
from allotrope.ops.rope import Rotation
from allotrope.ops.rope.reference import apply_rope


def rope_store(
    spec: HeadSpec,
    projected: torch.Tensor,
    rotation: Rotation | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    rows: Rows | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Norm, rotate and store.

    `projected`: [T, >= width]. `rotation`: of the step's positions, None for none. `q_weight`, `k_weight`: [D] fp32
    with `qk_norm`, weights of the norms times sqrt(D). `rows`: None to return k and v instead of storing them.
    Returns q [T, H, D], and k [T, G, D] and v [T, G, Dv] or None.
    """
    tokens, border = len(projected), spec.heads * spec.dim
    q = _rotated(spec, projected[:, :border].view(tokens, spec.heads, spec.dim), q_weight, rotation)
    if not spec.kv_heads:
        return q, None, None
    keys = projected[:, border : border + spec.kv_heads * spec.dim].view(tokens, spec.kv_heads, spec.dim)
    k = _rotated(spec, keys, k_weight, rotation)
    start = border + spec.kv_heads * spec.dim
    values = keys.float()
    if not spec.values_from_keys:
        values = projected[:, start : spec.width].unflatten(1, (spec.kv_heads, spec.v_dim)).float()
    v = ((_normed(values, None, spec.eps) if spec.v_norm else values) * spec.value_scale).to(projected.dtype)
    if rows is None:
        return q, k, v
    kept = rows.slots >= 0
    for pool, new, scale in ((rows.k, k, rows.k_scale), (rows.v, v, rows.v_scale)):
        if pool is not None:
            pool.flatten(0, 1)[rows.slots[kept]] = quantize(new[kept], scale, pool.dtype)
    return q, None, None


def quantize(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """`x / scale` in `dtype`, saturating, where that is an FP8 type; else `x` in `dtype`."""
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    size = x.shape[-1]
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + size * eps) * (size**0.5 if weight is None else weight)


def _rotated(spec: HeadSpec, x: torch.Tensor, weight: torch.Tensor | None, rotation: Rotation | None) -> torch.Tensor:
    x_fp32 = _normed(x.float(), weight, spec.eps) if spec.qk_norm else x.float()
    if rotation is not None:
        x_fp32 = apply_rope(x_fp32, Rotation(rotation.cos.float(), rotation.sin.float(), rotation.interleaved))
    return x_fp32.to(x.dtype)
