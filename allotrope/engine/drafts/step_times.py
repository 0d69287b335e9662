"""The measured times of steps by their rows, and of the passes of a draft model behind them.

Must not know what is chosen by them.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

# Times of one row count that its median is of, and how many make it known.
_KEPT_TIMES = 31
_MIN_TIMES = 4
# Steps after which a time is stale: contexts grow, and other sequences run.
_STALE_STEPS = 4096
# Times that are older than this many steps count no longer once a new one is so far from their median: the host may
# have been busy with something else when they were taken.
_OLD_STEPS = 16
_APART = 1.25

Seconds = npt.NDArray[np.float64]


class StepTimes:
    """Seconds of a step by its number of rows: medians of the last times, linear between measured numbers.

    `pad`: the number of rows that runs in place of a number, such as the size of a captured graph.
    """

    def __init__(self, pad: Callable[[int], int] = lambda rows: rows) -> None:
        self._pad = pad
        self._times: dict[int, deque[tuple[int, float]]] = {}
        self._padded = np.zeros(1, np.int64)
        self._step = 0
        self._rows: list[int] = []
        self._seconds: list[float] = []

    def record(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took `seconds`."""
        self.skip()
        kept = _bucket(self._pad(rows))
        known = self._times.get(kept)
        if known is not None and self._step - known[-1][0] > _OLD_STEPS:
            before = statistics.median(seconds for _, seconds in known)
            if not before / _APART <= seconds <= before * _APART:
                self._forget(kept)
        times = self._times.setdefault(kept, deque(maxlen=_KEPT_TIMES))
        times.append((self._step, seconds))
        if len(times) >= _MIN_TIMES:
            self._refresh(kept)

    def skip(self) -> None:
        """A step has passed."""
        self._step += 1
        if self._step % _STALE_STEPS == 0:
            for kept in [rows for rows, times in self._times.items() if times[-1][0] <= self._step - _STALE_STEPS]:
                self._forget(kept)

    def clear(self) -> None:
        """Forget all times: steps run in another way from now on."""
        self._times.clear()
        self._rows.clear()
        self._seconds.clear()

    @property
    def measured(self) -> bool:
        """Whether the time of any number of rows is known."""
        return bool(self._rows)

    def knows(self, rows: int) -> bool:
        """Whether the time of `rows` was measured, or lies between two that were and are no factor of 2 apart."""
        wanted = _bucket(self._pad(rows))
        i = bisect_left(self._rows, wanted)
        if i == len(self._rows):
            return False
        return self._rows[i] == wanted or (i > 0 and self._rows[i] <= 2 * self._rows[i - 1])

    def cost(self, first: int, count: int) -> Seconds:
        """Seconds of steps of `first`, `first + 1`, ... rows, `count` numbers. Something must be known."""
        while len(self._padded) < first + count:
            known = len(self._padded)
            more = [self._pad(rows) for rows in range(known, max(first + count, 2 * known))]
            self._padded = np.concatenate([self._padded, np.array(more, np.int64)])
        padded = self._padded[first : first + count]
        # More rows never take less time; where they seem to, the times are noise.
        seconds = np.maximum.accumulate(self._seconds)
        last = self._rows[-1]
        # Beyond what was measured, each row takes its share of the greatest step.
        return np.interp(padded, self._rows, seconds) * np.maximum(padded / last, 1.0)

    def _refresh(self, kept: int) -> None:
        median = statistics.median(seconds for _, seconds in self._times[kept])
        i = bisect_left(self._rows, kept)
        if i < len(self._rows) and self._rows[i] == kept:
            self._seconds[i] = median
        else:
            self._rows.insert(i, kept)
            self._seconds.insert(i, median)

    def _forget(self, kept: int) -> None:
        del self._times[kept]
        if kept in self._rows:
            i = self._rows.index(kept)
            del self._rows[i], self._seconds[i]


class PassTimes:
    """Seconds of the passes of a draft model behind a step, by their number and by the rows of the step.

    `pad`: as in `StepTimes`.
    """

    def __init__(self, pad: Callable[[int], int] = lambda rows: rows) -> None:
        self._pad = pad
        self._by_number: dict[int, StepTimes] = {}

    def record(self, passes: int, rows: int, seconds: float) -> None:
        """`passes` passes behind a step of `rows` rows took `seconds`. Those of 0 passes store the step's tokens."""
        self._by_number.setdefault(passes, StepTimes(self._pad)).record(rows, seconds)
        for number, times in self._by_number.items():
            if number != passes:
                times.skip()

    def clear(self) -> None:
        """Forget all times: passes run in another way from now on."""
        self._by_number.clear()

    def knows(self, passes: int, rows: int) -> bool:
        """Whether the time of `passes` passes behind a step of `rows` rows is known, as in `StepTimes`."""
        times = self._by_number.get(passes)
        return times is not None and times.knows(rows)

    def cost(self, passes: npt.NDArray[np.int64], first: int) -> Seconds:
        """Seconds of `passes` [n] passes, which do not fall, behind steps of `first`, `first + 1`, ... rows.

        A number of passes that was not measured behind so many rows takes its share of the largest number that was,
        beyond what storing the tokens takes.
        """
        count = len(passes)
        stored = self._by_number.get(0)
        storing = float(stored.cost(first, 1)[0]) if stored is not None and stored.measured else 0.0
        found = np.full(count, storing)
        measured = {number: times for number, times in self._by_number.items() if number and times.measured}
        if not measured:
            return found
        largest = max([number for number in measured if self.knows(number, first + count - 1)] or measured)
        found += passes * np.maximum(measured[largest].cost(first, count) - storing, 0.0) / largest
        for number, times in measured.items():
            begin, end = np.searchsorted(passes, (number, number + 1)).tolist()
            if begin < end and self.knows(number, first + begin) and self.knows(number, first + end - 1):
                found[begin:end] = times.cost(first + begin, end - begin)
        return found


def _bucket(rows: int) -> int:
    """The number whose times stand for `rows`: at most an eighth above it, so that few steps make all numbers known."""
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step
