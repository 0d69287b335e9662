"""Weights as codes and scales: w[o, i] = value(code[o, i]) * scale[o, i // run].

Owns the formats, what they are worth in numbers, and the activations that FP8 products are made with. Must not
know layers or checkpoints. A scale per row makes every cut, fusion and reordering of rows the same for codes and
scales; blocks of rows that share one are found again once a weight is whole.

- `fp8`: code e4m3 [.., outputs, inputs], scale fp32. Activations are rounded to e4m3 as well, each run of 128 numbers
  of a row with a scale of its own: the largest of the run becomes the largest e4m3.
- `mxfp4`: two codes e2m1 a byte [.., outputs, inputs / 2], the even input in the low half; scale uint8, the exponent of
  two plus 127; runs of 32. Activations stay as they are. Source: OCP Microscaling Formats (MX) 1.0.
- `int4`: eight codes an int32 [.., outputs, inputs / 8], the first in the lowest bits, 8 more than the number; scale
  bf16. It is planned alone: no product reads it. Source: `pack_quantized` of compressed-tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from allotrope.attention.mla.rows import FP8_MAX

Kind = Literal["fp8", "mxfp4", "int4"]

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of a 4-bit float: a sign, two bits of exponent, one of mantissa."""
FP4_RUN = 32
SCALE_BIAS = 127
ACTIVATION_RUN = 128
# Rows of a block that may share a scale.
SHARED_ROWS = 128
# A run of zeros has this scale.
SMALLEST_SCALE = 1e-12


