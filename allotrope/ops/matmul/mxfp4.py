"""MXFP4 weights: two 4-bit floats e2m1 a byte [.., outputs, inputs / 2], the even input in the low half; scales uint8,
the exponent of two plus 127, of groups of 32. Activations stay as they are. Source: OCP Microscaling Formats (MX) 1.0.

Packed for our kernels they lie in tiles of 64 rows by 128 inputs, each in one piece of memory: values four in an int16
[E or 1, outputs / 64, padded_inputs / 128, 64, 32], and scales plus 126, modulo 256, four in an int32
[E or 1, outputs / 64, padded_inputs / 128, 64].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from allotrope.kernels.chip import Chip, chip_of
from allotrope.ops.matmul.packed_weight import PackedWeight, multiplies_pairs
from allotrope.ops.matmul.weight import Format, QuantizedWeight, grouped, scale_groups

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of a 4-bit float: a sign, two bits of exponent, one of mantissa."""
FP4_GROUP = 32
SCALE_BIAS = 127
# The largest scale that leaves room for the 2^126 that come on top, for values come as 2^-126 of their worth.
_FAST_SCALES, _ON_TOP = 128, 126
# Inputs whose values lie in the same words: four groups; and rows that lie together, step by step of as many inputs.
WORD_INPUTS, TILE_ROWS = 4 * FP4_GROUP, 64


