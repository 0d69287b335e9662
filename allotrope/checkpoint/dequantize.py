"""Quantized checkpoints under the names that an unquantized release has: a weight and its scales read as one.

Owns the packings that released checkpoints use. What reads a weight plain never sees that it was quantized; what keeps
it quantized gets it as `ops.matmul` has it, with scales of each row, whatever rows shared them.

- `mxfp4` (gpt-oss): `X_blocks` [E, out, in / 32, 16] uint8, two 4-bit floats a byte, the even one in the low half;
  `X_scales` [E, out, in / 32] uint8, the exponent of two plus 127. Read as X [E, in, out], bf16, exactly.
  Source: OCP Microscaling Formats (MX) 1.0.
- `fp8`: a weight X [.., out, in] of float8, or of 4-bit floats packed as above into int8 [.., out, in / 2], with its
  scale: `X_scale_inv` or `X_scale`, and for `Y.weight` also `Y.scale`. A scale is one number, one per row, or one per
  block: of the config's size for float8, of 1 x 32 for 4 bits. Read as X, fp32. Scales of activations are not used:
  activations are rounded as they come.
- `int4`: eight 4-bit integers an int32 in `X_packed` [out, in / 8], bf16 scales in `X_scale` [out, groups], and X's
  shape in `X_shape`. Read as X, bf16. Source: `pack-quantized` of compressed-tensors.
- `online`: plain weights X, quantized one by one when they are read packed.
- blocks of a GGUF file, which have their scales inside. Read as X, fp32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch

from allotrope.checkpoint.checkpoint import Checkpoint, CheckpointView, TensorHeader
from allotrope.checkpoint.weight_formats import ONLINE, WeightFormats, weight_formats
from allotrope.errors import ModelError
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.gguf import no_scales
from allotrope.ops.matmul.int4 import NUMBERS, Int4, unpack_int4
from allotrope.ops.matmul.mxfp4 import FP4_GROUP, MXFP4, SCALE_BIAS, unpack_fp4
from allotrope.ops.matmul.weight import Format, scale_groups

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
PACKED_TYPES = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
# Of scales that are exponents alone.
POWER_TYPES = (torch.uint8, torch.float8_e8m0fnu)
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".output_scale")


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself if nothing in it is quantized, else a view of it with plain weights.

    Raises ModelError for a quantization that is not known.
    """
    formats = weight_formats(checkpoint.config, checkpoint.source)
    if checkpoint.has_weights and any(header.format is not None for header in checkpoint.headers().values()):
        return BlockCheckpoint(checkpoint)
    if formats is None or not checkpoint.has_weights:
        return checkpoint
    if formats.method == ONLINE:
        return PlainCheckpoint(checkpoint, formats)
    if formats.method == "mxfp4":
        return Mxfp4Checkpoint(checkpoint)
    if formats.has_int4:
        return Int4Checkpoint(checkpoint, formats)
    return Fp8Checkpoint(checkpoint, formats)


class QuantizedView(CheckpointView, ABC):
    """A checkpoint that hands out some tensors changed: `made` maps their names to their headers."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self.kept = inner.headers()
        self.made: dict[str, TensorHeader] = {}

    def headers(self) -> dict[str, TensorHeader]:
        """As `Checkpoint.headers`."""
        return self.kept | self.made

    @abstractmethod
    def format(self, name: str) -> Format | None:
        """The format that a tensor can be kept in; None for a plain one, and for what can only be read as one."""

    @abstractmethod
    def packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of a tensor that has a format, their dims in the order of the plain one's."""


