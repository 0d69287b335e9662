"""Queries and one key rotated by one kernel, against the reference."""

from __future__ import annotations

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.check import KINDS, compare
from allotrope.ops.mla_rope import LayerNorm, reference, triton
from allotrope.ops.rope import RopeScaling, RopeSpec, RopeTable

ROPES = {
    "halves": RopeSpec(dim=16, theta=1e4),
    "interleaved": RopeSpec(dim=16, theta=1e4, interleaved=True),
    "some dims": RopeSpec(dim=8, theta=1e4),
    "some dims interleaved": RopeSpec(dim=8, theta=1e4, interleaved=True),
    "stretched": RopeSpec(dim=12, theta=1e4, scaling=RopeScaling(kind="linear", factor=8.0, attention_factor=1.3)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [0, 1, 5, 70])
@pytest.mark.parametrize("name", ROPES)
def test_heads_and_one_more(name: str, heads: int, dtype: torch.dtype) -> None:
    """Both are columns of wider tensors; more heads than a program takes; with and without a norm of the last one."""
    torch.manual_seed(0)
    rope, dim = ROPES[name], 16
    wide, row = torch.randn(3, heads, dim + 8).to(dtype), torch.randn(3, dim + 24).to(dtype)
    positions = torch.tensor([0, 977, 131071])
    norm = LayerNorm(1 + torch.randn(dim) / 4, torch.randn(dim), 1e-6)
    for used in (None, norm):
        exact = RopeTable(rope, torch.device("cpu")).at(positions, torch.float32)
        want = reference.mla_rope(wide[..., 8:].float(), row[:, 24:].float(), exact, used)
        rotation = RopeTable(rope, torch.device(DEVICE)).at(positions.to(DEVICE), dtype)
        there = None if used is None else LayerNorm(used.weight.to(DEVICE), used.bias.to(DEVICE), used.eps)
        got = triton.mla_rope(wide.to(DEVICE)[..., 8:], row.to(DEVICE)[:, 24:], rotation, there)
        assert got.is_contiguous() and got.dtype == dtype
        assert (found := compare(got.cpu(), want, KINDS[dtype])), str(found)


def test_no_tokens() -> None:
    rotation = RopeTable(ROPES["halves"], torch.device(DEVICE)).at(torch.zeros(0, device=DEVICE), torch.bfloat16)
    heads = torch.zeros(0, 4, 16, dtype=torch.bfloat16, device=DEVICE)
    assert triton.mla_rope(heads, heads[:, 0], rotation).shape == (0, 5, 16)
