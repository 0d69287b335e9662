"""Drafts looked up in former tokens, against rescans of the whole text."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allotrope.engine.drafts import suffix
from allotrope.engine.drafts.lookup import make_lookup_drafter
from allotrope.engine.drafts.ngram import NgramDrafter
from allotrope.engine.drafts.suffix import FormerOutputs, SuffixDrafter
from allotrope.speculative_config import SpeculativeConfig

# Few different tokens, so that n-grams recur.
TEXTS = st.lists(st.integers(0, 3), max_size=24)
STEPS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)


def rescanned_ngram(tokens: Sequence[int], shortest: int, longest: int, k: int) -> list[int]:
    """Tokens behind the earliest place of the longest n-gram that ends the text and occurs before."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n):
            if n <= len(tokens) and tokens[start : start + n] == tokens[len(tokens) - n :]:
                return list(tokens[start + n : start + n + k])
    return []


@settings(max_examples=200, deadline=None)
@given(TEXTS, STEPS, st.integers(1, 3), st.integers(0, 3), st.integers(0, 5))
def test_ngram_equals_a_rescan(prompt: list[int], steps: list[list[int]], low: int, wider: int, k: int) -> None:
    drafter = NgramDrafter(low, low + wider)
    drafter.start("a", prompt)
    tokens = list(prompt)
    for new in [[], *steps]:
        tokens += new
        assert drafter.propose("a", new, k) == rescanned_ngram(tokens, low, low + wider, k)


def test_ngram_drafts_from_the_earliest_place_of_the_longest_match() -> None:
    drafter = NgramDrafter(1, 3)
    drafter.start("a", [1, 2, 7, 8, 9, 1, 2, 5, 6, 1])
    assert drafter.propose("a", [2], 3) == [7, 8, 9]
    drafter.start("a", [1, 2, 7, 8, 9, 3, 1, 2, 5, 6, 3, 1])
    assert drafter.propose("a", [2], 3) == [5, 6, 3]
    assert drafter.propose("a", [4], 3) == []


def test_ngram_texts_are_apart_and_end() -> None:
    drafter = NgramDrafter(2, 2)
    drafter.start("a", [1, 2, 3, 1, 2])
    drafter.start("b", [4, 5, 6, 1, 2])
    assert drafter.propose("a", [], 4) == [3, 1, 2]
    assert drafter.propose("b", [], 4) == []
    drafter.start("a", [9])
    assert drafter.propose("a", [1, 2], 4) == []
    drafter.end("a")
    drafter.end("a")
    with pytest.raises(KeyError):
        drafter.propose("a", [1], 4)


def common_suffix(text: Sequence[int], tail: Sequence[int], limit: int) -> int:
    n = 0
    while n < min(limit, len(text), len(tail)) and text[-1 - n] == tail[-1 - n]:
        n += 1
    return n


def rescanned_suffix(tokens: Sequence[int], k: int, depth: int, factor: float, min_prob: float) -> list[int]:
    """The draft of the best score, by all occurrences of each length of a match."""
    lengths = {end: common_suffix(tokens[: end + 1], tokens, depth - 1) for end in range(len(tokens) - 1)}
    by_rank = sorted((end for end in lengths if lengths[end] >= 2), key=lambda end: (-lengths[end], -end))
    best: tuple[float, list[int]] = (0.0, [])
    for length in sorted({lengths[end] for end in by_rank}, reverse=True):
        ends = [end for end in by_rank if lengths[end] >= length]
        score, prob, draft = 0.0, 1.0, []
        for step in range(1, min(k, int(length * factor)) + 1):
            ends = [end for end in ends if end + step < len(tokens)]
            following = Counter(tokens[end + step] for end in ends)
            if not following:
                break
            # most_common keeps the order of `ends` among equals.
            token, times = following.most_common(1)[0]
            prob *= times / len(ends)
            if prob < min_prob:
                break
            score, ends = score + prob, [end for end in ends if tokens[end + step] == token]
            draft.append(token)
        if score > best[0]:
            best = (score, draft)
    return best[1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=16),
    STEPS,
    st.integers(1, 6),
    st.sampled_from([(24, 1.0, 0.1), (6, 2.0, 0.3), (12, 0.5, 0.0), (4, 4.0, 1.0)]),
)
def test_suffix_equals_a_rescan(
    prompt: list[int], steps: list[list[int]], k: int, options: tuple[int, float, float]
) -> None:
    depth, factor, min_prob = options
    drafter = SuffixDrafter(
        max_tree_depth=depth, max_cached_requests=0, max_spec_factor=factor, min_token_prob=min_prob
    )
    drafter.start("a", prompt)
    tokens = list(prompt)
    for new in [[], *steps]:
        tokens += new
        # Longer texts may have more occurrences than a search reads.
        if len(tokens) > suffix.MAX_OCCURRENCES + 2:
            break
        assert drafter.propose("a", new, k) == rescanned_suffix(tokens, k, depth, factor, min_prob)


