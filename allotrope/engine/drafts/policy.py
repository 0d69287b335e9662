"""How many drafts each sequence gets in the next step: as many as raise the tokens per second of the whole step.

Owns the measured times of steps and the choice. It must not know how drafts are made, nor which kernels run.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from allotrope.engine.drafts.acceptance import AcceptanceStats

# Times of one row count that its median is of, and how many make it known.
_KEPT_TIMES = 31
_MIN_TIMES = 4
# Steps after which a time is stale: contexts grow, and other sequences run.
_STALE_STEPS = 4096
# Steps after which a sequence without drafts is tried again. Each time that this was in vain, twice as many follow.
RETRY_STEPS = 64
MAX_RETRY_STEPS = 1024
# Steps with all drafts, after which the time of such a step is estimated.
_MAX_TRIES = 32


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
        self._step += 1
        kept = _bucket(self._pad(rows))
        times = self._times.setdefault(kept, deque(maxlen=_KEPT_TIMES))
        times.append((self._step, seconds))
        if len(times) >= _MIN_TIMES:
            self._refresh(kept)
        if self._step % _STALE_STEPS == 0:
            self._drop_stale()

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

    def cost(self, first: int, count: int) -> npt.NDArray[np.float64]:
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

    def _drop_stale(self) -> None:
        for kept in [rows for rows, times in self._times.items() if times[-1][0] <= self._step - _STALE_STEPS]:
            del self._times[kept]
            if kept in self._rows:
                i = self._rows.index(kept)
                del self._rows[i], self._seconds[i]


def _bucket(rows: int) -> int:
    """The number whose times stand for `rows`: at most an eighth above it, so that few steps make all numbers known."""
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step


def shared_out(counts: Sequence[int], most: int) -> list[int]:
    """`counts` cut to `most` together: every sequence's first draft comes before anyone's second."""
    if sum(counts) <= most:
        return list(counts)
    found = [0] * len(counts)
    for depth in range(max(counts)):
        for i, count in enumerate(counts):
            if count > depth and most > 0:
                found[i], most = found[i] + 1, most - 1
    return found


class DraftPolicy:
    """Chooses the number of drafts of each sequence, from what was accepted and how long steps took.

    `stats`: what was accepted. `times`: of the target's steps. `draft_seconds`: of one pass of the draft model, of
    which as many run as the longest draft has tokens; 0 where drafts are looked up; may be changed as passes are timed.
    """

    def __init__(self, stats: AcceptanceStats, times: StepTimes, draft_seconds: float = 0.0) -> None:
        self.draft_seconds = draft_seconds
        self._stats = stats
        self._times = times
        self._step = self._unknown = 0
        # The last step in which a sequence had drafts.
        self._drafted: dict[Hashable, int] = {}
        # Of a sequence that was tried again: the steps until the next try, and its share of right first drafts before.
        self._retried: dict[Hashable, tuple[int, float]] = {}

    def choose(
        self,
        keys: Sequence[Hashable],
        limits: Sequence[int] | None = None,
        other_rows: int = 0,
        most_drafts: int | None = None,
    ) -> list[int]:
        """The number of drafts of each sequence of the next step, 0 to `stats.max_drafts`.

        `limits`: most drafts of each sequence, such as those that were looked up or fit its length. `other_rows`: rows
        of the step that are no decoding sequences'. `most_drafts`: of all sequences together. Of a step of B sequences
        the n drafts that are likeliest to be accepted are kept, for the n with the most expected tokens per second,
        (B + sum of probabilities) / (seconds of B + n rows + passes). While times are not known, all drafts are made,
        then none, so that both are measured.
        """
        k, count = self._stats.max_drafts, len(keys)
        room = [k] * count if limits is None else [max(0, min(k, limit)) for limit in limits]
        if most_drafts is not None:
            room = shared_out(room, most_drafts)
        self._step += 1
        most, least = count + other_rows + sum(room), count + other_rows
        # Steps that never come, such as for want of pages, cannot be measured.
        self._unknown = 0 if self._times.knows(most) else self._unknown + 1
        if self._unknown and (self._unknown <= _MAX_TRIES or not self._times.measured):
            chosen = room
        elif not self._times.knows(least):
            chosen = [0] * count
        else:
            chosen = self._best(keys, room, least)
            for key, drafts in zip(keys, chosen, strict=True):
                if drafts:
                    self._retried.pop(key, None)
            chosen = self._retry(keys, chosen, room)
        for key, drafts in zip(keys, chosen, strict=True):
            if drafts:
                self._drafted[key] = self._step
            else:
                self._drafted.setdefault(key, self._step)
        return chosen

    def end(self, key: Hashable) -> None:
        """Forget a sequence."""
        self._drafted.pop(key, None)
        self._retried.pop(key, None)

    def _best(self, keys: Sequence[Hashable], room: list[int], rows: int) -> list[int]:
        # [k, B]: of equal probabilities, the earlier position is the earlier entry.
        gains = self._stats.expected(keys).T
        depth, count = gains.shape
        drafts = sum(room)
        if drafts < depth * count:
            gains = np.where(np.arange(depth)[:, None] < np.array(room), gains, -1.0)
        flat = gains.ravel()
        order = np.argsort(-flat, kind="stable")[:drafts]
        # Entry n is of the n likeliest drafts.
        tokens = np.full(drafts + 1, float(count))
        tokens[1:] += np.cumsum(flat[order])
        seconds = self._times.cost(rows, drafts + 1)
        if self.draft_seconds:
            seconds[1:] += self.draft_seconds * np.maximum.accumulate(order // count + 1)
        best = int(np.argmax(tokens / seconds))
        return np.bincount(order[:best] % count, minlength=count).tolist()

    def _retry(self, keys: Sequence[Hashable], chosen: list[int], room: list[int]) -> list[int]:
        """`chosen` with drafts for some sequences that had none for long: their text may have changed.

        A sequence gets one draft, which needs no pass of a draft model behind the first. Where that was right, it gets
        all of them in the step after; where it was wrong, it waits twice as long.
        """
        due = []
        for i, key in enumerate(keys):
            if chosen[i] or not room[i] or key not in self._drafted:
                continue
            pause, before = self._retried.get(key, (RETRY_STEPS, 1.0))
            right = key in self._retried and self._stats.first_rate(key) > before
            if right or self._step - self._drafted[key] >= pause:
                due.append((not right, self._drafted[key], i, pause))
        # Those that fell to 0 together are not retried together: each is a row more.
        for wrong, _, i, pause in sorted(due)[: max(1, len(keys) // 4)]:
            chosen[i] = 1 if wrong else room[i]
            pause = min(2 * pause, MAX_RETRY_STEPS) if wrong else RETRY_STEPS
            self._retried[keys[i]] = pause, self._stats.first_rate(keys[i])
        return chosen
