"""Weights of products: how their numbers are stored, and what every packed form of one still tells.

    w[o, i] = value(q[o, i]) * scale[o, i // group_size]

A `Format` is one file: `plain`, `fp8`, `mxfp4`, `int4`. A scale per row makes every cut, fusion and reordering of rows
the same for values and scales; blocks of rows that share one are found again once a weight is whole. Must not know:
layers, checkpoints, or which backend multiplies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from allotrope.kernels.chip import Chip

if TYPE_CHECKING:
    from allotrope.ops.matmul.packed_weight import PackedWeight

KERNEL_STEP = 128
"""Inputs of a kernel's step; packed weights are whole steps wide."""


@dataclass(frozen=True)
class Format(ABC):
    """`group_size`: inputs that share a scale; 0: all of a row. `rows`: rows of the stored weight that do; 0: all."""

    group_size: int = 0
    rows: int = 1

    value_dtype: ClassVar[torch.dtype]
    scale_dtype: ClassVar[torch.dtype]

    @property
    @abstractmethod
    def name(self) -> str:
        """As users know it."""

    @property
    def pack_factor(self) -> int:
        """Numbers in `elements` elements of values."""
        return 1

    @property
    def elements(self) -> int:
        """Elements of values that `pack_factor` numbers take."""
        return 1

    def width(self, inputs: int) -> int:
        """Elements of values of a row of `inputs` numbers."""
        return inputs // self.pack_factor * self.elements

    @abstractmethod
    def dequantize(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The plain weight in fp32. `values`: [.., outputs, width]. `scales`: [.., outputs / b, groups], where each b
        rows share theirs."""

    @abstractmethod
    def quantize(self, weight: torch.Tensor, block_rows: int = 1) -> QuantizedWeight:
        """The nearest weight of this format. `weight`: [.., outputs, inputs]. `block_rows`: rows that share a scale."""

    @abstractmethod
    def kernel_reasons(self, chip: Chip) -> list[str]:
        """Why our kernels do not multiply this format on a chip on which they run."""

    @abstractmethod
    def pack(self, weight: QuantizedWeight) -> PackedWeight:
        """`weight`, whose memory is taken over, as our kernels read it."""

    def unpack(self, weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of a packed weight as they are stored [E or 1, ..], with what it was padded by."""
        return weight.values, weight.scales

    @abstractmethod
    def packed_bytes(self, shape: tuple[int, ...], shared: bool) -> tuple[int, int]:
        """Bytes of the values and scales that `pack` makes of a weight of `shape`. `shared`: blocks of rows share
        scales."""

    def activations(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, inputs] as products with such weights see it, in fp32."""
        return x.float()

    def share_scales(self, weight: QuantizedWeight) -> QuantizedWeight:
        """The same weight with one scale for each block of rows that has one, where the format knows blocks."""
        return weight

    def shares(self, *outputs: int) -> bool:
        """Whether blocks of rows share a scale once sections of so many outputs are one weight."""
        return False

    def groups(self, inputs: int) -> int:
        """Scales of a row of `inputs` numbers."""
        return -(-inputs // self.group_size) if self.group_size else 1

    def stored_bytes(self, shape: tuple[int, ...], shared: bool) -> tuple[int, int]:
        """As `packed_bytes`, of a weight that is kept as it is stored."""
        *outer, inputs = shape
        rows = torch.Size(outer).numel()
        values = rows * self.width(inputs) * self.value_dtype.itemsize
        scales = rows * self.groups(inputs) * self.scale_dtype.itemsize
        return values, scales // SHARED_ROWS if shared else scales


# Rows of a block that may share a scale.
SHARED_ROWS = 128


class Weight(ABC):
    """A weight [outputs, inputs], or one of each expert [E, outputs, inputs], in the form that its backend reads."""

    format: Format

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the plain weight."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it takes, scales included."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The plain weight, computed in fp32 and rounded to `dtype`."""

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Outputs `ids` of one plain weight, [n, inputs], rounded to `dtype`."""
        return self.dequantize(dtype)[ids]

    def __repr__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{type(self).__name__}({self.format.name}, {sizes}, {self.nbytes} bytes)"


@dataclass(frozen=True, repr=False)
class QuantizedWeight(Weight):
    """As it is stored. `values`: [.., outputs, width]. `scales`: [.., outputs, groups], or
    [.., outputs / b, groups] where each b rows share theirs.
    """

    format: Format
    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """As `Weight.shape`."""
        *outer, width = self.values.shape
        return (*outer, width // self.format.elements * self.format.pack_factor)

    @property
    def nbytes(self) -> int:
        """As `Weight.nbytes`."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def rows_per_scale(self) -> int:
        """Rows that share a scale."""
        return -(-self.values.shape[-2] // self.scales.shape[-2])

    def __getitem__(self, index: slice | int) -> QuantizedWeight:
        """Some outputs of one weight whose rows have scales of their own; or some experts, or one."""
        return QuantizedWeight(self.format, self.values[index], self.scales[index])

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As `Weight.rows`."""
        return self.format.dequantize(self.values[ids], self.scales[ids]).to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """As `Weight.dequantize`."""
        return self.format.dequantize(self.values, self.scales).to(dtype)


def scale_groups(values: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """fp32 numbers times their scales, in place. `values`: [.., outputs, inputs]. `scales`: [.., outputs / b, groups]
    where b rows share theirs."""
    outputs, inputs = values.shape[-2:]
    rows = -(-outputs // scales.shape[-2])
    if rows > 1:
        scales = scales.repeat_interleave(rows, dim=-2).narrow(-2, 0, outputs)
    if group_size:
        scales = scales.repeat_interleave(group_size, dim=-1).narrow(-1, 0, inputs)
    return values.mul_(scales)


def grouped(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """A plain weight [.., outputs, inputs] in fp32, by groups [.., outputs, groups, group_size], zeros at the end."""
    inputs = weight.shape[-1]
    size = group_size or inputs
    groups = -(-inputs // size)
    return torch.nn.functional.pad(weight.float(), (0, groups * size - inputs)).unflatten(-1, (groups, size))
