"""Products of large experts on a CPU by oneDNN, one expert after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.grouped_matmul.reference import biased_and_gated, rows_by_expert
from allotrope.ops.matmul import onednn
from allotrope.ops.matmul.onednn import OneDNNWeight, rejects
from allotrope.ops.matmul.plain import PLAIN, PlainWeight
from allotrope.ops.matmul.tile_tables import TileTables
from allotrope.ops.matmul.weight import Format, Weight

__all__ = ["grouped_matmul", "pack", "rejects"]


@dataclass(frozen=True, repr=False)
class OneDNNExperts(Weight):
    """`experts`: a weight of each."""

    experts: tuple[OneDNNWeight, ...]
    format: Format = PLAIN

    @property
    def shape(self) -> tuple[int, ...]:
        """As `Weight.shape`."""
        return (len(self.experts), *self.experts[0].shape)

    @property
    def nbytes(self) -> int:
        """As `Weight.nbytes`."""
        return sum(one.nbytes for one in self.experts)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """As `Weight.dequantize`."""
        return torch.stack([one.dequantize(dtype) for one in self.experts])


def pack(weight: PlainWeight) -> OneDNNExperts:
    """`MatmulBackend.pack`."""
    return OneDNNExperts(tuple(onednn.pack(weight[expert]) for expert in range(weight.shape[0])))


def grouped_matmul(
    x: torch.Tensor,
    weight: OneDNNExperts,
    expert_offsets: torch.Tensor,
    sorted_token_ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gating: GatedActivation | None = None,
    expert_ids: torch.Tensor | None = None,
    tile_tables: TileTables | None = None,
) -> torch.Tensor:
    """As `reference.grouped_matmul`."""
    rows = x if sorted_token_ids is None else x.index_select(0, sorted_token_ids)
    y = rows.new_empty(len(rows), weight.shape[1])
    for expert, part in rows_by_expert(expert_offsets):
        y[part] = onednn.matmul(rows[part], weight.experts[expert])
    return biased_and_gated(y, expert_offsets, bias, gating, expert_ids)
