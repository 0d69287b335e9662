"""Rotation of queries and of one key in PyTorch: what kernels are held against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from allotrope.ops.mla_rope.spec import LayerNorm
from allotrope.ops.rope import Rotation
from allotrope.ops.rope.reference import apply_rope


def mla_rope(
    q: torch.Tensor, k: torch.Tensor, rotation: Rotation | None, norm: LayerNorm | None = None
) -> torch.Tensor:
    """Rotate the first R dims of every head of q and of k.

    `q`: [T, H, D]. `k`: [T, D], normed first where there is a `norm`. Returns [T, H + 1, D] in q's type, k last.
    """
    joined = join(q, k, norm)
    return joined if rotation is None else apply_rope(joined, rotation)


def join(q: torch.Tensor, k: torch.Tensor, norm: LayerNorm | None) -> torch.Tensor:
    """q's heads, then norm(k), before their rotation."""
    if norm is not None:
        k = F.layer_norm(k.float(), k.shape[1:], norm.weight, norm.bias, norm.eps).to(k.dtype)
    return torch.cat((q, k[:, None]), dim=1)
