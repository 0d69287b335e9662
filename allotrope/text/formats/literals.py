"""Arguments in a notation of their own, written as JSON as they come: Gemma 4's, and Python's.

A value is a string, a list, an object, or a bare word.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from allotrope.text.formats.bodies import Name
from allotrope.text.formats.parameter_types import is_text, to_json
from allotrope.text.formats.parser import TaggedParser
from allotrope.text.formats.reader import Malformed, Reader, Reading, marks

_MAX_DEPTH = 64
_WORD = re.compile(r"[^\s,:=(){}\[\]\"'<]*")
_BARE_TEXT = re.compile(r"[^,{}\[\]<]*")
_KEY = re.compile(r"[^,{}\[\]()<>\"']+")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_VALUE_ENDS = (",", "}", "]")
_FUNCTION = re.compile(r"[^\W\d][\w.\-]*")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_NONE = marks(frozenset())


@dataclass(frozen=True)
class BraceCall:
    """`call:f{p:<|"|>text<|"|>,q:1}`: a name, then parameters in braces, with strings between `quote`s."""

    name: Name
    quote: str

    def read(self, parser: TaggedParser, reader: Reader) -> Reading[bool]:
        name, call_id = yield from self.name.read(reader)
        parser.begin(name, call_id)
        try:
            yield from self._object(parser, reader, name, _MAX_DEPTH)
        except Malformed:
            yield from parser.broken_arguments()
            return False
        return True

    def _object(self, parser: TaggedParser, reader: Reader, tool: str | None, depth: int) -> Reading[None]:
        """An object after its opening brace. `tool`: the tool whose parameters these are, at the top."""
        separator = "{"
        quote = marks(frozenset((self.quote,)))
        while True:
            yield from reader.space()
            if (yield from reader.optional(_COMMA)):
                continue
            if (yield from reader.optional(_CLOSE_BRACE)):
                break
            if (yield from reader.optional(quote)):
                key, _ = yield from reader.name(quote, _NONE, _QUOTED_KEY)
                yield from reader.space()
                yield from reader.literal(_COLON)
            else:
                key, _ = yield from reader.name(_COLON, _NONE, _KEY)
            parser.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            types = parser.schemas.types(tool, key) if tool is not None else frozenset()
            yield from self._value(parser, reader, types, depth)
        parser.arguments("{}" if separator == "{" else "}")

    def _list(self, parser: TaggedParser, reader: Reader, depth: int) -> Reading[None]:
        separator = "["
        while True:
            yield from reader.space()
            if (yield from reader.optional(_COMMA)):
                continue
            if (yield from reader.optional(_CLOSE_BRACKET)):
                break
            parser.arguments(separator)
            separator = ", "
            yield from self._value(parser, reader, frozenset(), depth)
        parser.arguments("[]" if separator == "[" else "]")

    def _value(self, parser: TaggedParser, reader: Reader, types: frozenset[str], depth: int) -> Reading[None]:
        if not depth:
            raise Malformed
        yield from reader.space()
        if (yield from reader.optional(_OPEN_BRACE)):
            yield from self._object(parser, reader, None, depth - 1)
        elif (yield from reader.optional(_OPEN_BRACKET)):
            yield from self._list(parser, reader, depth - 1)
        elif (yield from reader.optional(marks(frozenset((self.quote,))))):
            yield from self._string(parser, reader, types)
        else:
            word = yield from _run(reader, _BARE_TEXT)
            if not word and (yield from reader.peek()) not in _VALUE_ENDS:
                raise Malformed
            parser.arguments(_bare(word, types))

    def _string(self, parser: TaggedParser, reader: Reader, types: frozenset[str]) -> Reading[None]:
        as_it_comes = is_text(types)
        whole: list[str] = []
        if as_it_comes:
            parser.arguments('"')
        while True:
            text, mark = yield from reader.until(marks(frozenset((self.quote,))))
            if as_it_comes:
                parser.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            else:
                whole.append(text)
            if mark or not text:
                break
        if not as_it_comes:
            parser.arguments(to_json("".join(whole), types))
        elif mark:
            parser.arguments('"')


@dataclass(frozen=True)
class PythonCall:
    """`f(p="text", q=[1, None])`: a call with keyword arguments, whose values are literals."""

    words: Mapping[str, str] = field(default_factory=lambda: _PYTHON_WORDS, hash=False)

    def read(self, parser: TaggedParser, reader: Reader) -> Reading[bool]:
        name, _ = yield from reader.name(_OPEN_PARENTHESIS, _NONE, _FUNCTION)
        yield from reader.space()
        # Only an argument, or none, tells a call from prose.
        if (yield from reader.optional(_CLOSE_PARENTHESIS)):
            parser.begin(name)
            parser.arguments("{}")
            return True
        key = yield from self._keyword(reader)
        parser.begin(name)
        try:
            yield from self._arguments(parser, reader, key)
        except Malformed:
            yield from parser.broken_arguments()
            return False
        return True

    def _arguments(self, parser: TaggedParser, reader: Reader, key: str) -> Reading[None]:
        parser.arguments(f"{{{json.dumps(key)}: ")
        while True:
            yield from self._value(parser, reader, _MAX_DEPTH)
            yield from reader.space()
            if (yield from reader.literal(_COMMA_OR_PARENTHESIS)) == ")":
                break
            yield from reader.space()
            if (yield from reader.optional(_CLOSE_PARENTHESIS)):
                break
            parser.arguments(f", {json.dumps((yield from self._keyword(reader)))}: ")
        parser.arguments("}")

    def _keyword(self, reader: Reader) -> Reading[str]:
        key, _ = yield from reader.name(_EQUALS, _NONE, _IDENTIFIER)
        return key

    def _value(self, parser: TaggedParser, reader: Reader, depth: int) -> Reading[None]:
        if not depth:
            raise Malformed
        yield from reader.space()
        opening = yield from reader.optional(_PYTHON_OPENINGS)
        if opening in ("'", '"'):
            parser.arguments('"')
            yield from self._string(parser, reader, opening)
            parser.arguments('"')
        elif opening == "{":
            yield from self._items(parser, reader, "{}", depth)
        elif opening:
            yield from self._items(parser, reader, "[]", depth)
        else:
            word = yield from _run(reader, _WORD)
            number = _NUMBER.fullmatch(word)
            if word not in self.words and not number:
                parser.arguments(word)
                raise Malformed
            parser.arguments(self.words.get(word) or _json_number(word))

    def _items(self, parser: TaggedParser, reader: Reader, brackets: str, depth: int) -> Reading[None]:
        """The items of a list or a dictionary after its opening bracket. JSON's brackets are `brackets`."""
        parser.arguments(brackets[0])
        first = True
        while True:
            yield from reader.space()
            if (yield from reader.optional(_CLOSE_BRACE if brackets == "{}" else _CLOSE_LIST)):
                break
            if not first:
                yield from reader.literal(_COMMA)
                yield from reader.space()
                if (yield from reader.optional(_CLOSE_BRACE if brackets == "{}" else _CLOSE_LIST)):
                    break
                parser.arguments(", ")
            first = False
            if brackets == "{}":
                quote = yield from reader.literal(_QUOTES)
                parser.arguments('"')
                yield from self._string(parser, reader, quote)
                yield from reader.space()
                yield from reader.literal(_COLON)
                parser.arguments('": ')
            yield from self._value(parser, reader, depth - 1)
        parser.arguments(brackets[1])

    def _string(self, parser: TaggedParser, reader: Reader, quote: str) -> Reading[None]:
        """A string after its opening quote, without JSON's quotes."""
        ends = marks(frozenset((quote, "\\")))
        while True:
            text, mark = yield from reader.until(ends)
            parser.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            if mark == quote:
                return
            if mark == "\\":
                # In ASCII, because an escape can be half of a surrogate pair.
                parser.arguments(json.dumps((yield from _escaped(reader)))[1:-1])
            elif not text:
                raise Malformed


