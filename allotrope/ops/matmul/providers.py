"""Products on a GPU: the measured launch of a shape says which provider multiplies it.

The providers are our Triton kernels for one weight and for many (`triton.py`; `triton_sliced_k.py` for few rows),
PyTorch's products (`library.py` for FP8, `torch.mm`), and on Hopper the warp-specialized Gluon kernels: Stream-K for
one FP8 weight (`gluon_fp8.py`), and for many rows of experts (`gluon_experts_fp8.py`, `gluon_experts_fp4.py`). Must not
know layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from allotrope.kernels.chip import chip_of
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.matmul import gluon_experts_fp4, gluon_experts_fp8, gluon_fp8, triton_sliced_k
from allotrope.ops.matmul.launch import FEW_PLAIN_ROWS, Launch, Shape, launch_for, tuned_name, within
from allotrope.ops.matmul.library import in_library, scaled_product
from allotrope.ops.matmul.packed_weight import PackedWeight
from allotrope.ops.matmul.plain import PLAIN
from allotrope.ops.matmul.tile_tables import TileTables
from allotrope.ops.matmul.triton import launch_product
from allotrope.ops.matmul.triton_quantize import quantize_rows
from allotrope.ops.matmul.triton_tile_table import table_of_tiles


def matmul(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference.matmul`; `out` may be of fp32, for sums that are not rounded."""
    if weight.format is PLAIN and len(x) > FEW_PLAIN_ROWS and (out is None or out.dtype == x.dtype):
        y = F.linear(x, weight.values[0], bias)
        return y if out is None else out.copy_(y)
    return multiply(x, weight, bias=bias, out=out)


def multiply(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    expert_offsets: torch.Tensor | None = None,
    sorted_token_ids: torch.Tensor | None = None,
    gating: GatedActivation | None = None,
    out: torch.Tensor | None = None,
    tile_tables: TileTables | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """y_i = act(W_e x_i + b_e). Asks the device nothing.

    `x`: [n, inputs]. `bias`: [outputs], or [E, outputs]. `expert_offsets`: [E] int32, the end of each expert's rows.
    `sorted_token_ids`: [n] rows of x in the order of experts, None if x has it. `gating`: the activation of gates, then
    ups, which halves the outputs. `out`: [n, outputs] to write into, of any row stride; of fp32 for sums that are not
    rounded. `tile_tables`: those of these offsets; one that is made here is added. `launch`: default: the measured one.
    """
    rows = len(x) if sorted_token_ids is None else len(sorted_token_ids)
    outputs = weight.outputs // 2 if gating else weight.outputs
    assert launch is None or launch.split_k == 1 or not gating or launch.provider == "sliced_k"
    if x.shape[1] != weight.inputs:
        raise ValueError(f"rows of {x.shape[1]} numbers for a weight of {weight.inputs} inputs")
    if not rows:
        return x.new_empty((0, outputs)) if out is None else out
    chip = tuned_name(chip_of(x.device))
    kind = "fp32" if x.dtype == torch.float32 and weight.format.name != "fp8" else weight.format.name
    # Rows of experts that other ranks hold are among `rows`: each expert has its share of those of the whole layer.
    shape = Shape(kind, weight.experts_of_layer or weight.experts, outputs, weight.inputs, gating is not None)
    library = shape.kind != "fp8" or in_library(weight)
    launch = launch or within(launch_for(shape, rows, chip, library), shape, chip_of(x.device))
    if launch.provider == "pytorch" and shape.kind == "fp8" and library:
        return scaled_product(x, weight, bias, out)
    if launch.provider == "pytorch" and weight.format.name == "plain" and expert_offsets is None:
        return _in_torch(x, weight.values[0], bias, out)
    if out is None:
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    given: dict[str, Any] = {
        "bias": bias,
        "expert_offsets": expert_offsets,
        "sorted_token_ids": sorted_token_ids,
        "gating": gating,
    }
    if launch.provider == "sliced_k":
        triton_sliced_k.multiply(x, weight, launch, out, **given)
        return out
    if launch.provider == "gluon" and expert_offsets is None and gluon_fp8.supports(weight, rows, launch, bias):
        gluon_fp8.multiply(x, weight, launch, out)
        return out
    if launch.provider == "gluon" and expert_offsets is not None and gluon_experts_fp8.supports(weight, gating, bias):
        tiles_of = table_of_tiles(rows, expert_offsets, gluon_experts_fp8.ROWS, tile_tables)
        gluon_experts_fp8.multiply(
            *quantize_rows(x, sorted_token_ids=sorted_token_ids), weight, expert_offsets, tiles_of, out
        )
        return out
    if launch.provider == "gluon" and expert_offsets is not None and gluon_experts_fp4.supports(x, weight, gating):
        tiles_of = table_of_tiles(rows, expert_offsets, gluon_experts_fp4.ROWS, tile_tables)
        inner = x if sorted_token_ids is None else x.index_select(0, sorted_token_ids)
        gluon_experts_fp4.multiply(inner, weight, expert_offsets, tiles_of, out, bias, gating)
        return out
    return launch_product(x, weight, launch, out, tile_tables=tile_tables, **given)


def _in_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """PyTorch's product with a plain weight, into `out` where it is given; on NVIDIA chips not rounded before that."""
    if out is None or out.dtype == x.dtype or chip_of(x.device).vendor != "nvidia":
        y = F.linear(x, weight, bias)
        return y if out is None else out.copy_(y)
    torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
    return out if bias is None else out.add_(bias)
