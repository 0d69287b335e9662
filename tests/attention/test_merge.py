"""Attention over parts of the keys, merged, is attention over all of them."""

from __future__ import annotations

import pytest
import torch

from allotrope.attention.merge import Partial, merge

EMPTY = Partial(torch.zeros(3, 5, 8), torch.full((3, 5), -torch.inf))


def attend(logits: torch.Tensor, values: torch.Tensor) -> Partial:
    """`logits`: [3, 5, L]. `values`: [L, 8]."""
    return Partial(logits.double().softmax(-1).to(values.dtype) @ values, logits.double().logsumexp(-1).float())


def random(keys: int, seed: int = 0, spread: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(3, 5, keys, generator=generator), torch.randn(keys, 8, generator=generator)


@pytest.mark.parametrize("cut", [1, 10, 19])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_two_parts_are_the_whole(cut: int, spread: float) -> None:
    logits, values = random(20, spread=spread)
    found = merge(attend(logits[..., :cut], values[:cut]), attend(logits[..., cut:], values[cut:]))
    want = attend(logits, values)
    torch.testing.assert_close(found.out, want.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.lse, want.lse, rtol=1e-6, atol=3e-6)


def test_a_part_that_outweighs_the_other_is_all_of_it() -> None:
    strong, weak = (attend(*random(4, seed=seed)) for seed in (4, 5))
    weak = Partial(weak.out, weak.lse - 1e4)
    for found in (merge(strong, weak), merge(weak, strong)):
        assert torch.equal(found.out, strong.out)
        assert torch.equal(found.lse, strong.lse)


def test_order_and_grouping_do_not_matter() -> None:
    logits, values = random(12, seed=1)
    a, b, c = (attend(logits[..., i : i + 4], values[i : i + 4]) for i in (0, 4, 8))
    left, right = merge(merge(a, b), c), merge(c, merge(b, a))
    torch.testing.assert_close(left.out, right.out, rtol=0, atol=1e-6)
    torch.testing.assert_close(left.lse, right.lse, rtol=1e-6, atol=1e-6)


def test_a_part_without_keys_changes_nothing() -> None:
    full = attend(*random(6, seed=2))
    for found in (merge(full, EMPTY), merge(EMPTY, full)):
        torch.testing.assert_close(found.out, full.out, rtol=0, atol=1e-7)
        torch.testing.assert_close(found.lse, full.lse, rtol=1e-7, atol=0)


def test_two_parts_without_keys_are_empty_and_not_nan() -> None:
    found = merge(EMPTY, EMPTY)
    assert torch.equal(found.out, EMPTY.out)
    assert torch.equal(found.lse, EMPTY.lse)


def test_rows_are_merged_one_by_one() -> None:
    """Some rows empty on one side, some on both, in one call."""
    logits, values = random(4, seed=3)
    hidden = logits.clone()
    hidden[0] = -torch.inf
    side = Partial(attend(hidden, values).out.nan_to_num(0.0), attend(hidden, values).lse)
    found = merge(side, side)
    assert found.out.isfinite().all()
    assert torch.equal(found.out[0], torch.zeros(5, 8))
    torch.testing.assert_close(found.out[1:], side.out[1:], rtol=0, atol=1e-6)
