"""Exact top-k of score rows, the same on every machine and rank: ties go to the lowest index."""

from __future__ import annotations

import torch


def top_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest scores of each row, in ascending order.

    `scores`: [n, m] float without NaN; -inf marks an entry that may not be taken. Returns [n, k] int64; where fewer
    than k entries may be taken, -1 fills the end of the row. Of equal scores the one with the lowest index is taken.
    Raises ValueError if k is not positive.
    """
    if k < 1:
        raise ValueError(f"k={k}; allowed: at least 1")
    rows, columns = scores.shape
    taken = scores > -torch.inf
    if columns > k:
        least = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        above, equal = scores > least, taken & (scores == least)
        room = k - above.sum(-1, keepdim=True)
        if bool((equal.sum(-1, keepdim=True) > room).any()):
            equal &= equal.cumsum(-1, dtype=torch.int32) <= room
        taken = above | equal
    row, index = taken.nonzero(as_tuple=True)
    if len(index) == rows * k:
        return index.view(rows, k)
    counts = taken.sum(-1)
    rank = torch.arange(len(row), device=scores.device) - (counts.cumsum(0) - counts)[row]
    topk_indices = torch.full((rows, k), -1, dtype=torch.int64, device=scores.device)
    topk_indices[row, rank] = index
    return topk_indices
