"""Products of experts on a GPU: PyTorch's grouped product for many plain rows, else `ops/matmul/providers.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.grouped_matmul import pytorch
from allotrope.ops.grouped_matmul.reference import activated
from allotrope.ops.matmul.packed_weight import PackedWeight
from allotrope.ops.matmul.plain import PLAIN
from allotrope.ops.matmul.providers import multiply
from allotrope.ops.matmul.tile_tables import TileTables


def grouped_matmul(
    x: torch.Tensor,
    weight: PackedWeight,
    expert_offsets: torch.Tensor,
    sorted_token_ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gating: GatedActivation | None = None,
    expert_ids: torch.Tensor | None = None,
    tile_tables: TileTables | None = None,
) -> torch.Tensor:
    """As `reference.grouped_matmul`, in one launch or two, which never ask the device how many rows an
    expert has."""
    rows = len(x) if sorted_token_ids is None else len(sorted_token_ids)
    if weight.format is PLAIN and bias is None and rows >= pytorch.MIN_ROWS and pytorch.in_one_call(weight.values):
        rows_of = x if sorted_token_ids is None else x.index_select(0, sorted_token_ids)
        y = F.grouped_mm(rows_of, weight.values.transpose(1, 2), offs=expert_offsets)
        return y if gating is None else activated(y, gating)
    return multiply(
        x,
        weight,
        bias=bias,
        expert_offsets=expert_offsets,
        sorted_token_ids=sorted_token_ids,
        gating=gating,
        tile_tables=tile_tables,
    )
