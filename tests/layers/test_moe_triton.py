"""Rows times the weights of their experts, against a loop over experts."""

from __future__ import annotations

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.check import KINDS, compare
from allotrope.layers.moe_triton import grouped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes", [[5, 0, 17, 1, 0, 16], [0, 0, 1], [40], [0, 33, 0, 0, 2]], ids=lambda sizes: "-".join(map(str, sizes))
)
def test_every_row_meets_its_own_expert(sizes: list[int], dtype: torch.dtype) -> None:
    """Empty experts, whole and broken tiles, odd widths, rows cut out of wider ones; nothing beyond is read."""
    torch.manual_seed(0)
    inputs, outputs = 50, 41
    x = torch.full((sum(sizes) + 3, inputs + 6), torch.nan, device=DEVICE).to(dtype)
    rows = x[: sum(sizes), :inputs]
    rows.copy_(torch.randn(rows.shape))
    weights = (torch.randn(len(sizes), outputs, inputs, device=DEVICE) / 7).to(dtype)
    ends = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
    want = torch.cat([r.float() @ w.float().T for r, w in zip(rows.split(sizes), weights, strict=True)])
    got = grouped(rows, weights, ends)
    assert (found := compare(got, want, KINDS[dtype])), str(found)
    # A row's result does not depend on its neighbours.
    last = [index for index, size in enumerate(sizes) if size][-1]
    alone = grouped(rows[-1:], weights, (torch.arange(len(sizes), device=DEVICE) >= last).int())
    assert torch.equal(alone[0], got[-1])