@dataclass(frozen=True)
class Format:
    """`run`: inputs that share a scale; 0: all of a row. `rows`: rows of the stored weight that do; 0: all of them."""

    kind: Kind
    run: int
    rows: int = 1

    def __post_init__(self) -> None:
        if self.kind == "mxfp4" and self.run != FP4_RUN:
            raise ValueError(f"mxfp4 has run={self.run} (needs {FP4_RUN})")

    @property
    def code_dtype(self) -> torch.dtype:
        return {"fp8": torch.float8_e4m3fn, "mxfp4": torch.uint8, "int4": torch.int32}[self.kind]

    @property
    def scale_dtype(self) -> torch.dtype:
        return {"fp8": torch.float32, "mxfp4": torch.uint8, "int4": torch.bfloat16}[self.kind]

    @property
    def packed(self) -> int:
        """Codes in an element."""
        return {"fp8": 1, "mxfp4": 2, "int4": 8}[self.kind]

    def shares(self, *outputs: int) -> bool:
        """Whether `SHARED_ROWS` rows share a scale once sections of so many outputs are one weight."""
        whole = self.kind == "fp8" and self.rows % SHARED_ROWS == 0
        return whole and all(size % SHARED_ROWS == 0 for size in outputs)

    def runs(self, inputs: int) -> int:
        """Scales of a row of `inputs` numbers."""
        return -(-inputs // self.run) if self.run else 1


@dataclass(frozen=True)
class Quantized:
    """`codes`: [.., outputs, inputs / packed]. `scales`: [.., outputs, runs], or [.., outputs / b, runs] where each b
    rows share theirs.
    """

    format: Format
    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the plain weight."""
        *outer, inputs = self.codes.shape
        return (*outer, inputs * self.format.packed)

    @property
    def rows_per_scale(self) -> int:
        return -(-self.codes.shape[-2] // self.scales.shape[-2])

    def __getitem__(self, rows: slice) -> Quantized:
        """Some outputs of one weight whose rows have scales of their own."""
        return Quantized(self.format, self.codes[rows], self.scales[rows])

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The plain weight, computed in fp32 and rounded to `dtype`."""
        scales = self.scales
        if self.format.kind == "mxfp4":
            weight, scales = unpack_fp4(self.codes), torch.exp2(scales.float() - SCALE_BIAS)
        else:
            weight = self.codes.float()
        outputs, inputs = weight.shape[-2:]
        if self.rows_per_scale > 1:
            scales = scales.repeat_interleave(self.rows_per_scale, dim=-2).narrow(-2, 0, outputs)
        if self.format.run:
            scales = scales.repeat_interleave(self.format.run, dim=-1).narrow(-1, 0, inputs)
        return weight.float().mul_(scales).to(dtype)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Two 4-bit floats of each byte, the low half first. `packed`: [..., n] uint8. Returns [..., 2 n] bf16."""
    values = torch.tensor(FP4_VALUES, dtype=torch.bfloat16, device=packed.device)
    of_byte = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
    return of_byte[packed.int()].flatten(-2)


def shared_scales(weight: Quantized, rows: int = SHARED_ROWS) -> Quantized:
    """The same weight with one scale for each `rows` rows, if those of every such block are equal; else as it is."""
    scales = weight.scales
    outputs = scales.shape[-2]
    if weight.format.kind != "fp8" or outputs % rows or weight.rows_per_scale > 1:
        return weight
    blocks = scales.unflatten(-2, (-1, rows))
    if not bool((blocks == blocks[..., :1, :]).all()):
        return weight
    # A copy: where there is one block, a view would hold the scales of all rows.
    return Quantized(weight.format, weight.codes, blocks[..., 0, :].clone(memory_format=torch.contiguous_format))


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations as e4m3 with a scale for each run of 128. The plain twin of `triton_quantize.quantize_rows`.

    `x`: [T, inputs]. Returns codes [T, inputs rounded up to whole runs] and scales [T, runs] fp32.
    """
    tokens, inputs = x.shape
    runs = -(-inputs // ACTIVATION_RUN)
    padded = torch.nn.functional.pad(x.float(), (0, runs * ACTIVATION_RUN - inputs)).unflatten(1, (runs, -1))
    scales = (padded.abs().amax(-1) / FP8_MAX).clamp(min=SMALLEST_SCALE)
    return (padded / scales[..., None]).to(torch.float8_e4m3fn).view(tokens, -1), scales


def as_multiplied(x: torch.Tensor, kind: Kind) -> torch.Tensor:
    """`x` [T, inputs] as a product with weights of `kind` sees it, fp32."""
    if kind == "mxfp4":
        return x.float()
    codes, scales = quantize_rows(x)
    plain = codes.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]
    return plain.flatten(1)[:, : x.shape[1]]


def quantize(weight: torch.Tensor, format: Format, block_rows: int = 1) -> Quantized:
    """The nearest weight of a format. `weight`: [.., outputs, inputs]. `block_rows`: rows that share a scale."""
    outputs, inputs = weight.shape[-2:]
    run = format.run or inputs
    runs = -(-inputs // run)
    padded = torch.nn.functional.pad(weight.float(), (0, runs * run - inputs)).unflatten(-1, (runs, run))
    largest = padded.abs().amax(-1)
    if format.kind == "mxfp4":
        # The largest value of the format is 6 = 1.5 * 2^2.
        exponents = torch.floor(torch.log2(largest.clamp(min=2.0**-100))) - 2
        values = torch.tensor(FP4_VALUES[:8], dtype=torch.float32, device=weight.device)
        edges = (values[1:] + values[:-1]) / 2
        scaled = (padded / torch.exp2(exponents)[..., None]).contiguous()
        codes = torch.bucketize(scaled.abs(), edges).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
        codes = codes.flatten(-2)[..., :inputs].unflatten(-1, (-1, 2))
        return Quantized(format, codes[..., 0] | codes[..., 1] << 4, (exponents + SCALE_BIAS).to(torch.uint8))
    if block_rows > 1:
        blocks = -(-outputs // block_rows)
        whole = torch.nn.functional.pad(largest, (0, 0, 0, blocks * block_rows - outputs))
        shared = whole.unflatten(-2, (blocks, block_rows)).amax(-2)
        largest = shared.repeat_interleave(block_rows, dim=-2).narrow(-2, 0, outputs)
    scales = (largest / FP8_MAX).clamp(min=SMALLEST_SCALE)
    codes = (padded / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)[..., :inputs]
    return Quantized(format, codes.contiguous(), scales)