class BlockCheckpoint(QuantizedView):
    """Tensors that are stored in blocks, as they are in the file."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self.made = {name: header for name, header in self.kept.items() if header.format is not None}

    def format(self, name: str) -> Format | None:
        """As `QuantizedView.format`."""
        return self.made[name].format if name in self.made else None

    def packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """As `QuantizedView.packed`."""
        values = self.inner.blocks(name)
        return values, no_scales(values)


class PlainCheckpoint(QuantizedView):
    """Plain weights, each quantized when it is asked for."""

    def __init__(self, inner: Checkpoint, formats: WeightFormats) -> None:
        super().__init__(inner)
        self.formats = formats

    def format(self, name: str) -> Format | None:
        """As `QuantizedView.format`: of matrices whose inputs are whole groups, and of experts in one tensor."""
        shape = self.kept[name].shape
        stacked = len(shape) == 3 and ".experts." in name
        # Such stacks with biases have the inputs before the outputs.
        if not (stacked and name + "_bias" not in self.kept) and not (len(shape) == 2 and name.endswith(".weight")):
            return None
        scheme = self.formats.scheme(name)
        return scheme.format if scheme is not None and self.formats.quantizes(scheme, shape[-1]) else None

    def packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """As `QuantizedView.packed`."""
        format = self.format(name)
        assert format is not None
        # Rows that share a scale all have it here: they are joined once a weight is whole.
        quantized = format.quantize(self.inner.read(name), max(format.rows, 1))
        return quantized.values, quantized.scales


class Mxfp4Checkpoint(QuantizedView):
    """`X_blocks` and `X_scales` as X."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        for name in [name for name in self.kept if name.endswith("_blocks")]:
            plain = name.removesuffix("_blocks")
            if plain + "_scales" not in self.kept:
                raise ModelError(inner.source, [f"{name} has no {plain}_scales beside it"])
            blocks, scales = self.kept.pop(name), self.kept.pop(plain + "_scales")
            *outer, out, runs, half = blocks.shape
            size = blocks.stored_bytes + scales.stored_bytes
            self.made[plain] = TensorHeader(plain, (*outer, runs * 2 * half, out), torch.bfloat16, size)

    def read(self, name: str) -> torch.Tensor:
        """As `Checkpoint.read`."""
        if name not in self.made:
            return self.inner.read(name)
        plain = unpack_mxfp4(self.inner.read(name + "_blocks"), self.inner.read(name + "_scales"))
        return plain.transpose(-1, -2)

    def format(self, name: str) -> Format | None:
        """As `QuantizedView.format`."""
        return MXFP4 if name in self.made else None

    def packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """As `QuantizedView.packed`."""
        codes = self.inner.read(name + "_blocks").flatten(-2)
        return codes.transpose(-1, -2), self.inner.read(name + "_scales").transpose(-1, -2)


class Fp8Checkpoint(QuantizedView):
    """Float8 weights, and packed 4-bit ones, times their scales."""

    def __init__(self, inner: Checkpoint, formats: WeightFormats) -> None:
        super().__init__(inner)
        self.formats = formats
        self.scale_of: dict[str, str] = {}
        self.stored = dict(self.kept)
        for name in list(self.kept):
            weight = _scaled_weight(name)
            if weight in self.kept and self.kept[weight].dtype in (*FP8_TYPES, *PACKED_TYPES):
                self.scale_of[weight] = name
        for name in [*self.scale_of.values(), *(name for name in self.kept if name.endswith(ACTIVATION_SCALES))]:
            del self.kept[name]
        bare = [name for name, header in self.kept.items() if header.dtype in FP8_TYPES and name not in self.scale_of]
        if bare:
            raise ModelError(inner.source, [f"{bare[0]} is float8 without a scale beside it ({len(bare)} such)"])
        for weight in self.scale_of:
            header = self.kept.pop(weight)
            *outer, inputs = header.shape
            shape = (*outer, inputs * 2 if header.dtype in PACKED_TYPES else inputs)
            self.made[weight] = TensorHeader(weight, shape, torch.float32, header.stored_bytes)

    def read(self, name: str) -> torch.Tensor:
        """As `Checkpoint.read`."""
        weight = self.inner.read(name)
        if name not in self.scale_of:
            return weight
        scale = self._scale(name)
        try:
            if weight.dtype in PACKED_TYPES:
                return scaled(unpack_fp4(weight.view(torch.uint8)), scale, (1, FP4_GROUP))
            return scaled(weight, scale, self.formats.block(name))
        except ValueError as error:
            raise ModelError(self.source, [f"{self.scale_of[name]}: {error}"]) from error

    def format(self, name: str) -> Format | None:
        """As `QuantizedView.format`: float8 e4m3, and 4-bit floats whose scales are powers of two by their type."""
        if name not in self.scale_of:
            return None
        weight, scale = self.stored[name], self.stored[self.scale_of[name]]
        if weight.dtype in PACKED_TYPES:
            return MXFP4 if scale.dtype in POWER_TYPES else None
        if weight.dtype != torch.float8_e4m3fn:
            return None
        # A scale per row is one per block where blocks are a row high, and one per tensor where it is one block.
        block = self.formats.block(name)
        blocks = [math.ceil(size / step) for size, step in zip(weight.shape[-2:], block, strict=False)]
        shape = list(scale.shape[::2] if len(scale.shape) == 4 else scale.shape[-2:])
        if blocks and shape == blocks:
            return Fp8(block[1], rows=block[0])
        return Fp8(0, rows=0 if math.prod(scale.shape) == 1 else 1)

    def packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """As `QuantizedView.packed`."""
        codes, scale = self.inner.read(name), self._scale(name)
        if codes.dtype in PACKED_TYPES:
            return codes.view(torch.uint8), scale.view(torch.uint8)
        try:
            return codes, row_scales(scale, tuple(codes.shape), self.formats.block(name))
        except ValueError as error:
            raise ModelError(self.source, [f"{self.scale_of[name]}: {error}"]) from error

    def _scale(self, name: str) -> torch.Tensor:
        """The scale of a weight; ModelOpt puts a dim of 1 behind each of those that count blocks."""
        scale = self.inner.read(self.scale_of[name])
        return scale[:, 0, :, 0] if scale.dim() == 4 and scale.shape[1::2] == (1, 1) else scale


