"""Prompt lookup: the last tokens are searched earlier in the same sequence, and what followed them is the draft.

Of `prompt_lookup_max` down to `prompt_lookup_min` last tokens the longest that occurs earlier counts, at its EARLIEST
place, as in vLLM (`vllm/v1/spec_decode/ngram_proposer.py`): the earliest has the most tokens behind it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Sequence

import numpy as np

from allotrope.engine.drafts.lookup import MASK, multipliers, ngram_hashes


class NgramDrafter:
    """Drafts by n-grams of the sequence itself. A call costs O(max_n) for each new token, however long the text is.

    `min_n`, `max_n`: least and greatest number of last tokens that are searched.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self._lengths = range(min_n, max_n + 1)
        self._factors = multipliers(max_n)
        self._sequences: dict[Hashable, _Sequence] = {}

    def start(self, key: Hashable, prompt_ids: Sequence[int]) -> None:
        self._sequences[key] = _Sequence(prompt_ids, self._lengths, self._factors)

    def propose(self, key: Hashable, new_ids: Sequence[int], k: int) -> list[int]:
        sequence = self._sequences[key]
        for token in new_ids:
            sequence.append(token)
        return sequence.propose(k) if k > 0 else []

    def end(self, key: Hashable) -> None:
        self._sequences.pop(key, None)


class _Sequence:
    """One sequence's tokens, and the first end of each of their n-grams that has a token behind it.

    The prompt's n-grams are sorted by hash, which takes 12 bytes each and is made by NumPy at once; those of the output
    are in a dict.
    """

    def __init__(self, prompt_ids: Sequence[int], lengths: range, factors: list[int]) -> None:
        self._lengths = lengths
        self._factors = factors
        self._tokens = array("i", prompt_ids)
        self._prompt = [_sorted_ends(self._tokens, n, factors) for n in lengths]
        self._output: list[dict[int, int]] = [{} for _ in lengths]

    def append(self, token: int) -> None:
        # The n-grams that end at the last token have one behind them from now on.
        end = len(self._tokens) - 1
        for index, ngram in enumerate(self._hashes()):
            if self._first_end(index, ngram) is None:
                self._output[index][ngram] = end
        self._tokens.append(token)

    def propose(self, k: int) -> list[int]:
        tokens = self._tokens
        hashes = self._hashes()
        for index in range(len(hashes) - 1, -1, -1):
            end = self._first_end(index, hashes[index])
            n = self._lengths[index]
            # Two n-grams of one hash are too rare to search on behind them, and never draft what did not follow.
            if end is not None and tokens[end + 1 - n : end + 1] == tokens[len(tokens) - n :]:
                return tokens[end + 1 : end + 1 + k].tolist()
        return []

    def _hashes(self) -> list[int]:
        """Hashes of the last tokens, by number of tokens; of fewer numbers where the sequence is shorter."""
        shortest, longest = self._lengths[0], self._lengths[-1]
        total, hashes = 0, []
        for j, token in enumerate(reversed(self._tokens[-longest:])):
            total += (token + 1) * self._factors[j]
            if j + 1 >= shortest:
                hashes.append(total & MASK)
        return hashes

    def _first_end(self, index: int, ngram: int) -> int | None:
        keys, ends = self._prompt[index]
        i = bisect_left(keys, ngram)
        return ends[i] if i < len(keys) and keys[i] == ngram else self._output[index].get(ngram)


def _sorted_ends(tokens: array[int], n: int, factors: Sequence[int]) -> tuple[array[int], array[int]]:
    """Hashes of the n-grams that have a token behind them, ascending, and the first end of each."""
    # The last token has none behind it.
    ids = np.frombuffer(tokens, np.int32)[:-1].astype(np.uint64)
    keys, first = np.unique(ngram_hashes(ids, n, factors), return_index=True)
    return array("Q", keys.tobytes()), array("i", (first + (n - 1)).astype(np.int32).tobytes())
