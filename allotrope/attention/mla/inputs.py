"""The inputs of latent attention: a layer's projections, before norm and rotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from allotrope.attention.head_norm import HeadNorm
from allotrope.attention.mla.spec import MlaSpec
from allotrope.ops.mla_rope.reference import mla_rope
from allotrope.ops.rope import Rotation

MlaRope = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class MlaInputs:
    """`q`: [T, H, P + R], the rotated dims last. `latent`: [T, C + R], the cache entry. `w_uk`: [H, P, C]. `w_uv`:
    [H, V, C]. `latent_norm`: norm of the first C numbers of `latent`, None for none. `rotation`: of the last R numbers
    of `q` and `latent`, None for none. `apply_rope`: the implementation that the layer chose. `kv_scale`: the divisor
    of plain FP8 entries.
    """

    q: torch.Tensor
    latent: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    latent_norm: HeadNorm | None = None
    rotation: Rotation | None = None
    apply_rope: MlaRope = mla_rope
    kv_scale: float = 1.0

    def map_tokens(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MlaInputs:
        """As in `TokenInputs`."""
        rotation = None if self.rotation is None else self.rotation.map_tokens(change)
        return replace(self, q=change(self.q), latent=change(self.latent), rotation=rotation)


class LatentHeads(NamedTuple):
    """`q_nope`: [T, H, P]. `q_pe`: [T, H, R] rotated. `c`: [T, C] normed. `k_pe`: [T, R] rotated."""

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    c: torch.Tensor
    k_pe: torch.Tensor


def normed_and_rotated(spec: MlaSpec, inputs: MlaInputs) -> LatentHeads:
    """Queries and latents, normed and rotated. One launch rotates both where there are kernels."""
    c = inputs.latent[:, : spec.latent_dim]
    if inputs.latent_norm is not None:
        c = inputs.latent_norm(c)
    rotated = inputs.apply_rope(inputs.q[..., spec.nope_dim :], inputs.latent[:, spec.latent_dim :], inputs.rotation)
    return LatentHeads(inputs.q[..., : spec.nope_dim], rotated[:, :-1], c, rotated[:, -1])


def ready_inputs(
    spec: MlaSpec,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    c: torch.Tensor,
    k_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_scale: float = 1.0,
) -> MlaInputs:
    """Inputs that need neither norm nor rotation. Arguments as in `LatentHeads` and `MlaInputs`."""
    q, latent = torch.cat((q_nope, q_pe), dim=-1), torch.cat((c, k_pe), dim=-1)
    return MlaInputs(q, latent, w_uk, w_uv, kv_scale=kv_scale)
