"""Exact top-k: the set, its order, ties and entries that may not be taken."""

from __future__ import annotations

import pytest
import torch

from allotrope.attention.topk import top_indices


def by_sorting(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The same, one row at a time with Python's stable sort."""
    rows = []
    for row in scores.tolist():
        allowed = [i for i, score in enumerate(row) if score > float("-inf")]
        best = sorted(sorted(allowed, key=lambda i: -row[i])[:k])
        rows.append(best + [-1] * (k - len(best)))
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), k)


@pytest.mark.parametrize("k", [1, 2, 7, 31, 32, 33, 64])
def test_distinct_scores(k: int) -> None:
    scores = torch.randn(50, 32, generator=torch.Generator().manual_seed(k))
    assert torch.equal(top_indices(scores, k), by_sorting(scores, k))


@pytest.mark.parametrize("k", [1, 3, 8, 20])
def test_ties_and_hidden_entries(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    scores = torch.randint(0, 3, (200, 20), generator=generator).float()
    scores = scores.masked_fill(torch.rand(200, 20, generator=generator) < 0.4, -torch.inf)
    scores[0] = -torch.inf
    scores[1] = 0.0
    found = top_indices(scores, k)
    assert torch.equal(found, by_sorting(scores, k))
    assert found[0].eq(-1).all()
    assert torch.equal(found[1], torch.arange(k))


def test_ties_across_zero_signs_and_the_largest_floats() -> None:
    scores = torch.tensor([[-0.0, 0.0, torch.inf, 3e38, -3e38, 0.0]])
    assert top_indices(scores, 3).tolist() == [[0, 2, 3]]
    assert top_indices(scores, 4).tolist() == [[0, 1, 2, 3]]


def test_no_rows_and_k_below_one() -> None:
    assert top_indices(torch.empty(0, 5), 3).shape == (0, 3)
    with pytest.raises(ValueError, match=r"k=0; allowed: at least 1"):
        top_indices(torch.ones(1, 1), 0)


def test_what_is_not_a_number_is_above_all() -> None:
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[5.0, nan, 3.0, -inf, 4.0], [inf, 1.0, nan, 2.0, nan], [nan, nan, nan, nan, nan]])
    assert top_indices(scores, 2).tolist() == [[0, 1], [0, 2], [0, 1]]
