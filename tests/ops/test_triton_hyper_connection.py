"""Hyper-connections by kernels, against the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.check import KINDS, compare
from allotrope.ops.hyper_connection import HyperConnectionSpec, reference, triton

SPEC = HyperConnectionSpec(streams=4, hidden=344, iterations=3, eps=1e-6, norm_eps=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("streams", "min_prefill_tokens"), [(2, 1024), (4, 1024), (4, 18)])
def test_pre_and_post(
    streams: int, min_prefill_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens than one program takes, a width that fills neither a split nor a block; both tiles."""
    monkeypatch.setattr(triton, "MIN_PREFILL_TOKENS", min_prefill_tokens)
    monkeypatch.setattr(triton, "PREFILL_TILE", dataclasses.replace(triton.PREFILL_TILE, block_t=16))
    torch.manual_seed(0)
    spec, count = dataclasses.replace(SPEC, streams=streams), (2 + streams) * streams
    weights = torch.randn(count, streams * 344) / 20, torch.randn(count), torch.randn(3)
    # One wider token row behind another.
    x = torch.randn(18, streams + 1, 344).to(dtype)[:, :streams]
    y = torch.randn(18, 344).to(dtype)
    wanted = reference.hc_pre(spec, x.float(), *weights)
    found = triton.hc_pre(spec, x.to(DEVICE), *(one.to(DEVICE) for one in weights))
    for got, want in zip(found, wanted, strict=True):
        assert (judged := compare(got.cpu(), want, KINDS[dtype])), str(judged)
    post, comb = (part.to(dtype) for part in wanted[1:])
    got = triton.hc_post(y.to(DEVICE), x.to(DEVICE), post.to(DEVICE), comb.to(DEVICE))
    want = reference.hc_post(y.float(), x.float(), post.float(), comb.float())
    assert (judged := compare(got.cpu(), want, KINDS[dtype])), str(judged)
