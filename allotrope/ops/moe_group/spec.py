"""What is grouped, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

MAX_EXPERTS = 1024
"""Experts whose counts one program of the kernels holds."""


@dataclass(frozen=True)
class GroupSpec:
    """`experts`: how many there are."""

    experts: int


class TokenGroups(NamedTuple):
    """Pairs of token and choice in the order of their experts. Integers; those of PyTorch and C may have 64 bits.

    `expert_offsets`: [E] int32, where each expert's rows end. `sorted_token_ids`: [T * k] token of each row.
    `expert_ids`: [T * k] expert of each row. `inverse`: [T * k] row of each pair, the inverse permutation.
    """

    expert_offsets: torch.Tensor
    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    inverse: torch.Tensor
