"""Experts spread by load: each is somewhere, each choice has one holder, and no rank gets much more than another."""

from __future__ import annotations

import random

import pytest
import torch

from allotrope.layers.expert_placement import ExpertPlacement


def cases() -> list[tuple[list[int], int, int]]:
    chance = random.Random(0)
    found = []
    for _ in range(300):
        experts = chance.randrange(1, 24)
        ranks = chance.randrange(1, min(experts, 6) + 1)
        copies = chance.randrange(0, experts * (ranks - 1) + 1)
        found.append(([int(chance.paretovariate(0.8)) for _ in range(experts)], ranks, copies))
    return found


def test_every_choice_has_one_holder() -> None:
    for loads, ranks, copies in cases():
        placement = ExpertPlacement.balanced(loads, ranks, copies)
        sizes = [len(held) for held in placement.held]
        assert sum(sizes) == len(loads) + copies and max(sizes) - min(sizes) <= 1
        assert all(len(set(held)) == len(held) for held in placement.held)
        tables = [placement.slots(rank) for rank in range(ranks)]
        served = torch.stack([table < len(held) for table, held in zip(tables, placement.held, strict=True)])
        assert (served.sum(0) == 1).all()
        for table, held in zip(tables, placement.held, strict=True):
            for expert, slot in [(e, int(s)) for row in table for e, s in enumerate(row) if s < len(held)]:
                assert held[slot] == expert


def test_copies_level_the_load() -> None:
    loads = [100, 1, 1, 1, 60, 1, 1, 1]
    assert ExpertPlacement.contiguous(8, 2).held == ((0, 1, 2, 3), (4, 5, 6, 7))
    spread = ExpertPlacement.balanced(loads, 2)
    assert {0 in held for held in spread.held} == {4 in held for held in spread.held} == {True, False}
    assert not any({0, 4} <= {*held} for held in spread.held)
    copied = ExpertPlacement.balanced(loads, 2, 2)
    assert all({0, 4} <= {*held} for held in copied.held)
    # Of tokens that follow each other, each copy serves every second.
    assert [int(copied.slots(0)[turn, 0] < 5) for turn in range(2)] in ([0, 1], [1, 0])


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(ValueError, match="num_experts=2 is less than the 3 ranks"):
        ExpertPlacement.balanced([1, 1], 3)
    with pytest.raises(ValueError, match=r"num_redundant_experts=9 \(needs 8 or fewer: one on each rank\)"):
        ExpertPlacement.balanced([1] * 4, 3, 9)
