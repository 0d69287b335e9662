"""The inputs of the gated delta rule: a layer's projections, before convolution, norms and gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from allotrope.attention.gdn.spec import GdnSpec


@dataclass(frozen=True)
class GdnInputs:
    """`qkv`: [T, conv_dim] projections [q | k | v]. `b`: [T, nv], `a`: [T, decay_dim], of any strides. `conv_weight`:
    [conv_dim, W]. `conv_bias`: [conv_dim] or None. `A_log`: [nv]. `dt_bias`: [decay_dim]."""

    qkv: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def map_tokens(self, change: Callable[[torch.Tensor], torch.Tensor]) -> GdnInputs:
        """As in `TokenInputs`."""
        return replace(self, qkv=change(self.qkv), b=change(self.b), a=change(self.a))


def ready_inputs(spec: GdnSpec, **tensors: torch.Tensor) -> GdnInputs:
    """Inputs by name: `GdnInputs` has no norm and no rotation of its own."""
    return GdnInputs(**tensors)
