"""The table of rotations made by a kernel, against fp64."""

from __future__ import annotations

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.ops.rope import RopeScaling, RopeSpec, RopeTable
from allotrope.ops.rope.triton import rope_cos_sin

YARN = RopeScaling(kind="yarn", factor=40.0, original_length=4096, attention_factor=1.2)
SPECS = (
    RopeSpec(dim=64, theta=1e4),
    RopeSpec(dim=12, theta=5e6, interleaved=True),
    RopeSpec(dim=64, theta=1e4, interleaved=True, scaling=YARN),
)
# Every quarter of a turn, and positions as far as contexts reach.
POSITIONS = torch.tensor([*range(23), 1000, 8191, 131071, 1048575, 10_000_019])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.dim} {spec.scaling.kind}")
def test_every_quarter_and_far_positions(spec: RopeSpec) -> None:
    """To a few units in the last place of fp32, of the angle that fp32 holds."""
    table = RopeTable(spec, torch.device("cpu"))
    exact = (POSITIONS.float()[:, None] * table.freq).double()
    given = [t.to(DEVICE) for t in (POSITIONS, table.freq, table.sign)]
    cos, sin = rope_cos_sin(*given, table.factor, torch.float32)
    assert cos.shape == sin.shape == (len(POSITIONS), 1, spec.dim)
    for got, want in ((cos, exact.cos() * table.factor), (sin, exact.sin() * table.sign)):
        assert (got[:, 0].cpu() - want).abs().max() < 3e-7


def test_rounded_once() -> None:
    table = RopeTable(SPECS[0], torch.device("cpu"))
    given = [t.to(DEVICE) for t in (POSITIONS, table.freq, table.sign)]
    for rounded, whole in zip(
        rope_cos_sin(*given, table.factor, torch.bfloat16),
        rope_cos_sin(*given, table.factor, torch.float32),
        strict=True,
    ):
        assert torch.equal(rounded, whole.bfloat16())