@dataclass(frozen=True)
class Mxfp4(Format):
    """Groups of 32."""

    group_size: int = FP4_GROUP

    name = "mxfp4"
    value_dtype = torch.uint8
    scale_dtype = torch.uint8
    pack_factor = 2

    def __post_init__(self) -> None:
        if self.group_size != FP4_GROUP:
            raise ValueError(f"mxfp4 has group_size={self.group_size} (needs {FP4_GROUP})")

    def dequantize(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """As `Format.dequantize`."""
        return scale_groups(unpack_fp4(values).float(), torch.exp2(scales.float() - SCALE_BIAS), FP4_GROUP)

    def quantize(self, weight: torch.Tensor, block_rows: int = 1) -> QuantizedWeight:
        """As `Format.quantize`."""
        numbers = grouped(weight, FP4_GROUP)
        # The largest value of the format is 6 = 1.5 * 2^2.
        exponents = torch.floor(torch.log2(numbers.abs().amax(-1).clamp(min=2.0**-100))) - 2
        known = torch.tensor(FP4_VALUES[:8], dtype=torch.float32, device=weight.device)
        edges = (known[1:] + known[:-1]) / 2
        scaled = (numbers / torch.exp2(exponents)[..., None]).contiguous()
        values = torch.bucketize(scaled.abs(), edges).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
        values = values.flatten(-2)[..., : weight.shape[-1]].unflatten(-1, (-1, 2))
        return QuantizedWeight(self, values[..., 0] | values[..., 1] << 4, (exponents + SCALE_BIAS).to(torch.uint8))

    def kernel_reasons(self, chip: Chip) -> list[str]:
        """As `Format.kernel_reasons`."""
        return []

    def pack(self, weight: QuantizedWeight) -> PackedWeight:
        """Pad to whole tiles, and put 4-bit values in the order of the kernel."""
        stacked = len(weight.shape) == 3
        outputs, inputs = weight.shape[-2:]
        values, scales = (weight.values, weight.scales) if stacked else (weight.values[None], weight.scales[None])
        width = -(-inputs // WORD_INPUTS) * WORD_INPUTS
        fast = int(scales.max()) <= _FAST_SCALES and multiplies_pairs(chip_of(scales.device))
        words, exponents = _tiles_of_words(values, width), _tiles_of_scales(scales, width)
        experts = len(values) if stacked else 0
        return PackedWeight(
            self, words.contiguous(), exponents.contiguous(), outputs, inputs, width, 1, False, experts, fast
        )

    def unpack(self, weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Format.unpack`."""
        count, blocks, steps = weight.values.shape[:3]
        words = weight.values.transpose(2, 3).reshape(count, blocks * TILE_ROWS, -1)
        numbers = _words().argsort().to(words.device, torch.int32)[words.int() & 0xFFFF]
        places = torch.stack([numbers >> 4 * offsets & 15 for offsets in range(4)], dim=-1)
        # A word holds number j of each of four groups.
        flat = places.unflatten(-2, (-1, FP4_GROUP)).transpose(-1, -2).flatten(-3).to(torch.uint8)
        scales = weight.scales.transpose(2, 3).contiguous().view(torch.uint8)
        return flat[..., ::2] | flat[..., 1::2] << 4, scales.view(count, blocks * TILE_ROWS, 4 * steps) - _ON_TOP

    def packed_bytes(self, shape: tuple[int, ...], shared: bool) -> tuple[int, int]:
        """As `Format.packed_bytes`."""
        *outer, outputs, inputs = shape
        rows = torch.Size(outer).numel() * -(-outputs // TILE_ROWS) * TILE_ROWS
        width = -(-inputs // WORD_INPUTS) * WORD_INPUTS
        return rows * width // 2, rows * width // FP4_GROUP


MXFP4 = Mxfp4()


def unpack_fp4(values: torch.Tensor) -> torch.Tensor:
    """Two 4-bit floats of each byte, the low half first. `values`: [..., n] uint8. Returns [..., 2 n] bf16."""
    known = torch.tensor(FP4_VALUES, dtype=torch.bfloat16, device=values.device)
    of_byte = torch.stack((known.repeat(16), known.repeat_interleave(16)), dim=-1)
    return of_byte[values.int()].flatten(-2)


def _tiles_of_words(values: torch.Tensor, width: int) -> torch.Tensor:
    """`values`: [E, outputs, bytes], whose memory is taken where tiles divide it: weights fill most of the memory."""
    count, outputs, half = values.shape
    blocks, steps = -(-outputs // TILE_ROWS), width // WORD_INPUTS
    whole = (outputs, 2 * half) == (blocks * TILE_ROWS, width) and values.is_contiguous()
    shape = (count, blocks, steps, TILE_ROWS, WORD_INPUTS // 4)
    tiles = values.view(torch.int16).view(shape) if whole else values.new_empty(shape, dtype=torch.int16)
    order = _words().to(values.device)
    for given, tile in zip(values, tiles, strict=True):
        rows = F.pad(given, (0, width // 2 - half, 0, blocks * TILE_ROWS - outputs))
        words = order[_groups_side_by_side(rows)]
        tile.copy_(words.view(blocks, TILE_ROWS, steps, -1).transpose(1, 2))
    return tiles


def _tiles_of_scales(scales: torch.Tensor, width: int) -> torch.Tensor:
    """`scales`: [E, outputs, groups]."""
    count, outputs, groups = scales.shape
    blocks = -(-outputs // TILE_ROWS)
    rows = F.pad(scales, (0, width // FP4_GROUP - groups, 0, blocks * TILE_ROWS - outputs))
    return (rows + _ON_TOP).view(torch.int32).view(count, blocks, TILE_ROWS, -1).transpose(2, 3).contiguous()


def _groups_side_by_side(values: torch.Tensor) -> torch.Tensor:
    """`values`: [.., n] bytes. Number j of each four groups, the first in the lowest bits of an int32 [.., n / 2]."""
    plain = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).unflatten(-1, (-1, 4, FP4_GROUP)).int()
    four = plain[..., 0, :] | plain[..., 1, :] << 4 | plain[..., 2, :] << 8 | plain[..., 3, :] << 12
    return four.flatten(-2)


def fields(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What each number of a word is taken from: its sign in bit 15, its exponent in 8 and 7, its mantissa in 6.

    `words`: int32 of 16 bits. No bit of a word is lost: together, the four numbers are the word in another form.
    """
    swapped = (words & 255) << 8 | words >> 8
    return words, swapped << 4, words << 2 ^ words << 6, words << 2 ^ swapped


@functools.cache
def _words() -> torch.Tensor:
    """The word of each four values, the first value in the lowest bits of its index: [65536] int16."""
    words = torch.arange(1 << 16, dtype=torch.int32)
    values = torch.zeros_like(words)
    for offsets, field in enumerate(fields(words)):
        values |= (field >> 12 & 8 | field >> 6 & 7) << 4 * offsets
    return values.argsort().to(torch.int16)
