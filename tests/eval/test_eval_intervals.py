"""Intervals against published values, and against how often they hold what they should."""

from __future__ import annotations

import math
import random

import pytest

from allotrope.eval.intervals import Estimate, mean, ratio, student95, wilson


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # R. G. Newcombe, Two-sided confidence intervals for the single proportion (1998), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_published_bounds(right: int, count: int, low: float, high: float) -> None:
    found = wilson(right, count)
    assert found.value == right / count and found.count == count
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


def test_wilson_is_symmetric_and_holds_its_own_share() -> None:
    for count in (1, 7, 100):
        for right in range(count + 1):
            one, other = wilson(right, count), wilson(count - right, count)
            assert math.isclose(one.low, 1 - other.high, abs_tol=1e-12)
            assert 0 <= one.low <= one.value <= one.high <= 1 and one.holds(one.value)


@pytest.mark.parametrize("counts", [(1, 0), (-1, 5), (6, 5)])
def test_no_share_is_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="are no share"):
        wilson(*counts)


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)]
)
def test_students_quantile_is_that_of_tables(freedom: int, value: float) -> None:
    assert student95(freedom) == pytest.approx(value, rel=2e-2 if freedom == 3 else 2e-3)


def test_equal_pieces_give_the_interval_of_a_mean() -> None:
    found = ratio([1.0, 2.0, 3.0, 4.0], [1.0] * 4)
    # Mean 2.5, standard deviation sqrt(5/3), t = 3.182.
    half = 3.182 * math.sqrt(5 / 3) / 2
    assert found.value == 2.5 and found.count == 4
    assert found.high - 2.5 == pytest.approx(half, rel=2e-2) and 2.5 - found.low == pytest.approx(half, rel=2e-2)


def test_counted_values_give_the_interval_of_each_value_by_itself() -> None:
    values = [1] * 7 + [2] * 4 + [4] * 3
    found, wanted = mean({1: 7, 2: 4, 3: 0, 4: 3}), ratio(values, [1] * 14)
    assert found.count == 14 and found.value == pytest.approx(wanted.value)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
    with pytest.raises(ValueError, match="1 values have no interval"):
        mean({3: 1})


def test_a_piece_weighs_by_its_size() -> None:
    found = ratio([2.0, 20.0], [1.0, 10.0])
    assert found.value == found.low == found.high == 2.0
    with pytest.raises(ValueError, match="1 pieces have no interval"):
        ratio([1.0], [1.0])


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    rng = random.Random(0)
    held = 0
    for _ in range(600):
        sizes = [rng.randint(50, 150) for _ in range(12)]
        held += ratio([rng.gauss(3.0, 0.5) * size for size in sizes], sizes).holds(3.0)
    assert 0.93 <= held / 600 <= 0.97


def test_an_infinite_loss_is_outside_of_every_finite_interval() -> None:
    found = ratio([1.0, math.inf], [1.0, 1.0])
    assert found.value == math.inf
    assert not Estimate(1.0, 0.5, 1.5, 2).holds(found.value)
