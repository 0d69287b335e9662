"""Turns the text of one growing sequence into the events of a message, by the data of its format.

Owns what is a call, what is reasoning and what is content. Whatever is not as the format writes it is text: it is
never lost, and never an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from allotrope.text.formats.events import (
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallBegin,
    join_events,
)
from allotrope.text.formats.format import MessageFormat, ReasoningTags, ToolSyntax
from allotrope.text.formats.parameter_types import ToolSchemas
from allotrope.text.formats.reader import Malformed, Marks, Reader, Reading, marks


class MessageParser(Protocol):
    """A parser of one message: all pushes together give the same message for any portions of the text."""

    def push(self, text: str) -> list[MessageEvent]:
        """Add text. Returns the events that are certain now."""
        ...

    def finish(self) -> list[MessageEvent]:
        """The events of what was held. What is unfinished becomes text. Nothing can be pushed after it."""
        ...


def make_parser(
    reasoning: MessageFormat | None,
    tools_format: MessageFormat | None,
    *,
    tools: Iterable[Mapping[str, Any]] = (),
    prompt_opens_reasoning: bool = False,
    special_tokens: Iterable[str] = (),
) -> MessageParser:
    """The parser with the reasoning of one format and the tool calls of another; None: it has none of these.

    The other arguments are those of `MessageFormat.parser`.
    """
    from allotrope.text.formats.channels import ChannelParser

    for one in (tools_format, reasoning):
        if one is not None and one.channels is not None:
            return ChannelParser(
                one.channels,
                tools=tools_format is not None,
                prompt_opens_reasoning=prompt_opens_reasoning,
                special_tokens=special_tokens,
            )
    tags = None if reasoning is None else reasoning.reasoning
    return TaggedParser(
        tags,
        None if tools_format is None else tools_format.tools,
        ToolSchemas(tools),
        reasoning_is_open=prompt_opens_reasoning and tags is not None,
        special_tokens=special_tokens,
    )


class EventStream:
    """Runs a generator over the text as it comes, and collects its events."""

    def __init__(self) -> None:
        self.reader = Reader()
        self._events: list[MessageEvent] = []
        self._reading = self.read()
        self._finished = False

    def read(self) -> Reading[None]:
        """Reads the whole message."""
        raise NotImplementedError

    def emit(self, event: MessageEvent) -> None:
        self._events.append(event)

    def push(self, text: str) -> list[MessageEvent]:
        if not text or self._finished:
            return []
        self.reader.feed(text)
        next(self._reading)
        return self._taken()

    def finish(self) -> list[MessageEvent]:
        if not self._finished:
            self._finished = True
            self.reader.ended = True
            for _ in self._reading:
                pass
        return self._taken()

    def _taken(self) -> list[MessageEvent]:
        events, self._events = self._events, []
        return join_events(events)


class TaggedParser(EventStream):
    """The parser of formats with tags in the text. Its attributes are for bodies of calls.

    `tags`: of reasoning, `syntax`: of calls; None: there are none. `schemas`: of the request's tools.
    """

    def __init__(
        self,
        tags: ReasoningTags | None,
        syntax: ToolSyntax | None,
        schemas: ToolSchemas,
        *,
        reasoning_is_open: bool,
        special_tokens: Iterable[str],
    ) -> None:
        self.schemas = schemas
        # Until a value that should be JSON is none.
        self.values_are_json = True
        self._tags = tags
        self.syntax = syntax
        self._in_reasoning = reasoning_is_open
        self._in_section = False
        # After a call whose end did not follow: its end is dropped where it comes.
        self._end_is_due = False
        self._calls = 0
        self._content_has_begun = False
        # Whether white space between content and content, around calls, was taken for the syntax's.
        self._content_is_parted = False
        self._reasoning_has_begun = False
        # White space that a tag may follow, and then belongs to the tag.
        self._space: list[str] = []
        # White space at the cursor belongs to the tag before it.
        self._after_tag = reasoning_is_open
        special = frozenset(token for token in special_tokens if token)
        self._marks = _all_marks(tags, syntax, special)
        self._special_syntax = special.intersection(syntax_texts(syntax) if syntax else ())
        self._call_marks = marks(frozenset(syntax.call if syntax else ()))
        super().__init__()

    def read(self) -> Reading[None]:
        while True:
            text, mark = yield from self.reader.until(self._marks)
            if text:
                self._add_text(text)
            elif not mark:
                break
            if mark:
                yield from self._read_mark(mark)
        if self._after_tag or (self._calls and not self._in_reasoning):
            self._space.clear()
        self._flush_space()

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call has begun, which is not taken back. White space before it belongs to the syntax."""
        self.reader.drop()
        if self._in_reasoning:
            self._end_reasoning()
        self._content_is_parted = self._content_is_parted or (self._content_has_begun and bool(self._space))
        self._end_tag()
        self.emit(ToolCallBegin(self._calls, name, call_id))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that has begun."""
        if text:
            self.emit(ToolArgumentsDelta(self._calls - 1, text))

    def broken_arguments(self) -> Reading[None]:
        """Reads arguments that are not as the format writes them: as they stand, up to the end of the call."""
        assert self.syntax is not None
        ends = marks(frozenset((*self.syntax.call_end, *self.syntax.section_end)))
        while True:
            text, mark = yield from self.reader.until(ends)
            self.arguments(text)
            if mark in self.syntax.section_end:
                self._in_section = False
            if mark or not text:
                return

    def ended_by(self, mark: str, body_ends: tuple[str, ...]) -> bool:
        """Whether the end of the call is still to be read after a body that ended with `mark`."""
        assert self.syntax is not None
        if mark in self.syntax.section_end and mark not in body_ends:
            self._in_section = False
        return mark in body_ends

    def stray(self, text: str) -> None:
        """Text within a call that belongs to nothing there: it is content."""
        self._add_content(text)

    def _read_mark(self, mark: str) -> Reading[None]:
        tags, syntax = self._tags, self.syntax
        if tags is not None and mark == tags.end and self._in_reasoning:
            self._end_reasoning()
        elif tags is not None and mark == tags.start and self._may_begin_reasoning():
            yield from self._begin_reasoning(tags)
        elif tags is not None and mark in (tags.start, tags.end):
            # The end of reasoning that has ended already, before any content, is said twice.
            if mark == tags.start or self._content_has_begun:
                self._add_text(mark)
        elif syntax is not None and mark in syntax.section_end and self._in_section:
            self._in_section = False
            self._end_is_due = False
            self._end_tag()
        elif syntax is not None and mark in syntax.call_end and self._end_is_due:
            self._end_is_due = False
            self._end_tag()
        elif syntax is not None and mark in (*syntax.section, *syntax.call) and self._may_call(mark):
            yield from self._read_calls(syntax, mark)
        elif syntax is not None and mark in syntax_texts(syntax) and mark not in self._special_syntax:
            self._add_text(mark)
        # Else it is a special token, which is no text.

    def _may_begin_reasoning(self) -> bool:
        assert self._tags is not None
        if self._in_reasoning:
            return not self._reasoning_has_begun
        return self._tags.anywhere or not (self._content_has_begun or self._reasoning_has_begun or self._calls)

    def _begin_reasoning(self, tags: ReasoningTags) -> Reading[None]:
        self._in_reasoning = True
        self._space.clear()
        self._after_tag = True
        if tags.header:
            yield from self.reader.optional(marks(frozenset((tags.header,))))

    def _end_reasoning(self) -> None:
        self._in_reasoning = False
        self._reasoning_has_begun = True
        self._end_tag()

    def _end_tag(self) -> None:
        self._space.clear()
        self._after_tag = True

    def _may_call(self, mark: str) -> bool:
        assert self.syntax is not None
        if self._in_reasoning:
            # A call without its section is more likely a thought about one.
            alone = bool(self.syntax.section) and mark not in self.syntax.section
            return self._tags is not None and self._tags.tools_end and not self.syntax.first and not alone
        if self.syntax.first and (self._content_has_begun or self._calls):
            return False
        return mark not in self.syntax.call or self._in_section or self.syntax.bare or not self.syntax.section

    def _read_calls(self, syntax: ToolSyntax, mark: str) -> Reading[None]:
        """A section, or one call, after its first text."""
        was_in_section, calls = self._in_section, self._calls
        self.reader.hold(mark)
        try:
            if mark in syntax.section:
                yield from self.reader.space()
                yield from self.reader.literal(self._call_marks)
            # The end of a section whose beginning is missing is no text.
            self._in_section = bool(syntax.section)
            yield from self._read_call(syntax)
        except Malformed:
            begun = self._calls > calls
            self._end_is_due = begun and bool(syntax.call_end)
            # A section without a call is none.
            self._in_section = self._in_section and (was_in_section or begun)
            text = self.reader.release()
            for token in self._special_syntax:
                text = text.replace(token, "")
            self._add_text(text)

    def _read_call(self, syntax: ToolSyntax) -> Reading[None]:
        """A body, and the end of the call."""
        whole = yield from syntax.body.read(self, self.reader)
        self.reader.drop()
        if not whole or not syntax.call_end:
            return
        yield from self.reader.space()
        ended = yield from self.reader.optional(marks(frozenset(syntax.call_end)))
        self._end_is_due = not ended

    def _add_text(self, text: str) -> None:
        if self._in_reasoning:
            self._add_reasoning(text)
        else:
            self._add_content(text)

    def _add_reasoning(self, text: str) -> None:
        if self._after_tag:
            text = text.lstrip("\n")
        if not text:
            return
        self._after_tag = False
        self._reasoning_has_begun = True
        self._add(text, text.rstrip("\n"), ReasoningDelta)

    def _add_content(self, text: str) -> None:
        if self._after_tag:
            found = text
            text = text.lstrip() if self._calls else text.lstrip("\n")
            self._content_is_parted = self._content_is_parted or (self._content_has_begun and text != found)
        if not text:
            return
        self._after_tag = False
        if self._content_is_parted:
            self._content_is_parted = False
            text = f"\n{text}"
        self._content_has_begun = self._content_has_begun or not text.isspace()
        # White space waits where a tag may follow that it belongs to.
        waits = self.syntax is not None or not self._content_has_begun
        self._add(text, text.rstrip() if waits else text, ContentDelta)

    def _add(self, text: str, certain: str, kind: type[ReasoningDelta] | type[ContentDelta]) -> None:
        """Emit the `certain` beginning of `text`, after white space that was held; hold its end."""
        if certain:
            self._flush_space()
            self.emit(kind(certain))
        if len(certain) < len(text):
            self._space.append(text[len(certain) :])

    def _flush_space(self) -> None:
        if self._space:
            self.emit((ReasoningDelta if self._in_reasoning else ContentDelta)("".join(self._space)))
            self._space.clear()


def syntax_texts(syntax: ToolSyntax) -> tuple[str, ...]:
    """Every text that opens or closes a section or a call."""
    return (*syntax.section, *syntax.call, *syntax.call_end, *syntax.section_end)


def _all_marks(tags: ReasoningTags | None, syntax: ToolSyntax | None, special_tokens: frozenset[str]) -> Marks:
    texts = set(special_tokens)
    if tags is not None:
        texts |= {tags.start, tags.end}
    if syntax is not None:
        texts |= set(syntax_texts(syntax))
    return marks(frozenset(texts))
