"""Ids to text one at a time, where text that was given out is never taken back. Owns half-finished characters only.

It must not know of stop strings or of requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

# Longest run of ids that may wait for the rest of a character; one of UTF-8 has at most four bytes.
_LONGEST_WAIT = 8


class Detokenizer(Protocol):
    """Turns ids into text as they come; `flush` gives the rest when no more will come."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class BytesDetokenizer:
    """For tokens that stand for bytes: text = UTF-8 of the bytes together, with U+FFFD for what is not UTF-8.

    `token_bytes`: bytes of an id. `skipped`: ids that give no text. `strip_space`: drop one space that the text begins
    with, as sentencepiece puts one before every text.
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
    """For any other decoder: decodes the newest ids after those before them, and gives out what that adds.

    `decode`: text of a list of ids. `skipped`: ids that give no text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped: frozenset[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._given: list[int] = []
        self._waiting: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_one(i) for i in ids if i not in self._skipped])

    def flush(self) -> str:
        return self._give(self._new_text()) if self._waiting else ""

    def _push_one(self, token_id: int) -> str:
        self._waiting.append(token_id)
        text = self._new_text()
        unfinished = not text or text.endswith("\ufffd")
        return "" if unfinished and len(self._waiting) < _LONGEST_WAIT else self._give(text)

    def _new_text(self) -> str:
        # The ids given out last go before the new ones, because decoders treat the beginning of a text differently.
        return self._decode(self._given + self._waiting)[len(self._decode(self._given)) :]

    def _give(self, text: str) -> str:
        if text:
            # Ids without text would not show the decoder that the text has begun.
            self._given = self._waiting
        self._waiting = []
        return text
