"""Root-mean-square norms: y = x / sqrt(mean(x^2) + eps) * w, in fp32, rounded once."""

from __future__ import annotations

import math

import torch
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.parallel import Placement, Section, parameter
from allotrope.ops.device_kernels import device_kernels
from allotrope.ops.rms_norm.cpu import rows


class RMSNorm(nn.Module):
    """`offset` 1.0 multiplies by (1 + w), as checkpoints that store w around 0 want; `weighted` False has no w."""

    def __init__(self, size: int, eps: float, build: Build, *, offset: float = 0.0, weighted: bool = True) -> None:
        super().__init__()
        self.size, self.eps, self.offset = size, eps, offset
        self.weight = None
        if weighted:
            self.weight = parameter((size,), Placement((Section("", size),)), build.dtype, build.device)
        # Of the sum of squares, where eps is of their mean.
        self.floor = torch.tensor(math.sqrt(size * eps), dtype=torch.float32, device=build.device)
        self.factors = torch.full((size,), math.sqrt(size), dtype=torch.float32, device=build.device)

    def finish_loading(self) -> None:
        """Fold the offset and the mean's root into the weight, and keep it in fp32, once all weights are in."""
        if self.weight is not None:
            self.weight.data = (self.weight.data.float() + self.offset) * math.sqrt(self.size)
            self.factors = self.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [..., size]. Returns the same shape and type."""
        fused = device_kernels("rms_norm", x.device)
        if fused is not None:
            return fused.rms_norm(x, self.factors, self.size * self.eps)
        compiled = rows(x.dtype, x.device)
        if compiled is not None and compiled.normalizes(x):
            return compiled.normalize(x, self.factors, self.size * self.eps)
        exact = x.float()
        # sqrt(sum x^2 + size eps), the mean's root times sqrt(size): few passes, where torch's own norm takes seven.
        length = torch.hypot(torch.linalg.vector_norm(exact, 2, -1, True), self.floor)
        if x.dtype == torch.float32:
            return (exact / length).mul_(self.factors)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return torch.mul(exact.div_(length), self.factors, out=out)

    def add(
        self, y: torch.Tensor, x: torch.Tensor, inner: RMSNorm | None = None, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """s = (x + y) * `scale`, or (x + `inner`(y)) * `scale`, and the norm of s. `y`, `x`: [T, size]. `scale`: [1],
        or None for 1. Returns s and its norm: one launch where there are kernels."""
        fused = device_kernels("rms_norm", x.device)
        if fused is not None:
            factors = None if inner is None else inner.factors
            return fused.add_rms_norm(y, x, self.factors, self.size * self.eps, factors, scale)
        total = x + (y if inner is None else inner(y))
        if scale is not None:
            total = total * scale
        return total, self(total)


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
