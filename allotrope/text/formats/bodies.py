"""Bodies of tool calls: the few ways in which formats write a name and arguments. A format is one of these with data.

A body raises `Malformed` where the text is no call after all; once it has begun the call, it never does.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Protocol

from allotrope.text.formats.parameter_types import is_encodable, is_json, is_text, json_or_string, to_json
from allotrope.text.formats.parser import TaggedParser
from allotrope.text.formats.reader import NAME_LIMIT, Malformed, Marks, Reader, Reading, marks

_NO_MARKS = marks(frozenset())
# A tool's name, and a parameter's.
_TOOL = re.compile(r"[^\s<>{}\[\]()\"'`]+")
_PARAMETER = re.compile(r"[^<>\"'\n]+")


class Body(Protocol):
    """A kind of body."""

    def read(self, parser: TaggedParser, reader: Reader) -> Reading[bool]:
        """Reads a body. Returns whether the end of the call is still to be read."""
        ...


@dataclass(frozen=True)
class Name:
    """A tool's name in text: after `before`, up to one of `ends`, which is read, or of `stops`, which are not.

    `prefix` is left out of names. `has_id`: what stands there is the call's id, `prefix` + name + `:` + number.
    """

    ends: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    prefix: str = ""
    has_id: bool = False

    def read(self, reader: Reader) -> Reading[tuple[str, str | None]]:
        """(name, id)"""
        if self.before:
            yield from reader.space()
            yield from reader.literal(marks(frozenset(self.before)))
        text, _ = yield from reader.name(marks(frozenset(self.ends)), marks(frozenset(self.stops)), _TOOL)
        name, colon, number = text.rpartition(":")
        if not (self.has_id and colon and number.isdecimal()):
            return text.removeprefix(self.prefix) or text, None
        return name.removeprefix(self.prefix) or name, text


@dataclass(frozen=True)
class CallObject:
    """`{"name": "f", "arguments": {...}}`, with one of `argument_keys`. Other keys are left out.

    `brace_is_read`: the body begins after it. `arguments_required`: an object without arguments is no call.
    """

    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    brace_is_read: bool = False
    arguments_required: bool = False

    def read(self, parser: TaggedParser, reader: Reader) -> Reading[bool]:
        if not self.brace_is_read:
            yield from reader.space()
            yield from reader.literal(_OPEN_BRACE)
        name: str | None = None
        early: str | None = None
        begun = False
        while (key := (yield from _key(reader))) is not None:
            if key == "name" and name is None:
                name = yield from _name_value(reader)
                if early is not None:
                    parser.begin(name)
                    parser.arguments(_arguments(early))
                    begun = True
            elif key in self.argument_keys and early is None and not begun:
                if name is None:
                    early = yield from _whole_value(reader)
                    continue
                begun = yield from _begin_arguments(parser, reader, name)
                if not (yield from _arguments_value(parser, reader)):
                    yield from parser.broken_arguments()
                    return False
                reader.hold("")
            else:
                yield from _whole_value(reader)
        if not begun:
            if name is None or self.arguments_required:
                raise Malformed
            parser.begin(name)
            parser.arguments("{}")
        return True


@dataclass(frozen=True)
class CallList:
    """Calls in a row: `item`, `separator`, `item`, then `close`. `close` "": the row ends where no separator follows.

    `first`: the first item, if it is another body.
    """

    item: Body
    separator: str
    close: str = ""
    first: Body | None = None

    def read(self, parser: TaggedParser, reader: Reader) -> Reading[bool]:
        item = self.first or self.item
        while (yield from item.read(parser, reader)):
            item = self.item
            yield from reader.space()
            reader.hold("")
            if not (yield from reader.optional(marks(frozenset((self.separator,))))):
                if self.close:
                    yield from reader.literal(marks(frozenset((self.close,))))
                return True
            yield from reader.space()
        return False


@dataclass(frozen=True)
class NamedJson:
    """A name, then the arguments as a JSON object.

    `fence`: may follow the arguments, and belongs to the call. `call_id`: may follow the name, with the call's id.
    """

    name: Name
    fence: tuple[str, ...] = ()
    call_id: Name | None = None

    def read(self, parser: TaggedParser, reader: Reader) -> Reading[bool]:
        name, call_id = yield from self.name.read(reader)
        if self.call_id is not None and (yield from reader.optional(marks(frozenset(self.call_id.before)))):
            call_id, _ = yield from reader.name(marks(frozenset(self.call_id.ends)), _NO_MARKS, _TOOL)
        parser.begin(name, call_id)
        yield from reader.space()
        first = yield from reader.peek()
        if first == "{":
            if not (yield from reader.json_value(parser.arguments)):
                yield from parser.broken_arguments()
                return False
        elif first:
            # Nothing, or what is no object.
            yield from parser.broken_arguments()
            return False
        if self.fence:
            yield from reader.space()
            yield from reader.optional(marks(frozenset(self.fence)))
        return True


@dataclass(frozen=True)
class Alternatives:
    """The body whose first character comes after white space, else `otherwise`."""

    by_character: tuple[tuple[str, Body], ...]
    otherwise: Body

    def read(self, parser: TaggedParser, reader: Reader) -> Reading[bool]:
        yield from reader.space()
        first = yield from reader.peek()
        body = dict(self.by_character).get(first, self.otherwise)
        return (yield from body.read(parser, reader))


@dataclass(frozen=True)
class Prefixed:
    """`text`, then `body`. `unless`: what begins with `text` and is something else."""

    text: str
    body: Body
    unless: tuple[str, ...] = ()

    def read(self, parser: TaggedParser, reader: Reader) -> Reading[bool]:
        mark = yield from reader.literal(marks(frozenset((self.text, *self.unless))))
        if mark in self.unless:
            reader.unread(mark)
            raise Malformed
        yield from reader.space()
        return (yield from self.body.read(parser, reader))


@dataclass(frozen=True)
class NamedParameters:
    """A name, then parameters in tags: `key`, the parameter's name, `key_end`, `value`, text, `value_end`.

    `key_end`: spelling → of which type the value is: `string`, `json`, or "" where the tool's schema says. `value`:
    text between the two, if any. `end`: follows the last parameter; without it, the end of the call is the body's.
    `implied_ends`: texts that end a value whose end is missing; they are not part of it. `newline`: a newline at
    either end of a value belongs to the tags.
    """

    name: Name
    key: tuple[str, ...]
    key_end: tuple[tuple[str, str], ...]
    value_end: str
    value: str = ""
    end: tuple[str, ...] = ()
    implied_ends: tuple[str, ...] = ()
    newline: bool = False

    def read(self, parser: TaggedParser, reader: Reader) -> Reading[bool]:
        name, call_id = yield from self.name.read(reader)
        parser.begin(name, call_id)
        assert parser.syntax is not None
        stops = frozenset((*parser.syntax.call_end, *parser.syntax.section_end))
        # A call that begins within another ends it.
        starts = frozenset((*parser.syntax.section, *parser.syntax.call))
        between = marks(frozenset((*self.key, *self.end)) | stops | starts)
        separator = "{"
        pending: str | None = ""
        # It waits for the call's end, because other text would end the call for whoever reads the events.
        stray: list[str] = []
        while True:
            text, mark = ("", pending) if pending else (yield from reader.until(between))
            pending = ""
            stray.append(text)
            if mark in self.key:
                reader.hold(mark)
                try:
                    key, kind = yield from self._key(reader)
                except Malformed:
                    stray.append(reader.release())
                    continue
                reader.drop()
                parser.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
                separator = ", "
                pending = yield from self._value(parser, reader, kind, parser.schemas.types(name, key))
                if pending is None:
                    parser.stray("".join(stray))
                    return False
            elif mark or not text:
                break
        parser.arguments("{}" if separator == "{" else "}")
        parser.stray("".join(stray))
        if mark in starts:
            reader.unread(mark)
        return parser.ended_by(mark, self.end)

    def can_name(self, key: str) -> bool:
        """Whether a parameter's name that is written as `key` is read as `key`."""
        valid = len(key) <= NAME_LIMIT and key == key.strip() and _PARAMETER.fullmatch(key) and is_encodable(key)
        return bool(valid) and not any(end in key for end, _ in self.key_end)

    def can_hold(self, text: str) -> bool:
        """Whether a value that is written as `text` is read up to its end."""
        place, _ = marks(frozenset(self.value_ends)).search(text + self.value_end, 0, True)
        return place == len(text) and is_encodable(text)

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Texts that end a value which is text."""
        return (self.value_end, *self.implied_ends)

    def reads_as_it_comes(self, kind: str, types: frozenset[str]) -> bool:
        """Whether a value is a string in any case. `kind`: of `key_end`; `types`: of its schema."""
        return kind == "string" or (kind == "" and is_text(types))

    def _key(self, reader: Reader) -> Reading[tuple[str, str]]:
        """(name, type) of a parameter."""
        kinds = dict(self.key_end)
        key, end = yield from reader.name(marks(frozenset(kinds)), _NO_MARKS, _PARAMETER)
        if self.value:
            yield from reader.space()
            yield from reader.literal(marks(frozenset((self.value,))))
        return key, kinds[end]

    def _value(self, parser: TaggedParser, reader: Reader, kind: str, types: frozenset[str]) -> Reading[str | None]:
        """Reads a value. Returns the text that ended it, if it is not its own end; None if nothing did."""
        as_it_comes = self.reads_as_it_comes(kind, types)
        ends = marks(frozenset(self.value_ends))
        if as_it_comes:
            parser.arguments('"')
        elif parser.values_are_json and (kind == "json" or "string" not in types):
            value, mark = yield from self._json(parser, reader, ends)
            if mark:
                parser.arguments(to_json(value, types) if types else json_or_string(value))
                return "" if mark == self.value_end else mark
        whole: list[str] = []
        held = ""
        if self.newline:
            yield from reader.optional(_NEWLINE)
        while True:
            text, mark = yield from reader.until(ends)
            text = held + text
            held = ""
            if self.newline and text.endswith("\n"):
                text, held = text[:-1], "" if mark else "\n"
            if as_it_comes:
                parser.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            else:
                whole.append(text)
            if mark or reader.is_at_end():
                break
        value = "".join(whole) + held
        if not mark:
            # The text ends within the value: it is not closed, so that nobody takes it for the whole.
            parser.arguments(json.dumps(value, ensure_ascii=False)[1:-1] if as_it_comes else value)
            return None
        if as_it_comes:
            parser.arguments('"')
        elif kind == "json" and not types:
            parser.arguments(json_or_string(value))
        else:
            parser.arguments(to_json(value, types))
        return "" if mark == self.value_end else mark

    def _json(self, parser: TaggedParser, reader: Reader, ends: Marks) -> Reading[tuple[str, str]]:
        """(value, end) of a JSON value with an end behind it, whatever its strings spell. ("", "") reads nothing."""
        reader.hold("")
        pieces: list[str] = []
        yield from reader.space()
        whole = yield from reader.json_value(pieces.append, strict=True)
        yield from reader.space()
        mark = (yield from reader.optional(ends)) if whole and is_json("".join(pieces)) else ""
        text = reader.release()
        if mark:
            return text.removesuffix(mark), mark
        # What is no JSON is read twice, and its ends may lie far apart: in one message, this is tried no second time.
        parser.values_are_json = not ends.search(text, 0, True)[1]
        reader.put_back(text)
        return "", ""


_OPEN_BRACE = marks(frozenset("{"))
_COLON = marks(frozenset(":"))
_NEWLINE = marks(frozenset("\n"))


def _key(reader: Reader) -> Reading[str | None]:
    """The next key of a JSON object, with its colon. None at the object's end, which is read."""
    yield from reader.space()
    char = yield from reader.peek()
    if char == ",":
        yield from reader.character()
        yield from reader.space()
        char = yield from reader.peek()
    if char == "}":
        yield from reader.character()
        return None
    if char != '"':
        raise Malformed
    key = yield from _whole_value(reader)
    yield from reader.space()
    yield from reader.literal(_COLON)
    yield from reader.space()
    return _text(key)


