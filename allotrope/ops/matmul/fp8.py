"""FP8 weights: values e4m3 [.., outputs, inputs], scales fp32.

On a GPU products round their activations to e4m3 as well, each group of 128 numbers of a row with a scale of its own:
the largest of the group becomes the largest e4m3. On a CPU they leave them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from allotrope.kernels.chip import Chip
from allotrope.kernels.triton_version import e4m3fn_reasons
from allotrope.ops.matmul.packed_weight import PackedWeight, padded
from allotrope.ops.matmul.weight import KERNEL_STEP, SHARED_ROWS, Format, QuantizedWeight, grouped, scale_groups

FP8_MAX = 448.0
"""The largest e4m3."""
ACTIVATION_GROUP = 128
# A group of zeros has this scale.
SMALLEST_SCALE = 1e-12


@dataclass(frozen=True)
class Fp8(Format):
    """Blocks of `rows` by `group_size` numbers share a scale. `fp8_activations`: whether products round these, too."""

    fp8_activations: bool = field(default=True, kw_only=True)

    name = "fp8"
    value_dtype = torch.float8_e4m3fn
    scale_dtype = torch.float32

    def dequantize(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """As `Format.dequantize`."""
        return scale_groups(values.float(), scales, self.group_size)

    def quantize(self, weight: torch.Tensor, block_rows: int = 1) -> QuantizedWeight:
        """As `Format.quantize`."""
        outputs, inputs = weight.shape[-2:]
        numbers = grouped(weight, self.group_size)
        largest = numbers.abs().amax(-1)
        if block_rows > 1:
            blocks = -(-outputs // block_rows)
            whole = F.pad(largest, (0, 0, 0, blocks * block_rows - outputs))
            shared = whole.unflatten(-2, (blocks, block_rows)).amax(-2)
            largest = shared.repeat_interleave(block_rows, dim=-2).narrow(-2, 0, outputs)
        scales = (largest / FP8_MAX).clamp(min=SMALLEST_SCALE)
        values = (numbers / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)[..., :inputs]
        return QuantizedWeight(self, values.contiguous(), scales)

    def kernel_reasons(self, chip: Chip) -> list[str]:
        """As `Format.kernel_reasons`."""
        reasons = e4m3fn_reasons("weights", self.value_dtype, chip)
        if self.group_size not in (0, ACTIVATION_GROUP):
            reasons.append(f"fp8 group_size={self.group_size} (needs {ACTIVATION_GROUP} or the whole row)")
        if not self.fp8_activations:
            reasons.append("fp8 weights with activations as they are (needs them rounded to e4m3)")
        return reasons

    def pack(self, weight: QuantizedWeight) -> PackedWeight:
        """Pad the inputs to whole steps, and join rows that share a scale."""
        weight = self.share_scales(weight)
        stacked = len(weight.shape) == 3
        outputs, inputs = weight.shape[-2:]
        values, scales = (weight.values, weight.scales) if stacked else (weight.values[None], weight.scales[None])
        width = -(-inputs // KERNEL_STEP) * KERNEL_STEP
        values = padded(values.view(torch.uint8), width).view(torch.float8_e4m3fn)
        blocks = None
        if weight.rows_per_scale == SHARED_ROWS and self.group_size == ACTIVATION_GROUP and not stacked:
            blocks = F.pad(scales[0], (0, -scales.shape[-1] % 4)).contiguous().t()
        return PackedWeight(
            self,
            values.contiguous(),
            scales.contiguous(),
            outputs,
            inputs,
            width,
            weight.rows_per_scale,
            self.group_size == 0,
            len(values) if stacked else 0,
            True,
            blocks,
        )

    def packed_bytes(self, shape: tuple[int, ...], shared: bool) -> tuple[int, int]:
        """As `Format.packed_bytes`."""
        values, scales = self.stored_bytes(shape, shared)
        return values // shape[-1] * (-(-shape[-1] // KERNEL_STEP) * KERNEL_STEP), scales

    def activations(self, x: torch.Tensor) -> torch.Tensor:
        """As `Format.activations`."""
        if not self.fp8_activations:
            return x.float()
        values, scales = quantize_rows(x)
        plain = values.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]
        return plain.flatten(1)[:, : x.shape[1]]

    def share_scales(self, weight: QuantizedWeight) -> QuantizedWeight:
        """The same weight with one scale for each 128 rows, if those of every such block are equal; else as it is."""
        scales = weight.scales
        if scales.shape[-2] % SHARED_ROWS or weight.rows_per_scale > 1:
            return weight
        blocks = scales.unflatten(-2, (-1, SHARED_ROWS))
        if not bool((blocks == blocks[..., :1, :]).all()):
            return weight
        # A copy: where there is one block, a view would hold the scales of all rows.
        shared = blocks[..., 0, :].clone(memory_format=torch.contiguous_format)
        return QuantizedWeight(self, weight.values, shared)

    def shares(self, *outputs: int) -> bool:
        """As `Format.shares`."""
        return self.rows % SHARED_ROWS == 0 and all(size % SHARED_ROWS == 0 for size in outputs)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations as e4m3 with a scale for each group of 128. The plain twin of `triton_quantize.quantize_rows`.

    `x`: [T, inputs]. Returns values [T, inputs rounded up to whole groups] and scales [T, groups] fp32.
    """
    tokens, inputs = x.shape
    groups = -(-inputs // ACTIVATION_GROUP)
    numbers = F.pad(x.float(), (0, groups * ACTIVATION_GROUP - inputs)).unflatten(1, (groups, -1))
    scales = (numbers.abs().amax(-1) / FP8_MAX).clamp(min=SMALLEST_SCALE)
    return (numbers / scales[..., None]).to(torch.float8_e4m3fn).view(tokens, -1), scales
