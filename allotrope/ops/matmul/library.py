"""FP8 products by PyTorch's library, which takes scales of blocks of 128 x 128; for many rows, where it is faster."""

from __future__ import annotations

import torch

from allotrope.kernels.chip import chip_of, cuda_version
from allotrope.ops.matmul.packed_weight import PackedWeight
from allotrope.ops.matmul.triton_quantize import quantize_rows


def in_library(weight: PackedWeight) -> bool:
    """Whether the library knows products with this weight on its device."""
    return (
        weight.library_scales is not None
        and weight.padded_inputs == weight.inputs
        and weight.outputs % 16 == 0
        and chip_of(weight.values.device).has_wgmma
        # Scales of blocks came with CUDA 12.9.
        and cuda_version() >= (12, 9)
    )


def scaled_product(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """y = W x + b [T, outputs]. `x`: [T, inputs]. `out`: copied into, where it is given. Needs `in_library(weight)`."""
    from torch.nn.functional import ScalingType, scaled_mm

    # Rows in fours, and runs of a row far apart: the layout of scales that the library wants.
    values, scales = quantize_rows(x, whole=True)
    assert weight.library_scales is not None
    y = scaled_mm(
        values,
        weight.values[0].t(),
        scales,
        ScalingType.BlockWise1x128,
        weight.library_scales,
        ScalingType.BlockWise128x128,
        output_dtype=x.dtype,
    )
    if bias is not None:
        y += bias
    return y[: len(x)] if out is None else out.copy_(y[: len(x)])
