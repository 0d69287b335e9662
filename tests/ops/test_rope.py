"""The rotation against complex numbers in float64, in the form that this machine takes and in PyTorch's."""

from __future__ import annotations

import pytest
import torch

from allotrope.kernels.backend import choose
from allotrope.kernels.chip import CPU as CPU_CHIP
from allotrope.ops.rope import APPLY_ROPE, ApplyRopeSpec, RopeSpec, RopeTable

CPU = torch.device("cpu")
POSITIONS = torch.tensor([0, 1, 7, 300])


@pytest.mark.parametrize("wanted", [None, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("dim", "rotated"), [(16, 16), (48, 32), (24, 6)])
def test_rotation_is_a_product_of_complex_numbers(
    dim: int, rotated: int, interleaved: bool, dtype: torch.dtype, wanted: str | None
) -> None:
    backend = choose(APPLY_ROPE, ApplyRopeSpec(dtype), CPU_CHIP, wanted).backend
    spec = RopeSpec(dim=rotated, theta=100.0, interleaved=interleaved)
    wide = torch.randn(len(POSITIONS), 5, dim + 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    # Heads that lie apart, as a slice of a projection has them.
    x = wide[:, 1:4, 8:]
    found = backend.run(x, RopeTable(spec, CPU).at(POSITIONS, dtype)).double()
    head = x[..., :rotated].double()
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
    angle = POSITIONS[:, None, None] * 100.0 ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    product = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    want = torch.view_as_real(product)
    want = want.flatten(-2) if interleaved else want.transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(found[..., :rotated], want, rtol=0.0, atol=1e-4 if dtype == torch.float32 else 4e-2)
    assert torch.equal(found[..., rotated:], x[..., rotated:].double())
