"""Hyper-connections against the equations, one token and one stream at a time in float64."""

from __future__ import annotations

import math

import pytest
import torch

from allotrope.kernels.backend import Chooser
from allotrope.kernels.chip import CPU
from allotrope.layers.build import Build
from allotrope.layers.hyper_connection import HyperConnection, HyperHead
from allotrope.ops.hyper_connection import HyperConnectionSpec

SPEC = HyperConnectionSpec(streams=4, hidden=24, iterations=20, eps=1e-2, norm_eps=1e-6)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def filled(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


def mixes_of(module: torch.nn.Module, streams: torch.Tensor) -> list[float]:
    flat = streams.double().flatten()
    normed = flat / torch.sqrt((flat * flat).mean() + SPEC.norm_eps)
    return (module.get_parameter("fn").double() @ normed).tolist()


def direct(module: HyperConnection, streams: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the new streams of one token."""
    n, eps = SPEC.streams, SPEC.eps
    m, base, scale = mixes_of(module, streams), module.base.tolist(), module.scale.tolist()
    pre = [sigmoid(m[i] * scale[0] + base[i]) + eps for i in range(n)]
    post = [2 * sigmoid(m[n + j] * scale[1] + base[n + j]) for j in range(n)]
    c = [[math.exp(m[2 * n + i * n + j] * scale[2] + base[2 * n + i * n + j]) for j in range(n)] for i in range(n)]
    c = [[value / sum(row) + eps for value in row] for row in c]
    for step in range(2 * SPEC.iterations - 1):
        if step % 2 == 0:
            sums = [sum(c[i][j] for i in range(n)) + eps for j in range(n)]
            c = [[c[i][j] / sums[j] for j in range(n)] for i in range(n)]
        else:
            c = [[value / (sum(row) + eps) for value in row] for row in c]
    old = streams.double()
    x = sum(pre[i] * old[i] for i in range(n))
    new = torch.stack([post[j] * y.double() + sum(c[i][j] * old[i] for i in range(n)) for j in range(n)])
    assert isinstance(x, torch.Tensor)
    return x, new


@pytest.fixture(params=["chosen", "reference"])
def chooser(request: pytest.FixtureRequest) -> Chooser:
    """The backends that a CPU gets, and the reference."""
    return Chooser(CPU, {"hc_pre": "reference"} if request.param == "reference" else None)


def test_equals_the_equations(chooser: Chooser) -> None:
    module = filled(HyperConnection(SPEC, Build(chooser=chooser)))
    assert isinstance(module, HyperConnection)
    streams, y = torch.randn(5, 4, 24), torch.randn(5, 24)
    x, post, comb = module.pre(streams)
    new = module.post(y, streams, post, comb)
    for t in range(5):
        want_x, want_new = direct(module, streams[t], y[t])
        torch.testing.assert_close(x[t].double(), want_x, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(new[t].double(), want_new, atol=1e-5, rtol=1e-5)
    # The first index of C is the stream that is read: the other way round is another model.
    assert (new - module.post(y, streams, post, comb.transpose(1, 2))).abs().max() > 0.1


def test_one_iteration_divides_by_columns_only(chooser: Chooser) -> None:
    spec = HyperConnectionSpec(streams=4, hidden=24, iterations=1, eps=1e-6, norm_eps=1e-6)
    module = filled(HyperConnection(spec, Build(chooser=chooser)))
    assert isinstance(module, HyperConnection)
    _, _, comb = module.pre(torch.randn(3, 4, 24))
    torch.testing.assert_close(comb.sum(1), torch.ones(3, 4), atol=1e-3, rtol=0.0)
    assert (comb.sum(2) - 1).abs().max() > 0.05


def test_the_head_weighs_the_streams() -> None:
    module = filled(HyperHead(SPEC, Build()))
    streams = torch.randn(2, 4, 24)
    got = module(streams)
    for t in range(2):
        m = mixes_of(module, streams[t])
        base, scale = module.get_parameter("base").tolist(), float(module.get_parameter("scale"))
        want = sum((sigmoid(m[i] * scale + base[i]) + SPEC.eps) * streams[t, i].double() for i in range(4))
        torch.testing.assert_close(got[t].double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixing_weights_are_fp32_and_streams_keep_their_type(dtype: torch.dtype, chooser: Chooser) -> None:
    module = filled(HyperConnection(SPEC, Build(dtype=dtype, chooser=chooser)))
    assert isinstance(module, HyperConnection)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    x, post, comb = module.pre(torch.randn(2, 4, 24).to(dtype))
    assert x.dtype == post.dtype == comb.dtype == dtype
