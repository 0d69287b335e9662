"""How many drafts each sequence gets in the next step: as many as raise the tokens per second of the whole step.

Owns the choice. It must not know how drafts are made, nor which kernels run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from allotrope.engine.drafts.acceptance import AcceptanceStats
from allotrope.engine.drafts.step_times import PassTimes, StepTimes

# Steps after which a sequence without drafts is tried again. Each time that this was in vain, twice as many follow.
RETRY_STEPS = 64
MAX_RETRY_STEPS = 1024
# Steps after which one more or one fewer draft is tried: what was measured of that may be wrong, and is not measured
# again while another number seems better. Each time twice as many follow.
PROBE_STEPS = 32
MAX_PROBE_STEPS = 512
# Steps with all drafts, after which the time of such a step is estimated.
_MAX_TRIES = 32


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

    `stats`: what was accepted. `times`: of the target's steps. `passes`: of the draft model behind them, which makes as
    many as the longest draft has tokens; None where drafts are looked up.
    """

    def __init__(self, stats: AcceptanceStats, times: StepTimes, passes: PassTimes | None = None) -> None:
        self._stats = stats
        self._times = times
        self._passes = passes
        self._step = self._unknown = 0
        # The last step in which a sequence had drafts.
        self._drafted: dict[Hashable, int] = {}
        # Of a sequence that was tried again: the steps until the next try, and its share of right first drafts before.
        self._retried: dict[Hashable, tuple[int, float]] = {}
        # By the most drafts of a sequence that were best: the step of the next probe, the steps before it, and whether
        # it has more drafts.
        self._probes: dict[int, tuple[int, int, bool]] = {}

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
        then none, so that both are measured; later, now and then, one more or one fewer.
        """
        k, count = self._stats.max_drafts, len(keys)
        room = [k] * count if limits is None else [max(0, min(k, limit)) for limit in limits]
        if most_drafts is not None:
            room = shared_out(room, most_drafts)
        self._step += 1
        most, least = count + other_rows + sum(room), count + other_rows
        # Steps that never come, such as for want of pages, cannot be measured.
        known = self._times.knows(most) and (self._passes is None or self._passes.knows(max(room, default=0), most))
        self._unknown = 0 if known else self._unknown + 1
        if self._unknown and (self._unknown <= _MAX_TRIES or not self._times.measured):
            chosen = room
        elif not self._times.knows(least):
            chosen = [0] * count
        else:
            chosen = self._best(keys, room, least)
            for key, drafts in zip(keys, chosen, strict=True):
                if drafts:
                    self._retried.pop(key, None)
            chosen = self._probe(chosen, room) or self._retry(keys, chosen, room)
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
        if self._passes is not None:
            seconds += self._passes.cost(np.maximum.accumulate(np.append(0, order // count + 1)), rows)
        best = int(np.argmax(tokens / seconds))
        return np.bincount(order[:best] % count, minlength=count).tolist()

    def _probe(self, chosen: list[int], room: list[int]) -> list[int] | None:
        """Where it is time to, `chosen` with one more or one fewer draft, in turn, of each sequence that has the most.
        Whether sequences without drafts get some is left to `_retry`."""
        depth = max(chosen, default=0)
        due, pause, more = self._probes.setdefault(depth, (self._step + PROBE_STEPS, PROBE_STEPS, False))
        if not depth or self._step < due:
            return None
        pause = min(2 * pause, MAX_PROBE_STEPS)
        more = more and depth < max(room)
        self._probes[depth] = self._step + pause, pause, not more
        change = 1 if more else -1
        return [
            min(drafts + change, limit) if drafts == depth else drafts
            for drafts, limit in zip(chosen, room, strict=True)
        ]

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
