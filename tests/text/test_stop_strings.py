"""The stop string automaton against the definition."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from allotrope.text.stop_strings import StopMatcher

LETTERS = st.text("ab", min_size=1, max_size=4)


def could_begin(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that is a beginning of a stop string, but not all of it."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab", max_size=30), stops=st.lists(LETTERS, min_size=1, max_size=4), cut=st.integers(0, 30))
def test_the_first_completed_string_wins_and_the_longest_prefix_is_held(text: str, stops: list[str], cut: int) -> None:
    ends = [(end, -len(stop), stop) for stop in stops for end in range(1, len(text) + 1) if text[:end].endswith(stop)]
    matcher = StopMatcher(stops)
    found = matcher.feed(text[:cut])
    if found is None:
        assert matcher.pending == could_begin(text[:cut], stops)
        later = matcher.feed(text[cut:])
        found = None if later is None else (later[0], later[1] + len(text[:cut]))
    assert found == ((min(ends)[2], min(ends)[0]) if ends else None)
    if not ends:
        assert matcher.pending == could_begin(text, stops)


def test_unarmed_matches_are_ignored() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.feed("aa", armed=False) is None
    assert matcher.pending == 1
    assert matcher.feed("a") == ("aa", 1)


def test_long_stop_strings_cost_no_more_than_their_text() -> None:
    # A search that starts anew at each character would take 10^10 comparisons here.
    matcher = StopMatcher(["a" * 100_000 + "b"])
    assert matcher.feed("a" * 300_000) is None
    assert matcher.pending == 100_000
    assert matcher.feed("b") == ("a" * 100_000 + "b", 1)
