"""How many drafts were accepted: counts since the start, rates by sequence, and forced acceptance for benchmarks.

Owns the counting, the warning of useless drafts and the schedule of forced acceptance. It must not know how drafts are
made, nor how long a step takes. Times are passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from allotrope.engine.report import SpeculationStats
from allotrope.speculative_config import SpeculativeConfig

log = logging.getLogger("allotrope.engine")

# A rate of accepted drafts below this is warned of, where it holds for so long and over so many drafted tokens.
MIN_ACCEPTANCE_RATE = 0.1
WARNING_WINDOW_SECONDS = 60.0
WARNING_WINDOW_TOKENS = 300
WARNING_INTERVAL_SECONDS = 600.0
# What an observation weighs after one more of the same position, and after a step without one: what was seen of drafts
# that are no longer made is forgotten, so that they are tried again some hundred steps later.
_DECAY = 0.9
_FADE = 0.99
# The rate of all sequences counts in a sequence's own rate as so many observations.
_PRIOR_WEIGHT = 2.0
# Before anything is observed, and so many of its observations are right.
_FIRST_GUESS = 0.7
_PRIOR_HITS = _PRIOR_WEIGHT * _FIRST_GUESS

Rates = npt.NDArray[np.float64]


class AcceptanceStats:
    """Counts of drafts of all sequences, and decayed rates of each running one.

    `max_drafts`: most drafts of a sequence in a step. `window_start`: seconds when the first window of the warning
    begins.
    """

    def __init__(self, max_drafts: int, window_start: float = 0.0) -> None:
        self.max_drafts = max_drafts
        self._drafts = self._drafted = self._accepted = 0
        self._by_position = np.zeros(max_drafts, np.int64)
        self._reached = np.zeros(max_drafts, np.int64)
        self._rows: dict[Hashable, int] = {}
        self._free: list[int] = []
        # Decayed counts by row and position: of drafts whose forerunners were accepted, and of the accepted among them.
        self._trials = np.zeros((0, max_drafts))
        self._hits = np.zeros((0, max_drafts))
        self._all_trials = np.full(max_drafts, _PRIOR_WEIGHT)
        self._all_hits = np.full(max_drafts, _PRIOR_HITS)
        self._positions = np.arange(max_drafts)
        self._window = (window_start, 0, 0)
        self._warned_at: float | None = None

    def record(self, keys: Sequence[Hashable], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a step: sequence `keys[i]` had `drafted[i]` drafts verified, of which the first `accepted[i]` hold."""
        counts = np.array([drafted, accepted], np.int64).reshape(2, -1)
        took_part = counts[0] > 0
        counts = counts[:, took_part]
        rows = [self._row(key) for key, drafts in zip(keys, drafted, strict=True) if drafts > 0]
        trials, hits = self._trials[rows], self._hits[rows]
        all_trials, all_hits = self._all_trials, self._all_hits
        self._fade()
        if not rows:
            return
        hit = self._positions < counts[1][:, None]
        reached = self._positions < np.minimum(counts[0], counts[1] + 1)[:, None]
        self._drafts += len(rows)
        self._drafted += int(counts[0].sum())
        self._accepted += int(counts[1].sum())
        self._by_position += hit.sum(0)
        self._reached += reached.sum(0)
        self._trials[rows] = np.where(reached, trials * _DECAY + 1.0, self._trials[rows])
        self._hits[rows] = np.where(reached, hits * _DECAY + hit, self._hits[rows])
        observed = reached.any(0)
        # The mean of a step counts once, however many sequences took part.
        total = np.maximum(reached.sum(0), 1)
        self._all_trials = np.where(observed, all_trials * _DECAY + 1.0, self._all_trials)
        self._all_hits = np.where(observed, all_hits * _DECAY + hit.sum(0) / total, self._all_hits)

    def forget(self) -> None:
        """Expect what was expected before any draft. The counts stay."""
        self._trials[:] = self._hits[:] = 0.0
        self._all_trials[:] = _PRIOR_WEIGHT
        self._all_hits[:] = _PRIOR_HITS

    def _fade(self) -> None:
        """A step has passed: of a sequence, what is known of all sequences counts more, and of those, the first guess.

        Whether a sequence's first draft is worth making again is left to the policy.
        """
        self._trials[:, 1:] *= _FADE
        self._hits[:, 1:] *= _FADE
        self._all_trials = self._all_trials * _FADE + _PRIOR_WEIGHT * (1 - _FADE)
        self._all_hits = self._all_hits * _FADE + _PRIOR_HITS * (1 - _FADE)

    def end(self, key: Hashable) -> None:
        """Forget a sequence. Its drafts stay in the counts."""
        row = self._rows.pop(key, None)
        if row is not None:
            self._trials[row] = self._hits[row] = 0.0
            self._free.append(row)

    def rate(self, key: Hashable) -> float | None:
        """The share of its drafts that a sequence accepts, by decayed rates of its positions; None: no draft yet."""
        row = self._rows.get(key)
        if row is None:
            return None
        reached = self._trials[row] > 0
        return float(np.cumprod(self._hits[row, reached] / self._trials[row, reached]).mean())

    def first_rate(self, key: Hashable) -> float:
        """The share of its first drafts that a sequence accepts; 0 before there is one."""
        row = self._rows.get(key)
        if row is None or not self._trials[row, 0]:
            return 0.0
        return float(self._hits[row, 0] / self._trials[row, 0])

    def expected(self, keys: Sequence[Hashable]) -> Rates:
        """[len(keys), max_drafts] probability that drafts 0 to j of a sequence are all accepted.

        A sequence's own rate of a position counts the more, the more drafts it was observed with there; the rate of
        all sequences counts as two of them.
        """
        general = np.minimum(self._all_hits / self._all_trials, 1.0)
        prior = general * _PRIOR_WEIGHT
        if not self._rows:
            return np.repeat(np.cumprod(general)[None], len(keys), 0)
        # Row 0 stands in for a sequence that is not known, and its values are overwritten.
        rows = [self._rows.get(key, -1) for key in keys]
        rates = (self._hits[rows] + prior) / (self._trials[rows] + _PRIOR_WEIGHT)
        if min(rows, default=0) < 0:
            rates[np.array(rows) < 0] = general
        return np.cumprod(rates, 1)

    def summary(self) -> SpeculationStats:
        """The counts since the start, for `EngineStats.speculation`."""
        return SpeculationStats(
            drafts=self._drafts,
            draft_tokens=self._drafted,
            accepted_tokens=self._accepted,
            accepted_per_position=tuple(self._by_position.tolist()),
            reached_per_position=tuple(self._reached.tolist()),
        )

    def check(self, now: float) -> None:
        """Log a warning if hardly a draft was accepted for a minute; again after ten minutes at the earliest.

        `now`: seconds of a clock that never goes back. Cheap: to be called after every step.
        """
        since, drafted, accepted = self._window
        tokens = self._drafted - drafted
        if now - since < WARNING_WINDOW_SECONDS or tokens < WARNING_WINDOW_TOKENS:
            return
        rate = (self._accepted - accepted) / tokens
        self._window = (now, self._drafted, self._accepted)
        due = self._warned_at is None or now - self._warned_at >= WARNING_INTERVAL_SECONDS
        if rate >= MIN_ACCEPTANCE_RATE or not due:
            return
        self._warned_at = now
        log.warning(
            "speculative decoding: %.1f %% of %d drafted tokens were accepted in the last %.0f s, too few to gain "
            "from. Likely causes: a head that was trained for another model or revision; a quantized head; a high "
            "temperature; text unlike what the head was trained on, or, with ngram and suffix, text that repeats "
            "nothing. Try fewer num_speculative_tokens, or leave --speculative-config out.",
            100 * rate,
            tokens,
            now - since,
        )

    def _row(self, key: Hashable) -> int:
        row = self._rows.get(key)
        if row is None:
            if not self._free:
                size = len(self._trials)
                grown = max(16, size)
                self._free = list(range(size + grown - 1, size - 1, -1))
                self._trials = np.concatenate([self._trials, np.zeros((grown, self.max_drafts))])
                self._hits = np.concatenate([self._hits, np.zeros((grown, self.max_drafts))])
            row = self._rows[key] = self._free.pop()
        return row


