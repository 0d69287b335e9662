"""Work beside other work: the same numbers as one after the other, in graphs and without."""

from __future__ import annotations

import functools

import pytest
import torch

from allotrope.kernels.side_stream import MAX_OVERLAPPED_TOKENS, on_side_stream, overlap
from allotrope.ops.matmul import MATMUL
from allotrope.ops.matmul import pack_for_kernels as pack
from allotrope.ops.matmul.fp8 import Fp8


def test_waits_on_a_cpu_until_it_is_wanted() -> None:
    asked: list[int] = []
    wait = overlap(lambda: asked.append(1), torch.zeros(2, 3))
    assert not asked
    wait()
    assert asked == [1]
    assert not on_side_stream(torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("rows", [1, 64, MAX_OVERLAPPED_TOKENS + 1])
def test_products_that_share_inputs_do_not_meet(rows: int) -> None:
    """Both take programs that add up parts of one another, in memory that they leave as it was."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [pack(Fp8(128).quantize(torch.randn(512, 4096, generator=generator, device="cuda"))) for _ in range(2)]
    products = [functools.partial(MATMUL.backends[0].run, weight=weight) for weight in weights]
    x = torch.randn(rows, 4096, generator=generator, device="cuda").bfloat16()
    wanted = [product(x) for product in products]
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        wait = overlap(lambda: products[0](x), x)
        second = products[1](x)
        return wait(), second

    for _ in range(20):
        found.append(both())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [both() for _ in range(3)]
    graph.replay()
    torch.cuda.synchronize()
    for pair in (*found, *captured):
        assert all(torch.equal(one, whole) for one, whole in zip(pair, wanted, strict=True))
