"""Capped logits by one kernel, against the same in double precision."""

from __future__ import annotations

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.layers.build import Build
from allotrope.layers.embedding import Head
from allotrope.ops.softcap.triton import softcap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cap", [30.0, 0.5])
def test_small_and_large_numbers(cap: float, dtype: torch.dtype) -> None:
    """Every size of number to a part in a million, on both sides of where the formula changes, in views as well."""
    torch.manual_seed(0)
    sizes = torch.cat((torch.logspace(-6, 4, 3001), torch.linspace(0.09, 0.11, 500), torch.zeros(1)))
    x = (cap * torch.cat((sizes, -sizes))).to(dtype).repeat(3, 1)
    exact = cap * torch.tanh(x.double() / cap)
    for given in (x, x.repeat(1, 2)[:, : x.shape[1]]):
        found = softcap(given.to(DEVICE), cap).cpu()
        assert found.dtype == torch.float32 and found.shape == x.shape
        torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=0.0)


def test_what_is_not_finite() -> None:
    found = softcap(torch.tensor([[torch.inf, -torch.inf, torch.nan]], device=DEVICE), 30.0).cpu()
    assert found[0, :2].tolist() == [30.0, -30.0] and bool(found[0, 2].isnan())


def test_no_rows() -> None:
    assert softcap(torch.zeros(0, 7, device=DEVICE), 30.0).shape == (0, 7)


@pytest.mark.parametrize("rows", [1, 64, 65])
def test_logits_of_a_bf16_model_are_not_rounded_on_a_gpu(rows: int) -> None:
    torch.manual_seed(0)
    head = Head(1500, 256, Build(dtype=torch.bfloat16, device=torch.device(DEVICE)), tied=None)
    assert head.weight is not None
    head.weight.data.copy_(torch.randn(1500, 256) / 16)
    weight, x = head.weight.data.double(), torch.randn(rows, 256, device=DEVICE).bfloat16()
    head.finish_loading()
    found, exact = head(x), x.double() @ weight.T
    assert found.dtype == torch.float32
    kept = DEVICE == "cuda" and torch.version.cuda is not None
    torch.testing.assert_close(found.double(), exact, rtol=1e-5 if kept else 8e-3, atol=1e-5 if kept else 8e-3)
