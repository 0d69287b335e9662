"""The text behind which a grammar begins, such as the end of reasoning: found in an output token by token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from allotrope.grammars.backend import pack
from allotrope.grammars.vocabulary import Vocabulary

Tails = dict[int, list[int]]
"""Start of a suffix of the text -> tokens that begin with the suffix and go on; 0: those that hold the whole text."""


class Opening:
    """`text` in the bytes of outputs.

    A state is the number of bytes of `text` that the output ends with. A token may end with bytes behind the text;
    `begins` says whether the grammar can begin with them. Tokens whose rest it cannot begin with are masked, and so are
    end tokens.
    """

    def __init__(self, text: str, vocabulary: Vocabulary, tails: Tails, begins: Callable[[bytes], bool]) -> None:
        self._text, self._vocabulary, self._tails, self._begins = text.encode(), vocabulary, tails, begins
        self._borders = _borders(self._text)
        # Ids without text are no tokens of the model.
        ends = set(vocabulary.eos_ids)
        self._kept = [i for i, token in enumerate(vocabulary.tokens) if token and i not in ends]
        self._possible: dict[bytes, bool] = {}
        every = pack(self._kept, len(vocabulary.tokens))
        self._masks = [self._mask_in(state, every) for state in range(len(self._text))]

    def advance(self, state: int, token: int) -> tuple[int, bytes | None]:
        """The state after `token`, and what follows the text in it; None: the text has not ended yet."""
        data = self._vocabulary.tokens[token]
        for place, byte in enumerate(data, 1):
            state = self._next(state, byte)
            if state == len(self._text):
                return state, data[place:]
        return state, None

    def mask(self, state: int) -> NDArray[np.int32]:
        """[W] packed mask of the tokens that may follow in `state`."""
        return self._masks[state]

    def _mask_in(self, state: int, every: NDArray[np.int32]) -> NDArray[np.int32]:
        starts, start = {0}, state
        while start:
            starts.add(start)
            start = self._borders[start - 1]
        refused = []
        for token in {token for start in starts for token in self._tails.get(start, ())}:
            _, rest = self.advance(state, token)
            if not rest:
                continue
            if rest not in self._possible:
                self._possible[rest] = self._begins(rest)
            if not self._possible[rest]:
                refused.append(token)
        return every & ~pack(refused, len(self._vocabulary.tokens)) if refused else every

    def _next(self, state: int, byte: int) -> int:
        while state and self._text[state] != byte:
            state = self._borders[state - 1]
        return state + 1 if self._text[state] == byte else 0


def find_tails(text: bytes, vocabulary: Vocabulary) -> Tails:
    """The tokens by which `text` can end with more behind it, in the same token."""
    tails = defaultdict(list)
    suffixes = [(start, text[start:]) for start in range(1, len(text))]
    last = text[-1:]
    for token, data in enumerate(vocabulary.tokens):
        if last not in data[:-1]:
            continue
        for start, suffix in suffixes:
            if len(data) > len(suffix) and data.startswith(suffix):
                tails[start].append(token)
        if text in data[:-1]:
            tails[0].append(token)
    return dict(tails)


def _borders(text: bytes) -> list[int]:
    """Of each prefix, the length of its longest proper border (Knuth, Morris and Pratt)."""
    borders = [0] * len(text)
    length = 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = borders[length - 1]
        length += text[place] == text[length]
        borders[place] = length
    return borders
