"""Into how many parts a query's keys are cut, so that few queries keep a chip busy.

Must not know: what a part computes, or how parts are joined.
"""

from __future__ import annotations


def cheapest_splits(
    programs: int, steps: int, slots: int, most: int, *, begin: float, join: float, each: float = 0.0
) -> int:
    """The number of parts, up to `most`, whose cost is least; the fewest of those.

    The cost is in steps of a program: waves of `programs` for each part, `slots` at a time, each as long as a part of
    the `steps`, and `begin` more to begin and end. Parts cost `join` and `each` of them to write and join.
    """

    def cost(splits: int) -> float:
        waves = -(-programs * splits // slots)
        return waves * (-(-steps // splits) + begin) + (0.0 if splits == 1 else join + each * splits)

    return min(range(1, most + 1), key=cost)