def _whole_value(reader: Reader) -> Reading[str]:
    """The text of a JSON value. Raises `Malformed` if it is none."""
    pieces: list[str] = []
    if not (yield from reader.json_value(pieces.append)):
        raise Malformed
    return "".join(pieces)


def _name_value(reader: Reader) -> Reading[str]:
    name = _text((yield from _whole_value(reader)))
    if name is None or len(name) > NAME_LIMIT or not name.strip() or not is_encodable(name):
        raise Malformed
    return name.strip()


def _text(value: str) -> str | None:
    """The text of a JSON string, or None."""
    try:
        found = json.loads(value, strict=False)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _begin_arguments(parser: TaggedParser, reader: Reader, name: str) -> Reading[bool]:
    """Begins a call before the value of its arguments, if that can be one."""
    if (yield from reader.peek()) not in ("{", '"', "n"):
        raise Malformed
    parser.begin(name)
    return True


def _arguments_value(parser: TaggedParser, reader: Reader) -> Reading[bool]:
    """Reads arguments: an object, as it comes; a string with an object in it, or null. Whether it is complete."""
    if (yield from reader.peek()) == "{":
        return (yield from reader.json_value(parser.arguments))
    pieces: list[str] = []
    whole = yield from reader.json_value(pieces.append)
    parser.arguments(_arguments("".join(pieces)) if whole else "".join(pieces))
    return whole


def _arguments(value: str) -> str:
    """Arguments that are no object, as JSON text of an object if they hold one."""
    text = _text(value)
    if value == "null":
        return "{}"
    return text if text is not None and text.strip().startswith("{") and is_encodable(text) else value
