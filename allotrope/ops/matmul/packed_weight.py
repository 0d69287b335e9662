"""Weights in the form that our kernels read, made once when a weight is whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from allotrope.kernels.chip import Chip
from allotrope.ops.matmul.weight import Format, Weight


@dataclass(frozen=True, repr=False)
class PackedWeight(Weight):
    """A weight as our kernels read it; made by `Format.pack`.

    `values`: [E or 1, outputs, padded_inputs / pack_factor]. `scales`: [E or 1, outputs / scale_rows, groups]. MXFP4
    lies in tiles instead: see `mxfp4`. `outputs`, `inputs`: of the plain weight. `experts`, `experts_of_layer`: as of
    `MatmulSpec`.
    `row_scales`: a row has one scale. `fast`: the scales are small enough for the fast way from 4 bits to bf16, and the
    chip knows it. `library_scales`: groups rounded up to fours, a group's neighbour next to it [groups, outputs / 128],
    as PyTorch's product wants them; None where rows do not share scales.
    """

    format: Format
    values: torch.Tensor
    scales: torch.Tensor
    outputs: int
    inputs: int
    padded_inputs: int
    scale_rows: int
    row_scales: bool
    experts: int
    fast: bool
    library_scales: torch.Tensor | None = None
    experts_of_layer: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """As `Weight.shape`."""
        one = (self.outputs, self.inputs)
        return (self.experts, *one) if self.experts else one

    @property
    def nbytes(self) -> int:
        """As `Weight.nbytes`."""
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """As `Weight.dequantize`."""
        values, scales = self.format.unpack(self)
        plain = self.format.dequantize(values, scales)[..., : self.outputs, : self.inputs]
        return (plain if self.experts else plain[0]).to(dtype)


def padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """`x` with zeros behind each row, up to `width`."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def multiplies_pairs(chip: Chip) -> bool:
    """Whether one instruction multiplies two numbers of 16 bits there; the interpreter does it as well."""
    return chip.vendor != "nvidia" or chip.capability >= (9, 0)
