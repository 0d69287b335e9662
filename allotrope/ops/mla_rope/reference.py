"""Rotation of heads and of one more that lies elsewhere: latent attention's queries and the row that is cached."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from allotrope.ops.device_kernels import device_kernels
from allotrope.ops.rope.reference import Rotation, rotate


class LayerNorm(NamedTuple):
    """To mean 0 and variance 1, then times `weight` plus `bias`, both [D] fp32."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float


def turn(
    heads: torch.Tensor, last: torch.Tensor, rotation: Rotation | None, norm: LayerNorm | None = None
) -> torch.Tensor:
    """The first dims of all heads turned. `heads`: [T, H, D]. `last`: [T, D], one head more, normed first where there
    is a `norm`. Returns [T, H + 1, D], in the heads' type.
    """
    fused = device_kernels("mla_rope", heads.device)
    if fused is not None and rotation is not None:
        return fused.turn(heads, last, rotation, norm)
    if norm is not None:
        last = F.layer_norm(last.float(), last.shape[1:], norm.weight, norm.bias, norm.eps).to(last.dtype)
    both = torch.cat((heads, last[:, None]), dim=1)
    return both if rotation is None else rotate(both, rotation)
