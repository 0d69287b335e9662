"""95 % intervals: of a share of right answers, of a mean over pieces of a text, and of a mean of counted values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Standard normal deviations that 95 % of chance is within.
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """`value`, and the bounds of its 95 % interval, from `count` answers or pieces."""

    value: float
    low: float
    high: float
    count: int

    def holds(self, value: float) -> bool:
        """Whether `value` lies inside the interval."""
        # What rounding makes of equal numbers is inside.
        slack = 1e-9 * max(1.0, abs(self.value))
        return self.low - slack <= value <= self.high + slack


def wilson(right: int, count: int) -> Estimate:
    """The share right / count, within (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n).

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference (1927). Raises
    ValueError if there are no answers.
    """
    if not 0 <= right <= count or count < 1:
        raise ValueError(f"{right} right answers of {count} are no share")
    share, square = right / count, Z95 * Z95 / count
    middle = (share + square / 2) / (1 + square)
    half = Z95 * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    # At the ends, rounding alone would leave the share itself outside.
    low = 0.0 if right == 0 else middle - half
    high = 1.0 if right == count else middle + half
    return Estimate(share, low, high, count)


def ratio(totals: Sequence[float], sizes: Sequence[float]) -> Estimate:
    """sum(totals) / sum(sizes) over n independent pieces, ± t sqrt(n/(n-1) sum((total - value size)²)) / sum(sizes).

    t: 97.5 % of Student's distribution with n-1 degrees of freedom. Raises ValueError for fewer than two pieces.
    """
    count = len(totals)
    if count < 2:
        raise ValueError(f"{count} pieces have no interval; at least 2 are needed")
    value = math.fsum(totals) / math.fsum(sizes)
    if not math.isfinite(value):
        return Estimate(value, value, value, count)
    square = math.fsum((total - value * size) ** 2 for total, size in zip(totals, sizes, strict=True))
    half = student95(count - 1) * math.sqrt(square * count / (count - 1)) / math.fsum(sizes)
    return Estimate(value, value - half, value + half, count)


def mean(counts: Mapping[int, int]) -> Estimate:
    """The mean of independent values, ± t sqrt(variance / n). `counts`: how often each value occurs.

    Raises ValueError for fewer than two values.
    """
    count = sum(counts.values())
    if count < 2:
        raise ValueError(f"{count} values have no interval; at least 2 are needed")
    value = sum(one * times for one, times in counts.items()) / count
    square = math.fsum(times * (one - value) ** 2 for one, times in counts.items())
    half = student95(count - 1) * math.sqrt(square / (count - 1) / count)
    return Estimate(value, value - half, value + half, count)


def student95(freedom: int) -> float:
    """97.5 % of Student's distribution: its Cornish-Fisher expansion in 1/freedom; exact for 1 and 2 degrees.

    Source: M. Abramowitz and I. A. Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    if freedom <= 2:
        return 12.706204736174698 if freedom == 1 else 4.302652729749464
    z = Z95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))
