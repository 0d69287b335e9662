"""Matches stop strings in text that arrives in pieces. Owns the matching only.

A Knuth-Morris-Pratt automaton matches each string. A character costs the same for any length of text and strings, and
the automaton's state is the number of characters that may still become a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that is completed first; of several completed by one character, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._fallback = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def pending(self) -> int:
        """The number of last characters that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, int] | None:
        """Read `text`. Returns the stop string that it completes and the number of characters read, or None.

        `armed`: False ignores completed strings.
        """
        for position, character in enumerate(text if self._stops else ""):
            completed = None
            for index, stop in enumerate(self._stops):
                matched, fallback = self._matched[index], self._fallback[index]
                while matched and stop[matched] != character:
                    matched = fallback[matched - 1]
                if stop[matched] == character:
                    matched += 1
                if matched == len(stop):
                    completed = completed or stop
                    matched = fallback[matched - 1]
                self._matched[index] = matched
            if completed is not None and armed:
                return completed, position + 1
        return None


def _borders(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also a suffix of it."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders
