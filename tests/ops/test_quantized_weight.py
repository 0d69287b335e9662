"""Quantized weights in numbers."""

from __future__ import annotations

import pytest
import torch

from allotrope.ops.matmul.quantized_weight import FP4_VALUES, Format, Quantized, quantize, shared_scales

BLOCK, CHANNEL, MXFP4 = Format("fp8", 128), Format("fp8", 0), Format("mxfp4", 32)


@pytest.mark.parametrize(("format", "rms"), [(BLOCK, 0.03), (CHANNEL, 0.03), (MXFP4, 0.15)], ids=str)
def test_the_nearest_code_is_near(format: Format, rms: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 130, 192)
    made = quantize(weight, format)
    assert made.shape == weight.shape
    error = (made.dequantized() - weight).norm() / weight.norm()
    assert error < rms
    again = quantize(made.dequantized(), format)
    assert torch.equal(again.dequantized(), made.dequantized())


def test_every_code_of_four_bits_counts_what_the_format_says() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    weight = Quantized(MXFP4, (codes | codes << 4).view(1, 16), torch.tensor([[130]], dtype=torch.uint8))
    assert weight.dequantized()[0, ::2].tolist() == [8 * value for value in FP4_VALUES]


def test_rows_that_share_scales_are_found_and_others_left() -> None:
    torch.manual_seed(0)
    weight = quantize(torch.randn(2, 256, 256), BLOCK, 128)
    joined = shared_scales(weight)
    assert joined.scales.shape == (2, 2, 2)
    assert torch.equal(joined.dequantized(), weight.dequantized())
    assert shared_scales(quantize(torch.randn(256, 256), BLOCK)).rows_per_scale == 1
