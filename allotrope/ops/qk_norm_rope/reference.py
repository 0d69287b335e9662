"""What stands between the fused projection and attention: norms of heads, rotation, and the rows' way to the cache.

For every token, with [q | k | v] its projection, head by head:

    q = rotate(norm(q));  k = rotate(norm(k));  v = value_scale norm(v);  pools[slot] = k / k_scale, v / v_scale
    norm(x) = x / sqrt(sum x^2 + D eps) * factors

each of norm, rotation and scale where the layer has it. Mathematics in fp32; q, k and v are rounded once to the
projection's type, and k and v again to the pool's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from allotrope.ops.rope import Rotation
from allotrope.ops.rope.reference import apply_rope


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """`heads`, `kv_heads`: H and G; G is 0 for a layer that reads another's rows. `dim`: D. `v_dim`: Dv. `eps`: of the
    norms. `qk_norm`: RMS over each head of q and k. `v_norm`: RMS over each head of v, without a weight.
    `values_from_keys`: values are the keys as projected, and the projection has none of their own.
    """

    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    eps: float = 1e-6
    qk_norm: bool = False
    v_norm: bool = False
    value_scale: float = 1.0
    values_from_keys: bool = False

    @property
    def width(self) -> int:
        """Columns of the projection that are read."""
        values = 0 if self.values_from_keys else self.kv_heads * self.v_dim
        return (self.heads + self.kv_heads) * self.dim + values


@dataclass(frozen=True)
class Rows:
    """Where keys and values go. `k`: [P, S, G, D] pool. `v`: [P, S, G, Dv] pool, None where keys serve as values.
    `slots`: [T] int64, row of each token, below 0 for a token that is not stored. `k_scale`, `v_scale`: in FP8 pools, a
    stored number is the true one divided by these.
    """

    k: torch.Tensor
    v: torch.Tensor | None
    slots: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


def rope_store(
    spec: HeadSpec,
    projected: torch.Tensor,
    rotation: Rotation | None,
    q_factors: torch.Tensor | None,
    k_factors: torch.Tensor | None,
    rows: Rows | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The equation above, written to be read.

    `projected`: [T, >= width]. `rotation`: of the step's positions, None for none. `q_factors`, `k_factors`: [D] fp32
    with `qk_norm`, the norms' weights times sqrt(D). `rows`: None to return k and v instead of storing them.
    Returns q [T, H, D], and k [T, G, D] and v [T, G, Dv] or None.
    """
    tokens, border = len(projected), spec.heads * spec.dim
    q = _rotated(spec, projected[:, :border].view(tokens, spec.heads, spec.dim), q_factors, rotation)
    if not spec.kv_heads:
        return q, None, None
    keys = projected[:, border : border + spec.kv_heads * spec.dim].view(tokens, spec.kv_heads, spec.dim)
    k = _rotated(spec, keys, k_factors, rotation)
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


def _normed(x: torch.Tensor, factors: torch.Tensor | None, eps: float) -> torch.Tensor:
    size = x.shape[-1]
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + size * eps) * (size**0.5 if factors is None else factors)


def _rotated(spec: HeadSpec, x: torch.Tensor, factors: torch.Tensor | None, rotation: Rotation | None) -> torch.Tensor:
    exact = _normed(x.float(), factors, spec.eps) if spec.qk_norm else x.float()
    if rotation is not None:
        exact = apply_rope(exact, Rotation(rotation.cos.float(), rotation.sin.float(), rotation.interleaved))
    return exact.to(x.dtype)
