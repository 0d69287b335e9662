"""Rotations: their frequencies with every released kind of scaling, and cos and sin of a step.

Sources: Su et al. 2021; Peng et al. 2023 (YaRN); the llama3 rule is Meta's release of Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

ScalingKind = Literal["none", "linear", "llama3", "yarn", "proportional"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How released checkpoints stretch the frequencies.

    `kind` "linear": all by 1/factor. "llama3": long wavelengths by 1/factor, with a ramp between the two frequency
    factors. "yarn": ramp between rotation counts `beta_fast` and `beta_slow` over `original_length` positions (bounds
    rounded outwards if `truncate`), cos and sin multiplied by `attention_factor`. "proportional": only the first
    `rotated` of the pairs rotate.
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

    @property
    def reach(self) -> int:
        """Positions that YaRN stretches the original ones to; 0 of others, which name none."""
        return int(self.factor * self.original_length) if self.kind == "yarn" else 0


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """One kind of rotation. `dim`: rotated dims R (even). `interleaved`: how dims pair up."""

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

    def map_tokens(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Rotation:
        """`change` of cos and of sin."""
        return Rotation(change(self.cos), change(self.sin), self.interleaved)

    def select(self, tokens: torch.Tensor) -> Rotation:
        """The rotation of some tokens. `tokens`: [n] indices."""
        return Rotation(self.cos[tokens], self.sin[tokens], self.interleaved)


@dataclass(frozen=True)
class ApplyRopeSpec:
    """`dtype`: of the heads, and of cos and sin."""

    dtype: torch.dtype
