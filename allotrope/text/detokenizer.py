"""Incremental detokenization: returned text never changes later. Owns the buffer of incomplete characters.

It must not know stop strings or requests.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

# The largest number of ids that wait for the rest of a character. A UTF-8 character has at most four bytes.
_MAX_WAITING = 8


class Detokenizer(Protocol):
    """Turns ids into text as they arrive. `flush` returns the rest after the last id."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class BytesDetokenizer:
    """Detokenizer for tokens that map to bytes: the text is the UTF-8 of all bytes. Invalid bytes become U+FFFD.

    `token_bytes`: bytes of an id. `skipped`: ids without text. `strip_space`: strip the space that sentencepiece puts
    before every text.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: frozenset[int], *, strip_space: bool) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        data = b"".join([self._token_bytes(i) for i in ids if i not in self._skipped])
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for other decoders: it decodes the previous and the new ids, and returns the text that is added.

    `decode`: text of a list of ids. `skipped`: ids without text. `before`: an id that the text continues, whichever;
    None: it begins one.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], skipped: frozenset[int], before: int | None = None
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._previous = [] if before is None else [before]
        self._waiting: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_one(i) for i in ids if i not in self._skipped])

    def flush(self) -> str:
        return self._accept(self._new_text()) if self._waiting else ""

    def _push_one(self, token_id: int) -> str:
        self._waiting.append(token_id)
        text = self._new_text()
        unfinished = not text or text.endswith("\ufffd")
        return "" if unfinished and len(self._waiting) < _MAX_WAITING else self._accept(text)

    def _new_text(self) -> str:
        # The previous ids precede the new ones, because decoders treat the beginning of a text differently.
        return self._decode(self._previous + self._waiting)[len(self._decode(self._previous)) :]

    def _accept(self, text: str) -> str:
        """Make the waiting ids the previous ones, and return their text."""
        if text:
            # After ids without text, the decoder would still treat the next ones as the beginning.
            self._previous = self._waiting
        self._waiting = []
        return text


class Windows:
    """Makes the `WindowDetokenizer`s of a tokenizer. `decode`: text of a list of ids. `size`: of its vocabulary."""

    def __init__(self, decode: Callable[[Sequence[int]], str], size: int) -> None:
        self._decode, self._size = decode, size

    def detokenizer(self, skipped: frozenset[int], *, continues_text: bool) -> WindowDetokenizer:
        return WindowDetokenizer(self._decode, skipped, self._word if continues_text else None)

    @functools.cached_property
    def _word(self) -> int | None:
        """An id whose text is letters alone."""
        return next((i for i in range(self._size) if self._decode([i]).isalpha()), None)
