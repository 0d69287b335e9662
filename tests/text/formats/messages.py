"""Messages as tests compare them: what the events of a parser add up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from allotrope.text.formats import (
    ContentDelta,
    MessageEvent,
    MessageParser,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallBegin,
)


@dataclass(frozen=True)
class Message:
    """`calls`: (name, id, arguments as JSON text) of each call."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str | None, str], ...] = ()


def message_of(events: Sequence[MessageEvent]) -> Message:
    """The message; the order of events is checked: calls are numbered as they begin, and do not mix."""
    calls: list[tuple[str, str | None, list[str]]] = []
    for event in events:
        if isinstance(event, ToolCallBegin):
            assert event.index == len(calls)
            calls.append((event.name, event.id, []))
        elif isinstance(event, ToolArgumentsDelta):
            assert event.index == len(calls) - 1 and event.text
            calls[-1][2].append(event.text)
        else:
            assert event.text
    return Message(
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        "".join(event.text for event in events if isinstance(event, ContentDelta)),
        tuple((name, call_id, "".join(texts)) for name, call_id, texts in calls),
    )


def parse(parser: MessageParser, pieces: Iterable[str]) -> Message:
    """The message of a text that comes in pieces."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return message_of([*events, *parser.finish()])
