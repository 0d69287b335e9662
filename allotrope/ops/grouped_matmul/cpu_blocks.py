"""Products of experts' rows with weights in blocks (`matmul/blocks.c`), all in one call."""

from __future__ import annotations

import torch

from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.grouped_matmul.reference import activated
from allotrope.ops.matmul.cpu_blocks import BlockWeight, multiply
from allotrope.ops.matmul.tile_tables import TileTables


def grouped_matmul(
    x: torch.Tensor,
    weight: BlockWeight,
    expert_offsets: torch.Tensor,
    sorted_token_ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gating: GatedActivation | None = None,
    expert_ids: torch.Tensor | None = None,
    tile_tables: TileTables | None = None,
) -> torch.Tensor:
    """As `reference.grouped_matmul`."""
    rows = x if sorted_token_ids is None else x.index_select(0, sorted_token_ids)
    padded = None if bias is None else weight.padded(bias)
    if gating is None:
        return multiply(rows, weight, padded, expert_offsets)
    # Not rounded before the activation.
    exact = torch.empty(len(rows), weight.shape[1])
    return activated(multiply(rows, weight, padded, expert_offsets, exact), gating).to(x.dtype)
