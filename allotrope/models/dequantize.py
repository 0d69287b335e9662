"""Quantized checkpoints as if they were not: each packed weight and its scales read as one plain tensor.

Owns the packings that released checkpoints use. Everything after it (rules, sharding, compute) sees plain weights under
the names that an unquantized release of the model has.

- `mxfp4` (gpt-oss): `X_blocks` [E, out, in / 32, 16] uint8, two 4-bit floats a byte, the even one in the low half;
  `X_scales` [E, out, in / 32] uint8, the exponent of two plus 127. Read as X [E, in, out], bf16, exactly.
  Source: OCP Microscaling Formats (MX) 1.0.
- `fp8`: a weight X [.., out, in] of float8, or of 4-bit floats packed as above into int8 [.., out, in / 2], with its
  scale: `X_scale_inv` or `X_scale`, and for `Y.weight` also `Y.scale`. A scale is one number, one per row, or one per
  block: of `weight_block_size` for float8, of 1 x 32 for 4 bits. Read as X, fp32. Scales of activations are not used:
  nothing is quantized while computing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from allotrope.errors import ModelError
from allotrope.models.checkpoint import Checkpoint, TensorHeader

# Values of the 16 codes of a 4-bit float: a sign, two bits of exponent, one of mantissa.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP4_BLOCK = 32
SCALE_BIAS = 127
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
PACKED_TYPES = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".output_scale")


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself if nothing in it is quantized, else a view of it with plain weights.

    Raises ModelError for a quantization that is not known.
    """
    config = checkpoint.config
    stated = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not stated or not checkpoint.has_weights:
        return checkpoint
    method = stated.get("quant_method")
    if method == "mxfp4":
        return Mxfp4Checkpoint(checkpoint)
    if method == "fp8":
        return Fp8Checkpoint(checkpoint, stated)
    raise ModelError(checkpoint.source, [f"quant_method={method!r} is not supported (allowed: fp8, mxfp4)"])


class _View:
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


class Mxfp4Checkpoint(_View):
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


class Fp8Checkpoint(_View):
    """Float8 weights, and packed 4-bit ones, times their scales. `config`: the checkpoint's `quantization_config`."""

    def __init__(self, inner: Checkpoint, config: Mapping[str, Any]) -> None:
        super().__init__(inner)
        self.block = tuple(config.get("weight_block_size") or ())
        self.scale_of: dict[str, str] = {}
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
                return scaled(unpack_fp4(weight.view(torch.uint8)), scale, (1, FP4_BLOCK))
            return scaled(weight, scale, self.block)
        except ValueError as error:
            raise ModelError(self.source, [f"{self.scale_of[name]}: {error}"]) from error


def _scaled_weight(name: str) -> str | None:
    """The weight that a scale of this name belongs to."""
    for suffix in ("_scale_inv", "_scale"):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name.removesuffix(".scale") + ".weight" if name.endswith(".scale") else None


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Two 4-bit floats of each byte, the low half first. `packed`: [..., n] uint8. Returns [..., 2 n] bf16."""
    values = torch.tensor(FP4_VALUES, dtype=torch.bfloat16)
    of_byte = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
    return of_byte[packed.int()].flatten(-2)


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`blocks`: [..., runs, 16] uint8. `scales`: [..., runs] uint8. Returns [..., runs * 32] bf16.

    Exact: a value has two significant bits and its scale is a power of two.
    """
    powers = torch.exp2(scales.float() - SCALE_BIAS).to(torch.bfloat16)
    return unpack_fp4(blocks).mul_(powers[..., None]).flatten(-2)


def scaled(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """`weight`: [..., out, in]. `scale`: one number, [out], [out, 1] or one per `block`; in uint8, powers of two.

    Returns [..., out, in] fp32. Raises ValueError if the scale has none of these shapes.
    """
    out, inputs = weight.shape[-2:]
    factors = torch.exp2(scale.float() - SCALE_BIAS) if scale.dtype == torch.uint8 else scale.float()
    if scale.numel() == 1:
        return weight.float() * factors.reshape(())
    if tuple(scale.shape) in ((out,), (out, 1)):
        return weight.float() * factors.reshape(-1, 1)
    blocks = [*weight.shape[:-2], *(math.ceil(size / step) for size, step in zip((out, inputs), block, strict=False))]
    if not block or list(scale.shape) != blocks:
        raise ValueError(f"shape {list(scale.shape)} for a weight of {list(weight.shape)} (needs 1, {out} or {blocks})")
    for dim, step in zip((-2, -1), block, strict=True):
        factors = factors.repeat_interleave(step, dim=dim).narrow(dim, 0, weight.shape[dim])
    return weight.float().mul_(factors)
