"""INT4 weights (W4A16): eight integers an int32 [.., outputs, inputs / 8], the first in the lowest bits, 8 more than
the number; scales bf16. Activations stay as they are. Source: `pack-quantized` of compressed-tensors.

    w = bf16((q - 8) * scale)

is what its own decompression gives, and what every product here multiplies. Packed for our kernels, inputs are padded
to whole steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from allotrope.kernels.chip import Chip
from allotrope.ops.matmul.packed_weight import PackedWeight, padded
from allotrope.ops.matmul.weight import KERNEL_STEP, Format, QuantizedWeight, grouped, scale_groups

NUMBERS = 8
"""Integers of a word."""
OFFSET = 8


@dataclass(frozen=True)
class Int4(Format):
    """Symmetric groups of `group_size`."""

    name = "int4"
    value_dtype = torch.int32
    scale_dtype = torch.bfloat16
    pack_factor = NUMBERS

    def dequantize(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """As `Format.dequantize`: rounded to bf16, in fp32."""
        return scale_groups(unpack_int4(values).float(), scales.float(), self.group_size).bfloat16().float()

    def quantize(self, weight: torch.Tensor, block_rows: int = 1) -> QuantizedWeight:
        """As `Format.quantize`. The inputs are whole words."""
        numbers = grouped(weight, self.group_size)
        scales = (numbers.abs().amax(-1) / 7).clamp(min=2.0**-100).bfloat16()
        rounded = (numbers / scales[..., None].float()).round().clamp(-OFFSET, OFFSET - 1)
        return QuantizedWeight(self, pack_int4(rounded.flatten(-2)[..., : weight.shape[-1]].int()), scales)

    def kernel_reasons(self, chip: Chip) -> list[str]:
        """As `Format.kernel_reasons`."""
        size = self.group_size
        if size == 0 or size % KERNEL_STEP == 0 or size in (32, 64):
            return []
        return [f"int4 group_size={size} (needs 32, 64, a multiple of {KERNEL_STEP} or the whole row)"]

    def pack(self, weight: QuantizedWeight) -> PackedWeight:
        """Pad the inputs to whole steps."""
        stacked = len(weight.shape) == 3
        outputs, inputs = weight.shape[-2:]
        values, scales = (weight.values, weight.scales) if stacked else (weight.values[None], weight.scales[None])
        width = -(-inputs // KERNEL_STEP) * KERNEL_STEP
        return PackedWeight(
            self,
            padded(values, width // NUMBERS).contiguous(),
            padded(scales, self.groups(width)).contiguous(),
            outputs,
            inputs,
            width,
            1,
            self.group_size == 0,
            len(values) if stacked else 0,
            False,
        )

    def packed_bytes(self, shape: tuple[int, ...], shared: bool) -> tuple[int, int]:
        """As `Format.packed_bytes`."""
        *outer, inputs = shape
        return self.stored_bytes((*outer, -(-inputs // KERNEL_STEP) * KERNEL_STEP), shared)


def unpack_int4(values: torch.Tensor) -> torch.Tensor:
    """Eight integers of each word, the lowest bits first. `values`: [..., n] int32. Returns [..., 8 n] int32."""
    shifts = torch.arange(0, 4 * NUMBERS, 4, dtype=torch.int32, device=values.device)
    return ((values[..., None] >> shifts & 15) - OFFSET).flatten(-2)


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_int4`. `numbers`: [..., 8 n] int32 from -8 to 7."""
    words = (numbers + OFFSET).unflatten(-1, (-1, NUMBERS))
    packed = words[..., 0].clone()
    for offsets in range(1, NUMBERS):
        packed |= words[..., offsets] << 4 * offsets
    return packed