class Int4Checkpoint(Fp8Checkpoint):
    """Beside float8 weights, 4-bit integers in `X_packed`, `X_scale` and `X_shape` as X."""

    def __init__(self, inner: Checkpoint, formats: WeightFormats) -> None:
        super().__init__(inner, formats)
        self.int4: dict[str, Int4] = {}
        for name in [name for name in self.kept if name.endswith(".weight_packed")]:
            plain = name.removesuffix("_packed")
            parts = [self.kept.pop(plain + end, None) for end in ("_packed", "_scale", "_shape")]
            packed, scale, _ = parts
            if packed is None or scale is None:
                raise ModelError(inner.source, [f"{name} has no {plain}_scale beside it"])
            *outer, words = packed.shape
            inputs, groups = words * NUMBERS, scale.shape[-1]
            stated = formats.scheme(plain)
            if stated is not None and isinstance(stated.format, Int4) and stated.format.groups(inputs) == groups:
                self.int4[plain] = stated.format
            else:
                self.int4[plain] = Int4(inputs // groups if groups > 1 else 0)
            size = packed.stored_bytes + scale.stored_bytes
            self.made[plain] = TensorHeader(plain, (*outer, inputs), scale.dtype, size)

    def read(self, name: str) -> torch.Tensor:
        """As `Checkpoint.read`: rounded to the type of the scales, as compressed-tensors does."""
        if name not in self.int4:
            return super().read(name)
        values, scales = self.packed(name)
        plain = scale_groups(unpack_int4(values).float(), scales.float(), self.int4[name].group_size)
        return plain.to(scales.dtype)

    def format(self, name: str) -> Format | None:
        """As `QuantizedView.format`: scales of other types than bf16 round otherwise."""
        if name not in self.int4:
            return super().format(name)
        return self.int4[name] if self.made[name].dtype == torch.bfloat16 else None

    def packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """As `QuantizedView.packed`."""
        if name not in self.int4:
            return super().packed(name)
        if name + "_shape" in self.inner.headers():
            shape = self.inner.read(name + "_shape").tolist()
            if shape != list(self.made[name].shape):
                found = f"{name}_shape is {shape}, and {name}_packed has {list(self.made[name].shape)} numbers"
                raise ModelError(self.source, [f"{found} (needs inputs that are a multiple of {NUMBERS})"])
        return self.inner.read(name + "_packed"), self.inner.read(name + "_scale")


def _scaled_weight(name: str) -> str | None:
    """The weight that a scale of this name belongs to."""
    for suffix in ("_scale_inv", "_scale"):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name.removesuffix(".scale") + ".weight" if name.endswith(".scale") else None


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`blocks`: [..., runs, 16] uint8. `scales`: [..., runs] uint8. Returns [..., runs * 32] bf16.

    Exact: a value has two significant bits and its scale is a power of two.
    """
    powers = torch.exp2(scales.float() - SCALE_BIAS).to(torch.bfloat16)
    return unpack_fp4(blocks).mul_(powers[..., None]).flatten(-2)


def row_scales(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, ...]) -> torch.Tensor:
    """Scales of a weight [..., out, in], one for each row and run of `block[1]` inputs (for the whole row where scales
    know no blocks): [..., out, runs] fp32.

    `scale`: one number, [out], [out, 1] or one per `block`; in uint8, powers of two. Raises ValueError if the scale has
    none of these shapes.
    """
    *outer, out, inputs = shape
    factors = torch.exp2(scale.float() - SCALE_BIAS) if scale.dtype == torch.uint8 else scale.float()
    if scale.numel() == 1:
        return factors.reshape(1, 1).expand(*outer, out, 1)
    if not outer and tuple(scale.shape) in ((out,), (out, 1)):
        return factors.reshape(-1, 1)
    if tuple(scale.shape) == (*outer, out, 1):
        return factors
    blocks = [*outer, *(math.ceil(size / step) for size, step in zip((out, inputs), block, strict=False))]
    if not block or list(scale.shape) != blocks:
        raise ValueError(f"shape {list(scale.shape)} for a weight of {list(shape)} (needs 1, {out} or {blocks})")
    return factors.repeat_interleave(block[0], dim=-2).narrow(-2, 0, out)


def scaled(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """`weight`: [..., out, in] times its scales (see `row_scales`), fp32."""
    factors = row_scales(scale, tuple(weight.shape), block)
    if factors.shape[-1] > 1:
        factors = factors.repeat_interleave(block[1], dim=-1).narrow(-1, 0, weight.shape[-1])
    return weight.float().mul_(factors)
