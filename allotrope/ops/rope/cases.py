"""Cases of rotary position embedding: both layouts of pairs, heads that rotate whole and partly, far positions."""

from __future__ import annotations

from functools import partial

import torch

from allotrope.kernels.backend import Chooser
from allotrope.kernels.chip import CPU
from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.rope import ApplyRopeSpec, RopeScaling, RopeSpec, RopeTable, Rotation

POSITIONS = (0, 1, 7, 300, 8191, 131071, 1048575)
YARN = RopeScaling(kind="yarn", factor=40.0, original_length=4096, attention_factor=1.2)
SPECS = {
    "halves": RopeSpec(dim=16, theta=1e4),
    "interleaved": RopeSpec(dim=16, theta=1e4, interleaved=True),
    "some dims": RopeSpec(dim=12, theta=5e6),
    "some dims interleaved": RopeSpec(dim=6, theta=1e4, interleaved=True),
    "yarn": RopeSpec(dim=16, theta=1e4, scaling=YARN),
}


def rotation_of(spec: RopeSpec, tokens: int, dtype: torch.dtype, device: torch.device) -> Rotation:
    """Of the first `tokens` of `POSITIONS`, rounded from the reference on a CPU."""
    chooser = Chooser(CPU, {"rope_cos_sin": "reference"})
    exact = RopeTable(spec, torch.device("cpu"), chooser).at(torch.tensor(POSITIONS[:tokens]), torch.float32)
    return Rotation(exact.cos.to(device, dtype), exact.sin.to(device, dtype), spec.interleaved)


def _spec(spec: RopeSpec, dtype: torch.dtype) -> RopeSpec:
    return spec


def _cos_sin(
    spec: RopeSpec, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    table = RopeTable(spec, device)
    return torch.tensor(POSITIONS, device=device), table.freq, table.sign, table.factor, dtype


def _heads(spec: RopeSpec, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    """Heads that lie apart, as a slice of a projection has them."""
    x = Draw(generator, device)(dtype, len(POSITIONS), 5, 24)[:, 1:4, 8:]
    return x, rotation_of(spec, len(POSITIONS), dtype, device)


CASES: Cases = {
    "rope_cos_sin": {name: OpCase(partial(_spec, spec), partial(_cos_sin, spec)) for name, spec in SPECS.items()},
    "apply_rope": {name: OpCase(ApplyRopeSpec, partial(_heads, spec)) for name, spec in SPECS.items()},
}
