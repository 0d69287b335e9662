"""Root-mean-square norms: y = x / sqrt(mean(x^2) + eps) * w, in fp32, rounded once."""

from __future__ import annotations

import math

import torch
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.linear import quantizing
from allotrope.layers.parallel import Placement, Section
from allotrope.ops.all_reduce import ALL_REDUCE_ADD_RMS_NORM
from allotrope.ops.rms_norm import ADD_RMS_NORM, RMS_NORM, RMSNormSpec


class RMSNorm(nn.Module):
    """`offset` 1.0 multiplies by (1 + w), as checkpoints that store w around 0 want; `weighted` False has no w.
    `quantized_from`: of the products that read it."""

    def __init__(
        self,
        size: int,
        eps: float,
        build: Build,
        *,
        offset: float = 0.0,
        weighted: bool = True,
        quantized_from: int | None = None,
    ) -> None:
        super().__init__()
        self.size, self.floor, self.offset, self.parallel = size, size * eps, offset, build.parallel
        self.weight = None
        if weighted:
            self.weight = build.parameter((size,), Placement((Section("", size),)))
        self.scaled_weight = torch.full((size,), math.sqrt(size), dtype=torch.float32, device=build.device)
        spec = RMSNormSpec(size, build.dtype)
        self._norm = quantizing(build.chooser.choose(RMS_NORM, spec), quantized_from)
        self._add_norm = quantizing(build.chooser.choose(ADD_RMS_NORM, spec), quantized_from)
        if self.parallel.size > 1:
            fused = self.parallel.all_reduce_spec(size, build.dtype)
            self._all_reduce_add_norm = build.chooser.choose(ALL_REDUCE_ADD_RMS_NORM, fused).run

    def finish_loading(self) -> None:
        """Fold the offset and the mean's root into the weight, and keep it in fp32, once all weights are in."""
        if self.weight is not None:
            self.weight.data = (self.weight.data.float() + self.offset) * math.sqrt(self.size)
            self.scaled_weight = self.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [..., size]. Returns the same shape and type."""
        normed: torch.Tensor = self._norm(x, self.scaled_weight, self.floor)
        return normed

    def add(
        self, y: torch.Tensor, x: torch.Tensor, inner: RMSNorm | None = None, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """s = (x + y) * `scale`, or (x + `inner`(y)) * `scale`, and the norm of s, with y the sum of the ranks' `y`.

        `y`: [T, size], this rank's part, which may be overwritten. `x`: [T, size]. `scale`: [1], or None for 1. Returns
        s and its norm: one launch where there are kernels.
        """
        if self.parallel.size == 1:
            return self.add_replicated(y, x, inner, scale)
        inner_weight = None if inner is None else inner.scaled_weight
        norm = (x, self.scaled_weight, self.floor, inner_weight, scale, self._add_norm)
        (result,) = self._all_reduce_add_norm((self.parallel,), (y,), *norm)
        summed: tuple[torch.Tensor, torch.Tensor] = result
        return summed

    def add_replicated(
        self, y: torch.Tensor, x: torch.Tensor, inner: RMSNorm | None = None, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `add`, of a `y` that every rank holds whole."""
        inner_weight = None if inner is None else inner.scaled_weight
        added: tuple[torch.Tensor, torch.Tensor]
        added = self._add_norm(y, x, self.scaled_weight, self.floor, inner_weight, scale)
        return added


class AllHeadsNorm(nn.Module):
    """One mean over all heads of a token, those of the other ranks included; a weight per number of each head."""

    def __init__(self, heads: int, dim: int, eps: float, build: Build) -> None:
        super().__init__()
        self.size, self.eps, self.parallel = heads * dim, eps, build.parallel
        placement = Placement((Section("", heads * dim, dim),))
        local = placement.local(build.parallel)
        # Where ranks hold copies of a head, each counts for its share.
        self.copies = local * build.parallel.size / self.size
        self.weight = build.parameter((local,), placement)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [T, heads of this rank, dim]. Returns the same shape and type."""
        flat = x.flatten(1).float()
        square = self.parallel.all_reduce(flat.square().sum(-1, keepdim=True) / self.copies)
        normed = flat * torch.rsqrt(square / self.size + self.eps) * self.weight.float()
        return normed.to(x.dtype).view_as(x)
