"""Quantized checkpoints under the names that an unquantized release has: a weight and its scales read as one.

Owns the packings that released checkpoints use. What reads a weight plain never sees that it was quantized; what keeps
it quantized gets it as `layers.quant` has it, with scales of each row, whatever rows shared them.

- `mxfp4` (gpt-oss): `X_blocks` [E, out, in / 32, 16] uint8, two 4-bit floats a byte, the even one in the low half;
  `X_scales` [E, out, in / 32] uint8, the exponent of two plus 127. Read as X [E, in, out], bf16, exactly.
  Source: OCP Microscaling Formats (MX) 1.0.
- `fp8`: a weight X [.., out, in] of float8, or of 4-bit floats packed as above into int8 [.., out, in / 2], with its
  scale: `X_scale_inv` or `X_scale`, and for `Y.weight` also `Y.scale`. A scale is one number, one per row, or one per
  block: of `weight_block_size` for float8, of 1 x 32 for 4 bits. Read as X, fp32. Scales of activations are not used:
  activations are rounded as they come.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from allotrope.errors import ModelError
from allotrope.layers.quant.format import FP4_RUN, SCALE_BIAS, Format, unpack_fp4
from allotrope.models.checkpoint import Checkpoint, TensorHeader

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
PACKED_TYPES = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
# Methods whose weights are float8 (or packed 4-bit floats) with their scales beside them.
FP8_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "quark")
# Of scales that are exponents alone.
POWER_TYPES = (torch.uint8, torch.float8_e8m0fnu)
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".output_scale")


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself if nothing in it is quantized, else a view of it with plain weights.

    Raises ModelError for a quantization that is not known.
    """
    stated = quantization_of(checkpoint.config)
    if not stated or not checkpoint.has_weights:
        return checkpoint
    method = stated.get("quant_method")
    if method == "mxfp4":
        return Mxfp4Checkpoint(checkpoint)
    if method in FP8_METHODS:
        # What is stored says the rest: types that are not read here are refused by name.
        return Fp8Checkpoint(checkpoint, stated)
    allowed = ", ".join((*FP8_METHODS, "mxfp4"))
    raise ModelError(checkpoint.source, [f"quant_method={method!r} is not supported (allowed: {allowed})"])


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config's statement of how weights are quantized, {} for none."""
    stated = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return dict(stated or {})


class QuantizedView(ABC):
    """A checkpoint that hands out some tensors changed: `made` maps their names to their headers."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.source, self.config = inner.source, inner.config
        self.generation_config, self.tokenizer_path = inner.generation_config, inner.tokenizer_path
        self.has_weights = inner.has_weights
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
        """Codes and scales of a tensor that has a format, their dims in the order of the plain one's."""


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
        return Format("mxfp4", FP4_RUN) if name in self.made else None

    def packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """As `QuantizedView.packed`."""
        codes = self.inner.read(name + "_blocks").flatten(-2)
        return codes.transpose(-1, -2), self.inner.read(name + "_scales").transpose(-1, -2)


class Fp8Checkpoint(QuantizedView):
    """Float8 weights, and packed 4-bit ones, times their scales. `config`: the checkpoint's `quantization_config`."""

    def __init__(self, inner: Checkpoint, config: Mapping[str, Any]) -> None:
        super().__init__(inner)
        self.block = tuple(config.get("weight_block_size") or ())
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
        scale = self.inner.read(self.scale_of[name])
        try:
            if weight.dtype in PACKED_TYPES:
                return scaled(unpack_fp4(weight.view(torch.uint8)), scale, (1, FP4_RUN))
            return scaled(weight, scale, self.block)
        except ValueError as error:
            raise ModelError(self.source, [f"{self.scale_of[name]}: {error}"]) from error

    def format(self, name: str) -> Format | None:
        """As `QuantizedView.format`: float8 e4m3, and 4-bit floats whose scales are powers of two by their type."""
        if name not in self.scale_of:
            return None
        weight, scale = self.stored[name], self.stored[self.scale_of[name]]
        if weight.dtype in PACKED_TYPES:
            return Format("mxfp4", FP4_RUN) if scale.dtype in POWER_TYPES else None
        if weight.dtype != torch.float8_e4m3fn:
            return None
        # A scale per row is one per block where blocks are a row high, and one per tensor where it is one block.
        blocks = [math.ceil(size / step) for size, step in zip(weight.shape[-2:], self.block, strict=False)]
        return Format("fp8", self.block[1] if blocks and list(scale.shape[-2:]) == blocks else 0)

    def packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """As `QuantizedView.packed`."""
        codes, scale = self.inner.read(name), self.inner.read(self.scale_of[name])
        if codes.dtype in PACKED_TYPES:
            return codes.view(torch.uint8), scale.view(torch.uint8)
        try:
            return codes, row_scales(scale, tuple(codes.shape), self.block)
        except ValueError as error:
            raise ModelError(self.source, [f"{self.scale_of[name]}: {error}"]) from error


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
    if tuple(scale.shape) in ((out,), (out, 1)):
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
