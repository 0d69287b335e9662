"""Products of experts' rows in C (`matmul/cpu.c`), all in one call."""

from __future__ import annotations

import torch

from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.grouped_matmul.reference import biased_and_gated
from allotrope.ops.matmul.cpu import PanelWeight, multiply_experts
from allotrope.ops.matmul.tile_tables import TileTables


def grouped_matmul(
    x: torch.Tensor,
    weight: PanelWeight,
    expert_offsets: torch.Tensor,
    sorted_token_ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gating: GatedActivation | None = None,
    expert_ids: torch.Tensor | None = None,
    tile_tables: TileTables | None = None,
) -> torch.Tensor:
    """As `reference.grouped_matmul`."""
    rows = x if sorted_token_ids is None else x.index_select(0, sorted_token_ids)
    y = multiply_experts(rows, weight, expert_offsets)
    return biased_and_gated(y, expert_offsets, bias, gating, expert_ids)
