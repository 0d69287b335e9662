"""A growing text, read by generators: one that needs more text yields, and goes on once there is more.

Owns the text that is not read yet. What is read once is not read again, so the time is linear in the text, for any
portions. It must not know formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

# The longest name of a tool or a parameter.
NAME_LIMIT = 256
_SPACE = re.compile(r"\s*")
_STRING_TEXT = re.compile(r'[^"\\]*')
# JSON has no control characters within strings, which models write all the same.
_STRICT_STRING_TEXT = re.compile(r'[^"\\\x00-\x1f]*')
# Everything that JSON has outside of strings, but for brackets and quotes.
_PLAIN_TEXT = re.compile(r"[\s,:+\-.\w]*")
_SCALAR_TEXT = re.compile(r"[+\-.\w]*")
_CLOSING = {"{": "}", "[": "]"}


class Malformed(Exception):
    """The text at the cursor is not what the format has there. It is no error: it is text."""


class Marks:
    """Texts to look for. Where several begin at one place, the longest counts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts)
        self._prefixes = frozenset(text[:n] for text in self.texts for n in range(1, len(text)))
        first = "".join(sorted({text[0] for text in self.texts}))
        self._first = re.compile(f"[{re.escape(first)}]" if first else r"(?!)")

    def search(self, text: str, at: int, ended: bool) -> tuple[int, str]:
        """(place, mark) of the first mark. Without one: (end of the text that begins no mark, "")."""
        for found in self._first.finditer(text, at):
            mark = self.match(text, found.start(), ended)
            if mark or mark is None:
                return found.start(), mark or ""
        return len(text), ""

    def match(self, text: str, at: int, ended: bool) -> str | None:
        """The mark at `at`, or "". None: more text decides, which comes unless `ended`."""
        longest = ""
        for end in range(at + 1, len(text) + 1):
            piece = text[at:end]
            if piece in self.texts:
                longest = piece
            if piece not in self._prefixes:
                return longest
        return longest if ended else None


@lru_cache(maxsize=256)
def marks(texts: frozenset[str]) -> Marks:
    """`Marks` of `texts`, made once."""
    return Marks(texts)


