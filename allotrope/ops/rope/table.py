"""cos and sin of a step's positions: no table of the whole context is held."""

from __future__ import annotations

import torch

from allotrope.kernels.backend import Chooser
from allotrope.kernels.chip import chip_of
from allotrope.ops.rope.op import ROPE_COS_SIN
from allotrope.ops.rope.spec import RopeSpec, Rotation, inverse_frequencies


class RopeTable:
    """cos and sin of one `RopeSpec`, made per step from the positions.

    `freq`: [R] fp32 radians per position of each dim. `sign`: [R] fp32, of the sine, times `factor`, the cosine's.
    """

    def __init__(self, spec: RopeSpec, device: torch.device, chooser: Chooser | None = None) -> None:
        """`chooser`: of the backend; None for one of the device's own chip."""
        self.spec = spec
        freq = inverse_frequencies(spec).to(device)
        self.freq = freq.repeat_interleave(2) if spec.interleaved else torch.cat((freq, freq))
        sign = torch.ones(spec.dim, dtype=torch.float32, device=device)
        sign[slice(0, None, 2) if spec.interleaved else slice(0, spec.dim // 2)] = -1.0
        self.factor = spec.scaling.attention_factor
        self.sign = self.factor * sign
        self._cos_sin = (chooser or Chooser(chip_of(device))).choose(ROPE_COS_SIN, spec).run

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """`positions`: [T]. Angles are fp32; cos and sin are rounded to `dtype` once."""
        cos, sin = self._cos_sin(positions, self.freq, self.sign, self.factor, dtype)
        return Rotation(cos, sin, self.spec.interleaved)


class RopeTables:
    """The tables of one model, each made when a step first asks for it.

    A layer asks its chooser for `ROPE_COS_SIN` when it is built, so that the choice is known, and refused, at load.
    """

    def __init__(self, device: torch.device, chooser: Chooser | None = None) -> None:
        self._device = device
        self._chooser = chooser or Chooser(chip_of(device))
        self._tables: dict[RopeSpec, RopeTable] = {}

    def __getitem__(self, spec: RopeSpec) -> RopeTable:
        if spec not in self._tables:
            self._tables[spec] = RopeTable(spec, self._device, self._chooser)
        return self._tables[spec]
