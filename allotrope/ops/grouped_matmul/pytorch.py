"""Products of experts' rows with plain weights by PyTorch: in one call, where it takes their sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from allotrope.kernels.chip import Chip, chip_of
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.grouped_matmul.reference import biased_and_gated, rows_by_expert
from allotrope.ops.matmul.plain import PLAIN, PlainWeight
from allotrope.ops.matmul.tile_tables import TileTables

MIN_ROWS = 8192
"""Rows from which torch's grouped product of plain weights is faster on a GPU than ours."""


def rejects(spec: Any, chip: Chip) -> list[str]:
    """`Backend.rejects`."""
    return [] if spec.format is PLAIN else [f"format={spec.format.name} (needs plain)"]


def in_one_call(values: torch.Tensor) -> bool:
    """Whether torch multiplies groups of rows by `values` [E, outputs, inputs] without asking a GPU for their sizes: it
    wants rows of whole 16-byte words, in and out."""
    whole_words = all(size * values.element_size() % 16 == 0 for size in values.shape[1:])
    chip = chip_of(values.device)
    return whole_words and (
        chip.vendor == "cpu"
        or (values.dtype == torch.bfloat16 and chip.vendor == "nvidia" and chip.capability >= (9, 0))
    )


def grouped_matmul(
    x: torch.Tensor,
    weight: PlainWeight,
    expert_offsets: torch.Tensor,
    sorted_token_ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gating: GatedActivation | None = None,
    expert_ids: torch.Tensor | None = None,
    tile_tables: TileTables | None = None,
) -> torch.Tensor:
    """As `reference.grouped_matmul`, in the weight's own type."""
    rows = x if sorted_token_ids is None else x.index_select(0, sorted_token_ids)
    if in_one_call(weight.values):
        y = F.grouped_mm(rows, weight.values.transpose(1, 2), offs=expert_offsets)
    else:
        y = rows.new_empty(len(rows), weight.shape[1])
        for expert, part in rows_by_expert(expert_offsets):
            y[part] = F.linear(rows[part], weight.values[expert])
    return biased_and_gated(y, expert_offsets, bias, gating, expert_ids)