class SyntheticAcceptance:
    """Forced acceptance, for benchmarks: how many drafts hold does not depend on the tokens.

    `rates`: entry i is the probability that the first i + 1 drafts are all accepted; they do not rise. Each sequence
    steps through a Weyl sequence, u_t = u_0 + t * golden ratio mod 1, and accepts the drafts whose rate is above u_t:
    the mean over t steps is that of the rates to within O(log t / t), and equal seeds give equal draws.
    """

    def __init__(self, rates: Sequence[float], seed: int = 0) -> None:
        self._rates = tuple(rates)
        self._first = seed * _PLASTIC % 1.0
        self._started = 0
        self._next: dict[Hashable, float] = {}

    @classmethod
    def from_config(cls, config: SpeculativeConfig, seed: int = 0) -> SyntheticAcceptance | None:
        """The forced acceptance that `config` asks for, if any."""
        if not config.is_synthetic:
            return None
        rates = config.synthetic_acceptance_rates
        if rates is None:
            assert config.synthetic_acceptance_length is not None
            rates = rates_of_length(config.synthetic_acceptance_length, config.num_speculative_tokens)
        return cls(rates, seed)

    def set_length(self, length: float) -> None:
        """Accept drafts as `synthetic_acceptance_length` asks for, from the next step on."""
        self._rates = rates_of_length(length, len(self._rates))

    def accepted(self, key: Hashable, k: int) -> int:
        """How many of the `k` drafts of a sequence hold in its next step."""
        u = self._next.get(key)
        if u is None:
            u = (self._first + self._started * _PLASTIC) % 1.0
            self._started += 1
        self._next[key] = (u + _GOLDEN) % 1.0
        return sum(u < rate for rate in self._rates[:k])

    def end(self, key: Hashable) -> None:
        """Forget a sequence."""
        self._next.pop(key, None)


_GOLDEN = 0.6180339887498949
_PLASTIC = 0.7548776662466927


def rates_of_length(length: float, drafts: int) -> tuple[float, ...]:
    """Rates by position whose steps have `length` tokens in the mean, at the least variance.

    `length`: 1 to `drafts` + 1, with the token that every step yields, as vLLM's `synthetic_acceptance_length`. All
    drafts below `length - 1` are accepted always, the next one in the rest of the steps, and none behind it.
    """
    return tuple(min(max(length - 1 - position, 0.0), 1.0) for position in range(drafts))
