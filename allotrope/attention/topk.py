"""Exact top-k of score rows, the same on every machine and rank: ties go to the lowest index."""

from __future__ import annotations

import torch


def top_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest scores of each row, in ascending order.

    `scores`: [n, m] float; -inf marks a masked entry, and NaN is above all, so that a request that has it ends. Returns
    [n, k] int64; where fewer than k entries are not masked, -1 fills the end of the row. Of equal scores the lowest
    index is selected first.
    Raises ValueError if k is not positive.
    """
    if k < 1:
        raise ValueError(f"k={k}; allowed: at least 1")
    rows, columns = scores.shape
    if bool(scores.isnan().any()):
        scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    selected = scores > -torch.inf
    if columns > k:
        threshold = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        above, equal = scores > threshold, selected & (scores == threshold)
        num_ties = k - above.sum(-1, keepdim=True)
        if bool((equal.sum(-1, keepdim=True) > num_ties).any()):
            equal &= equal.cumsum(-1, dtype=torch.int32) <= num_ties
        selected = above | equal
    row, index = selected.nonzero(as_tuple=True)
    if len(index) == rows * k:
        return index.view(rows, k)
    counts = selected.sum(-1)
    rank = torch.arange(len(row), device=scores.device) - (counts.cumsum(0) - counts)[row]
    topk_indices = torch.full((rows, k), -1, dtype=torch.int64, device=scores.device)
    topk_indices[row, rank] = index
    return topk_indices