def _escaped(reader: Reader) -> Reading[str]:
    """The character that an escape stands for, after its backslash."""
    char = yield from reader.character()
    digits = ""
    if char in _HEX:
        while len(digits) < _HEX[char] and (digit := (yield from reader.run(_ONE_DIGIT))):
            digits += digit
        if len(digits) < _HEX[char] or int(digits, 16) > 0x10FFFF:
            return f"\\{char}{digits}"
        return chr(int(digits, 16))
    if char in "\\'\"":
        return char
    return _ESCAPES.get(char, f"\\{char}")


def _run(reader: Reader, allowed: re.Pattern[str]) -> Reading[str]:
    """All text at the cursor that matches `allowed`."""
    pieces: list[str] = []
    while piece := (yield from reader.run(allowed)):
        pieces.append(piece)
    return "".join(pieces)


def _bare(text: str, types: frozenset[str]) -> str:
    """JSON of a bare word: a number, true, false or null, else a string."""
    if types:
        return to_json(text.strip(), types)
    word = text.strip()
    if word in ("true", "false", "null") or _JSON_NUMBER.fullmatch(word):
        return word
    return json.dumps(word, ensure_ascii=False)


def _json_number(word: str) -> str:
    """A Python number as JSON."""
    word = word.replace("_", "").lstrip("+")
    if _JSON_NUMBER.fullmatch(word):
        return word
    value = float(word)
    if not math.isfinite(value):
        return json.dumps(word)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_QUOTED_KEY = re.compile(r".*", re.DOTALL)
_ONE_DIGIT = re.compile(r"[0-9a-fA-F]?")
_COMMA = marks(frozenset(","))
_COLON = marks(frozenset(":"))
_EQUALS = marks(frozenset("="))
_QUOTES = marks(frozenset("\"'"))
_OPEN_BRACE = marks(frozenset("{"))
_CLOSE_BRACE = marks(frozenset("}"))
_OPEN_BRACKET = marks(frozenset("["))
_CLOSE_BRACKET = marks(frozenset("]"))
_CLOSE_LIST = marks(frozenset("])"))
_OPEN_PARENTHESIS = marks(frozenset("("))
_CLOSE_PARENTHESIS = marks(frozenset(")"))
_COMMA_OR_PARENTHESIS = marks(frozenset(",)"))
_PYTHON_OPENINGS = marks(frozenset("\"'{[("))
