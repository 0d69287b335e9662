"""Streams mixed by kernels, against the same written plainly."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.check import KINDS, compare
from allotrope.layers.build import Build
from allotrope.layers.hyper_connection import HyperConnection, HyperConnectionSpec, expand
from allotrope.ops.hyper_connection import triton as fused

SPEC = HyperConnectionSpec(streams=4, hidden=344, iterations=3, eps=1e-6, norm_eps=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("streams", "many"), [(2, 1024), (4, 1024), (4, 18)])
def test_collapse_and_expand(streams: int, many: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than one program takes, a width that fills neither a run nor a block; tiles of few and of many."""
    monkeypatch.setattr(fused, "MANY_TOKENS", many)
    monkeypatch.setattr(fused, "MANY", dataclasses.replace(fused.MANY, tokens=16))
    torch.manual_seed(0)
    spec = HyperConnectionSpec(**vars(SPEC) | {"streams": streams})
    layer = HyperConnection(spec, Build())
    for weights in (layer.fn, layer.base, layer.scale):
        weights.data = torch.randn(weights.shape)
    layer.fn.data /= 20
    layer.finish_loading()
    # One wider token row behind another.
    x = torch.randn(18, streams + 1, 344).to(dtype)[:, :streams]
    y = torch.randn(18, 344).to(dtype)
    collapsed = layer.collapse(x.float())
    given = [t.data.to(DEVICE) for t in (layer.fn, layer.base, layer.scale)]
    found = fused.collapse(spec, x.to(DEVICE), *given)
    for got, want in zip(found, collapsed, strict=True):
        assert (judged := compare(got.cpu(), want, KINDS[dtype])), str(judged)
    post, comb = (part.to(dtype) for part in collapsed[1:])
    got = fused.expand(y.to(DEVICE), x.to(DEVICE), post.to(DEVICE), comb.to(DEVICE))
    want = expand(y.float(), x.float(), post.float(), comb.float())
    assert (judged := compare(got.cpu(), want, KINDS[dtype])), str(judged)
