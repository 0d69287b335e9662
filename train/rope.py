"""Rotary position embedding of every model that is trained: partial, interleaved, YaRN and proportional."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Rope:
    """`dim`: rotated dims. `rotated`: pairs whose frequency is not 0, or None for all (Gemma 4's proportional rope).

    `yarn`: the config's object, or None. `factor`: what cos and sin are multiplied by. `last`: whether the last dims of
    a head rotate, not the first.
    """

    dim: int
    theta: float
    interleaved: bool = False
    rotated: int | None = None
    yarn: tuple[tuple[str, Any], ...] | None = None
    factor: float = 1.0
    last: bool = False

    def frequencies(self) -> torch.Tensor:
        """[dim / 2] radians per position."""
        freq = self.theta ** -(torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        if self.rotated is not None:
            freq[self.rotated :] = 0
        return freq if self.yarn is None else self._stretched(freq, dict(self.yarn))

    def _stretched(self, freq: torch.Tensor, yarn: dict[str, Any]) -> torch.Tensor:
        def dim_of(rotations: float) -> float:
            length = yarn["original_max_position_embeddings"]
            return self.dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dim_of(yarn["beta_fast"]), dim_of(yarn["beta_slow"])
        if yarn.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = ((torch.arange(len(freq)) - low) / max(high - low, 0.001)).clamp(0, 1)
        return freq / yarn["factor"] * ramp + freq * (1 - ramp)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [T, dim / 2] fp32, of `positions` [T]."""
        angle = positions[:, None].float() * _on_device(self, positions.device)
        return angle.cos() * self.factor, angle.sin() * self.factor

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        """Rotates `x` [..., T, D] at `positions` [T], in fp32; the type stays."""
        cos, sin = self.angles(positions)
        if inverse:
            sin = -sin
        border = x.shape[-1] - self.dim if self.last else self.dim
        first, second = x[..., :border], x[..., border:]
        part = (second if self.last else first).float()
        if self.interleaved:
            a, b = part[..., ::2], part[..., 1::2]
            done = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = part.chunk(2, dim=-1)
            done = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        done = done.to(x.dtype)
        return torch.cat((first, done) if self.last else (done, second), dim=-1)


@functools.lru_cache(maxsize=64)
def _on_device(rope: Rope, device: torch.device) -> torch.Tensor:
    """Frequencies, copied once: no copy from the host may stand in a CUDA graph."""
    return rope.frequencies().to(device)


def yarn_scale(factor: float) -> float:
    """0.1 ln(factor) + 1."""
    return 0.1 * math.log(factor) + 1.0