def drafter_with_cache(max_requests: int = 10) -> SuffixDrafter:
    return SuffixDrafter(max_tree_depth=24, max_cached_requests=max_requests, max_spec_factor=1.0, min_token_prob=0.1)


def run_once(drafter: SuffixDrafter, key: str, prompt: list[int], output: list[int]) -> int:
    """Run a sequence as the engine does, with up to 8 drafts a step. Returns the number of steps."""
    drafter.start(key, prompt)
    produced, new, steps = 0, [], 0
    while produced < len(output):
        steps += 1
        drafts = drafter.propose(key, new, 8)
        accepted = 0
        for token, draft in zip(output[produced:], drafts, strict=False):
            if token != draft:
                break
            accepted += 1
        new = output[produced : produced + accepted + 1]
        produced += len(new)
    drafter.propose(key, new, 0)
    drafter.end(key)
    return steps


def test_a_former_output_is_drafted_again() -> None:
    output = list(range(100, 200))
    drafter = drafter_with_cache()
    assert run_once(drafter, "a", [1, 2], output) == 100
    # Match lengths double from 2 tokens on, up to 8 drafts a step.
    assert run_once(drafter, "b", [3, 4], output) <= 18
    without = drafter_with_cache(0)
    assert [run_once(without, key, [1, 2], output) for key in "ab"] == [100, 100]


def test_drafts_take_the_most_frequent_continuation() -> None:
    drafter = drafter_with_cache(0)
    drafter.start("a", [1, 2, 5, 9, 1, 2, 6, 9, 1, 2, 6, 9, 3, 1])
    assert drafter.propose("a", [2], 8) == [6, 9]
    strict = SuffixDrafter(max_tree_depth=24, max_cached_requests=0, max_spec_factor=1.0, min_token_prob=0.7)
    strict.start("a", [1, 2, 5, 9, 1, 2, 6, 9, 1, 2, 6, 9, 3, 1])
    assert strict.propose("a", [2], 8) == []


def test_growth_of_the_index_keeps_matches() -> None:
    generator = random.Random(1)
    drafter = drafter_with_cache(0)
    text = [generator.randrange(50000) for _ in range(3000)]
    drafter.start("a", text[:10])
    for token in text[10:]:
        drafter.propose("a", [token], 0)
    assert drafter.propose("a", text[1000:1010], 8) == text[1010:1018]


def outputs_kept(cache: FormerOutputs, texts: Sequence[list[int]]) -> list[bool]:
    return [bool(cache.index.find(text[:4]).best(2, factor=1.0, min_prob=0.1)[1] == text[4:6]) for text in texts]


@pytest.mark.parametrize("max_tokens", [64, 80, 4096])
def test_the_oldest_outputs_leave(max_tokens: int) -> None:
    texts = [list(range(10 * i, 10 * i + 10)) for i in range(40)]
    cache = FormerOutputs(8, max_outputs=3, max_tokens=max_tokens)
    for i, text in enumerate(texts):
        cache.add(text)
        kept = outputs_kept(cache, texts[: i + 1])
        assert kept == [False] * (i + 1 - len(cache)) + [True] * len(cache)
        assert len(cache) == min(i + 1, 3) or max_tokens < 4096
    assert len(cache) >= 2


def test_a_used_output_outlives_an_unused_one() -> None:
    texts = [list(range(10 * i, 10 * i + 10)) for i in range(6)]
    cache = FormerOutputs(8, max_outputs=3, max_tokens=1024)
    for text in texts[:3]:
        cache.add(text)
    cache.use(cache.index.find(texts[0][:4]).ends[0][1])
    cache.add(texts[3])
    assert outputs_kept(cache, texts[:4]) == [True, False, True, True]
    for text in texts[4:]:
        cache.add(text)
    assert outputs_kept(cache, texts) == [True, False, False, False, True, True]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=40), min_size=1, max_size=30))
def test_the_ring_never_mixes_outputs(texts: list[list[int]]) -> None:
    cache = FormerOutputs(8, max_outputs=100, max_tokens=128)
    for text in texts:
        cache.add(text)
        found = cache.index.find(array("i", text[-7:]))
        for length, end in found.ends:
            assert any(start + 8 <= end < stop for start, stop in cache._spans)
            assert cache.index.tokens[end + 1 - length : end + 1] == array("i", text[len(text) - length :])


def test_the_config_chooses_the_drafter() -> None:
    ngram = make_lookup_drafter(SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 2}))
    assert isinstance(ngram, NgramDrafter)
    assert isinstance(make_lookup_drafter(SpeculativeConfig.parse({"method": "suffix"})), SuffixDrafter)
