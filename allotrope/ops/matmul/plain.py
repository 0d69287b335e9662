"""Weights that are not quantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from allotrope.kernels.chip import Chip
from allotrope.ops.matmul.packed_weight import PackedWeight
from allotrope.ops.matmul.weight import Format, QuantizedWeight, Weight


@dataclass(frozen=True)
class PlainFormat(Format):
    """Numbers of the model's own type, without scales."""

    name = "plain"

    def dequantize(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """As `Format.dequantize`."""
        return values.float()

    def quantize(self, weight: torch.Tensor, block_rows: int = 1) -> QuantizedWeight:
        """As `Format.quantize`."""
        raise NotImplementedError("plain weights are not quantized")

    def kernel_reasons(self, chip: Chip) -> list[str]:
        """As `Format.kernel_reasons`."""
        return [] if chip.is_gpu else [f"plain weights on chip={chip.arch} (needs a GPU)"]

    def pack(self, weight: QuantizedWeight) -> PackedWeight:
        """As `Format.pack`."""
        return pack_plain(weight.values)

    def packed_bytes(self, shape: tuple[int, ...], shared: bool) -> tuple[int, int]:
        """As `Format.packed_bytes`."""
        raise NotImplementedError("the size of plain weights is that of their parameter")


PLAIN = PlainFormat()


@dataclass(frozen=True, repr=False)
class PlainWeight(Weight):
    """`values`: [outputs, inputs], or [E, outputs, inputs]."""

    values: torch.Tensor
    format: Format = PLAIN

    @property
    def shape(self) -> tuple[int, ...]:
        """As `Weight.shape`."""
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        """As `Weight.nbytes`."""
        return self.values.nbytes

    def __getitem__(self, index: slice | int) -> PlainWeight:
        """Some outputs of one weight; or some experts, or one."""
        return PlainWeight(self.values[index])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """As `Weight.dequantize`."""
        return self.values.to(dtype)


def pack_plain(weight: torch.Tensor) -> PackedWeight:
    """A plain weight as our kernels read it. `weight`: [outputs, inputs], or [E, outputs, inputs]; not copied."""
    outputs, inputs = weight.shape[-2:]
    experts = len(weight) if weight.dim() == 3 else 0
    none = weight.new_empty(1, 1, 1)
    return PackedWeight(
        PLAIN, weight.view(-1, outputs, inputs), none, outputs, inputs, inputs, 1, False, experts, False
    )
