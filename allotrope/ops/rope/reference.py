"""Rotary position embedding: frequencies with every released kind of scaling, and the rotation itself.

For pair i of R rotated dims at position p, with f_i = theta^(-2i/R) before scaling:

    (x_a, x_b) -> (x_a cos(p f_i) - x_b sin(p f_i), x_b cos(p f_i) + x_a sin(p f_i))

Half-split pairs are (i, i + R/2); interleaved pairs are (2i, 2i + 1). Sources: Su et al. 2021; Peng et al. 2023 (YaRN);
the llama3 rule is Meta's release of Llama 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from allotrope.kernels.backend import lazily
from allotrope.kernels.chip import chip_of
from allotrope.kernels.triton_version import triton_reasons
from allotrope.ops.rope import cpu

_angles = lazily("allotrope.ops.rope.triton", "angles")

ScalingKind = Literal["none", "linear", "llama3", "yarn", "proportional"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How released checkpoints stretch the frequencies.

    `kind` "linear": all by 1/factor. "llama3": long wavelengths by 1/factor, with a ramp between the two frequency
    factors. "yarn": ramp between rotation counts `beta_fast` and `beta_slow` over `original_length` positions (bounds
    rounded outwards if `truncate`), cos and sin multiplied by `attention_factor`. "proportional": only the first
    `rotated` of the pairs turn.
    """

    kind: ScalingKind = "none"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    rotated: int = 0


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """One table of rotations. `dim`: rotated dims R (even). `interleaved`: how dims pair up."""

    dim: int
    theta: float
    interleaved: bool = False
    scaling: RopeScaling = RopeScaling()


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """[R/2] fp32 radians per position."""
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    freq = 1.0 / (spec.theta**exponent)
    s = spec.scaling
    if s.kind == "linear":
        return freq / s.factor
    if s.kind == "llama3":
        return _by_wavelength(freq, s)
    if s.kind == "yarn":
        return _yarn(freq, spec)
    if s.kind == "proportional":
        return torch.where(torch.arange(len(freq)) < s.rotated, freq / s.factor, 0.0)
    return freq


def _by_wavelength(freq: torch.Tensor, s: RopeScaling) -> torch.Tensor:
    wavelength = 2 * math.pi / freq
    smooth = (s.original_length / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    ramp = smooth.clamp(0.0, 1.0)
    return (1 - ramp) * freq / s.factor + ramp * freq


def _yarn(freq: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    s = spec.scaling

    def dim_of(rotations: float) -> float:
        return spec.dim * math.log(s.original_length / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dim_of(s.beta_fast), dim_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    ramp = ((torch.arange(len(freq)).float() - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return freq / s.factor * ramp + freq * (1 - ramp)


@dataclass(frozen=True)
class Rotation:
    """cos and sin of one step's positions, ready to multiply.

    `cos`, `sin`: [T, 1, R]; `sin` carries the sign of the pair's first half. `interleaved`: as in the spec.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def inverse(self) -> Rotation:
        """The rotation by the negative angle."""
        return Rotation(self.cos, -self.sin, self.interleaved)

    def select(self, tokens: torch.Tensor) -> Rotation:
        """The rotation of some tokens. `tokens`: [n] indices."""
        return Rotation(self.cos[tokens], self.sin[tokens], self.interleaved)


class RopeTable:
    """cos and sin of one `RopeSpec`, made per step from the positions: no table of the whole context is held.

    `freq`: [R] fp32 radians per position of each dim. `sign`: [R] fp32, of the sine, times `factor`, the cosine's.
    """

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self.spec = spec
        freq = inverse_frequencies(spec).to(device)
        self.freq = freq.repeat_interleave(2) if spec.interleaved else torch.cat((freq, freq))
        sign = torch.ones(spec.dim, dtype=torch.float32, device=device)
        sign[slice(0, None, 2) if spec.interleaved else slice(0, spec.dim // 2)] = -1.0
        self.factor = spec.scaling.attention_factor
        self.sign = self.factor * sign
        self._fused = not triton_reasons(chip_of(device))

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """`positions`: [T]. Angles are fp32; cos and sin are rounded to `dtype` once."""
        if self._fused:
            cos, sin = _angles(positions, self.freq, self.sign, self.factor, dtype)
            return Rotation(cos, sin, self.spec.interleaved)
        angle = positions.float()[:, None, None] * self.freq
        cos, sin = angle.cos() * self.factor, angle.sin() * self.sign
        return Rotation(cos.to(dtype), sin.to(dtype), self.spec.interleaved)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the first R dims of every head; the others pass through. `x`: [T, heads, D]. Returns a new tensor."""
    result = cpu.rotate(x, rotation.cos, rotation.sin, rotation.interleaved)
    if result is not None:
        return result
    dim = rotation.cos.shape[-1]
    head = x if dim == x.shape[-1] else x[..., :dim]
    if rotation.interleaved:
        swapped = head.unflatten(-1, (dim // 2, 2)).flip(-1).flatten(-2)
        turned = torch.addcmul(head * rotation.cos, swapped, rotation.sin).to(x.dtype)
    else:
        turned = head * rotation.cos
        half = dim // 2
        turned[..., :half].addcmul_(head[..., half:], rotation.sin[..., :half])
        turned[..., half:].addcmul_(head[..., :half], rotation.sin[..., half:])
        turned = turned.to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), dim=-1)