class Reader:
    """The text that has come and is not read. `ended`: no more comes.

    Between `hold` and `drop` or `release`, what is read is kept, for the case that it turns out to be no call.
    """

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def hold(self, text: str) -> None:
        """Keep what is read from here on. `text`: what was read last."""
        self._held = [text]

    def drop(self) -> None:
        self._held = None

    def release(self) -> str:
        """What was read since `hold`, or "" after `drop`."""
        held, self._held = self._held or [], None
        return "".join(held)

    def unread(self, mark: str) -> None:
        """Puts back the mark that was read last."""
        self._at -= len(mark)
        if self._held:
            self._held.pop()

    def put_back(self, text: str) -> None:
        """Puts back `text`, which was read last, while nothing is held."""
        self._at -= len(text)
        if self._at < 0:
            # A part of it was read before more text came.
            self._text = text + self._text[self._at + len(text) :]
            self._at = 0

    def rest(self) -> str:
        """Everything that is not read."""
        return self._take(len(self._text))

    def until(self, wanted: Marks) -> Reading[tuple[str, str]]:
        """(text, mark): the text before the next mark, or a part of it with mark "". ("", "") is the end."""
        while True:
            place, mark = wanted.search(self._text, self._at, self.ended)
            if mark or place > self._at or self.ended:
                return self._take(place), self._take(place + len(mark))
            yield

    def literal(self, wanted: Marks) -> Reading[str]:
        """Reads one of `wanted`. Raises `Malformed`, with nothing read, if there is none at the cursor."""
        while (mark := wanted.match(self._text, self._at, self.ended)) is None:
            yield
        if not mark:
            raise Malformed
        return self._take(self._at + len(mark))

    def optional(self, wanted: Marks) -> Reading[str]:
        """As `literal`, but "" if there is none."""
        try:
            return (yield from self.literal(wanted))
        except Malformed:
            return ""

    def name(self, ends: Marks, stops: Marks, valid: re.Pattern[str]) -> Reading[tuple[str, str]]:
        """(name, end): reads a name up to one of `ends`, which is read, or `stops`, which are not (end "").

        `valid`: what a name, without space around it, has to be. Raises `Malformed` with nothing read.
        """
        both = marks(ends.texts | stops.texts)
        while True:
            place, mark = both.search(self._text, self._at, self.ended)
            if place - self._at > NAME_LIMIT or (self.ended and not mark):
                raise Malformed
            if mark:
                break
            yield
        name = self._text[self._at : place].strip()
        if not valid.fullmatch(name):
            raise Malformed
        self._take(place)
        return name, self._take(place + len(mark)) if mark in ends.texts else ""

    def space(self) -> Reading[None]:
        """Reads all white space at the cursor."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._take(found.end())
            if self._at < len(self._text) or self.ended:
                return
            yield

    def is_at_end(self) -> bool:
        """Whether everything is read, and no more comes."""
        return self.ended and self._at == len(self._text)

    def peek(self) -> Reading[str]:
        """The next character, which is not read. "" at the end."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def character(self) -> Reading[str]:
        """Reads the next character. Raises `Malformed` at the end."""
        if not (yield from self.peek()):
            raise Malformed
        return self._take(self._at + 1)

    def run(self, allowed: re.Pattern[str]) -> Reading[str]:
        """Reads what matches `allowed`, a pattern of the form `[...]*`: all that has come, at least one character.

        "" if the next character does not match, or at the end.
        """
        yield from self.peek()
        found = allowed.match(self._text, self._at)
        return self._take(found.end()) if found else ""

    def json_value(self, emit: Callable[[str], None], *, strict: bool = False) -> Reading[bool]:
        """Reads one JSON value as far as its brackets and strings tell, and emits its text as it comes.

        `strict`: strings have no control characters. Returns whether it is complete. If not, the text ended, or the
        cursor is where it stops being JSON.
        """
        first = yield from self.peek()
        if first and first not in '{["':
            scalar = yield from self._scalar()
            emit(scalar)
            return bool(scalar)
        open_brackets: list[str] = []
        while (char := (yield from self.peek())) != "":
            if char == '"':
                emit(self._take(self._at + 1))
                if not (yield from self._string(emit, _STRICT_STRING_TEXT if strict else _STRING_TEXT)):
                    return False
            elif char in _CLOSING:
                open_brackets.append(_CLOSING[char])
                emit(self._take(self._at + 1))
            elif open_brackets and char == open_brackets[-1]:
                open_brackets.pop()
                emit(self._take(self._at + 1))
            else:
                text = yield from self.run(_PLAIN_TEXT)
                if not text:
                    return False
                emit(text)
            if not open_brackets:
                return True
        return False

    def _string(self, emit: Callable[[str], None], allowed: re.Pattern[str]) -> Reading[bool]:
        """The rest of a JSON string, with its closing quote. `allowed`: its text between escapes."""
        while (char := (yield from self.peek())) != "":
            if char == '"':
                emit(self._take(self._at + 1))
                return True
            if char == "\\":
                emit(self._take(self._at + 1))
                if (yield from self.peek()) == "":
                    return False
                emit(self._take(self._at + 1))
            else:
                text = yield from self.run(allowed)
                if not text:
                    return False
                emit(text)
        return False

    def _scalar(self) -> Reading[str]:
        pieces = []
        while piece := (yield from self.run(_SCALAR_TEXT)):
            pieces.append(piece)
        return "".join(pieces)

    def _take(self, end: int) -> str:
        piece = self._text[self._at : end]
        self._at = end
        if self._held is not None and piece:
            self._held.append(piece)
        return piece
