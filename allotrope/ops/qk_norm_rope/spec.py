"""Which heads a projection holds, and where keys and values go."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
