"""Split KV (flash decoding): into how many splits a query's keys are cut, so that few queries keep a chip busy.

Must not know: what a split computes, or how splits are merged.
"""

from __future__ import annotations


def num_splits(
    programs: int, steps: int, concurrent: int, max_splits: int, *, start: float, merge: float, per_split: float = 0.0
) -> int:
    """The number of KV splits, up to `max_splits`, whose cost is least; the fewest of those.

    `programs`: of one split. `steps`: tiles of keys of a query. `concurrent`: programs that run at once: num_sms, times
    those that one multiprocessor holds. The cost is in steps of a program: waves of `concurrent` programs, each as long
    as a split, and `start` more to start and end. Several splits cost `merge`, and `per_split` each, to be merged.
    """

    def cost(splits: int) -> float:
        waves = -(-programs * splits // concurrent)
        return waves * (-(-steps // splits) + start) + (0.0 if splits == 1 else merge + per_split * splits)

    return min(range(1, max_splits + 1), key=cost)
