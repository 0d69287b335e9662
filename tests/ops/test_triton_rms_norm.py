"""Norms and activations in one launch, against the same in plain fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.check import KINDS, compare
from allotrope.ops.gated_activation import GatedActivation, reference
from allotrope.ops.gated_activation.triton import gated_activation, sigmoid_gate
from allotrope.ops.rms_norm.triton import add_rms_norm, gated_rms_norm, rms_norm

FLOOR = 0.1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def _plain(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + FLOOR) * factors


def _same(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.is_contiguous()
    assert (found := compare(got, want, KINDS[dtype])), str(found)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 100, 2880])
def test_norm(size: int, dtype: torch.dtype) -> None:
    """Rows cut out of wider ones, small enough for the floor to count."""
    x = _random(dtype, 5, size + 7)[:, 3 : 3 + size] / 16
    factors = 1 + _random(torch.float32, size)
    _same(rms_norm(x, factors, FLOOR), _plain(x, factors), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_residual_and_norm(inner: bool, scaled: bool, dtype: torch.dtype) -> None:
    """Each of the steps is rounded, as it is apart."""
    x, residual = _random(dtype, 7, 2 * 72)[:, :72], _random(dtype, 7, 72)
    factors, first = (1 + _random(torch.float32, 72) for _ in range(2))
    scale = torch.full((1,), 0.37, device=DEVICE).to(dtype) if scaled else None
    total, y = add_rms_norm(x, residual, factors, FLOOR, inner=first if inner else None, scale=scale)
    added = residual + (_plain(x, first).to(dtype) if inner else x)
    _same(total, (added * scale if scale is not None else added).float(), dtype)
    _same(y, _plain(total, factors), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["silu", "sigmoid"])
def test_gated_norm_of_heads(kind: str, dtype: torch.dtype) -> None:
    """x of one type, a gate cut out of a projection."""
    x = _random(dtype, 5, 3, 16)
    gate = _random(dtype, 5, 3 * 16 + 8)[:, 8:]
    z = gate.unflatten(1, (3, 16))
    factors = 1 + _random(torch.float32, 16)
    opened = F.silu(z.float()) if kind == "silu" else torch.sigmoid(z.float())
    _same(gated_rms_norm(x, factors, FLOOR, gate, kind), (_plain(x, factors) * opened).flatten(1), dtype)


def test_a_row_alone_is_the_row_in_company() -> None:
    x, residual, factors = _random(torch.bfloat16, 9, 96), _random(torch.bfloat16, 9, 96), _random(torch.float32, 96)
    whole, alone = add_rms_norm(x, residual, factors, FLOOR), add_rms_norm(x[4:5], residual[4:5], factors, FLOOR)
    assert all(torch.equal(a[4:5], b) for a, b in zip(whole, alone, strict=True))


def test_nothing_in_nothing_out() -> None:
    assert rms_norm(_random(torch.float32, 0, 8), None, FLOOR).shape == (0, 8)
    assert gated_activation(_random(torch.float32, 0, 8), GatedActivation()).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "gating",
    [
        GatedActivation(),
        GatedActivation(activation="gelu_tanh"),
        GatedActivation(limit=1.5),
        GatedActivation(slope=1.702, limit=1.0, offset=1.0),
    ],
    ids=str,
)
def test_activation(gating: GatedActivation, dtype: torch.dtype) -> None:
    """Widths that fill no block; rows cut out of wider ones."""
    for width in (4, 129, 1100):
        gate_up = 2 * _random(dtype, 3, 2 * width + 8)[:, 8:]
        got = gated_activation(gate_up, gating)
        _same(got, reference.gated_activation(gate_up.float(), gating), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_beside(dtype: torch.dtype) -> None:
    """Both cut out of wider rows."""
    x, gate = _random(dtype, 3, 200)[:, 20:150], _random(dtype, 3, 300)[:, :130]
    _same(sigmoid_gate(x, gate), x.float() * torch.sigmoid(gate.float()), dtype)
