"""Quantized weights in numbers."""

from __future__ import annotations

import pytest
import torch

from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.mxfp4 import FP4_VALUES, MXFP4
from allotrope.ops.matmul.weight import Format, QuantizedWeight

BLOCK, CHANNEL = Fp8(128), Fp8(0)


@pytest.mark.parametrize(("format", "rms"), [(BLOCK, 0.03), (CHANNEL, 0.03), (MXFP4, 0.15)], ids=str)
def test_the_nearest_code_is_near(format: Format, rms: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 130, 192)
    made = format.quantize(weight)
    assert made.shape == weight.shape
    error = (made.dequantize() - weight).norm() / weight.norm()
    assert error < rms
    again = format.quantize(made.dequantize())
    assert torch.equal(again.dequantize(), made.dequantize())


def test_every_code_of_four_bits_counts_what_the_format_says() -> None:
    values = torch.arange(16, dtype=torch.uint8)
    weight = QuantizedWeight(MXFP4, (values | values << 4).view(1, 16), torch.tensor([[130]], dtype=torch.uint8))
    assert weight.dequantize()[0, ::2].tolist() == [8 * value for value in FP4_VALUES]


def test_rows_that_share_scales_are_found_and_others_left() -> None:
    torch.manual_seed(0)
    weight = BLOCK.quantize(torch.randn(2, 256, 256), 128)
    joined = BLOCK.share_scales(weight)
    assert joined.scales.shape == (2, 2, 2)
    assert torch.equal(joined.dequantize(), weight.dequantize())
    assert BLOCK.share_scales(BLOCK.quantize(torch.randn(256, 256))).rows_per_scale == 1
