"""Root-mean-square norms: y = x / sqrt(mean(x^2) + eps) * w, in fp32, rounded once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.parallel import Placement, Section, parameter


class RMSNorm(nn.Module):
    """`offset` 1.0 multiplies by (1 + w), as checkpoints that store w around 0 want; `weighted` False has no w."""

    def __init__(self, size: int, eps: float, build: Build, *, offset: float = 0.0, weighted: bool = True) -> None:
        super().__init__()
        self.size, self.eps, self.offset = size, eps, offset
        self.weight = None
        if weighted:
            self.weight = parameter((size,), Placement((Section("", size),)), build.dtype, build.device)

    def finish_loading(self) -> None:
        """Fold the offset into the weight, once all weights are in."""
        if self.weight is not None and self.offset:
            self.weight.data = self.weight.data.float() + self.offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [..., size]. Returns the same shape and type."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        weight = None if self.weight is None else self.weight.float()
        return F.rms_norm(x.float(), (self.size,), weight, self.eps).to(x.dtype)


class AllHeadsNorm(nn.Module):
    """One mean over all heads of a token, those of the other ranks included; a weight per number of each head."""

    def __init__(self, heads: int, dim: int, eps: float, build: Build) -> None:
        super().__init__()
        self.size, self.eps, self.parallel = heads * dim, eps, build.parallel
        placement = Placement((Section("", heads * dim, dim),))
        local = placement.local(build.parallel)
        # Where ranks hold copies of a head, each counts for its share.
        self.copies = local * build.parallel.size / self.size
        self.weight = parameter((local,), placement, build.dtype, build.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [T, heads of this rank, dim]. Returns the same shape and type."""
        flat = x.flatten(1).float()
        square = self.parallel.all_reduce(flat.square().sum(-1, keepdim=True) / self.copies)
        normed = flat * torch.rsqrt(square / self.size + self.eps) * self.weight.float()
        return normed.to(x.dtype).view_as(x)
