"""Events of a message: what a parser makes of a model's text, in the order in which it comes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningDelta:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """A tool call begins. `index`: its number in the message, from 0. `id`: only where the format writes one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True)
class ToolArgumentsDelta:
    """More of a call's arguments: the texts of one `index`, joined, are the arguments as JSON text."""

    index: int
    text: str


MessageEvent = ReasoningDelta | ContentDelta | ToolCallBegin | ToolArgumentsDelta


def join_events(events: list[MessageEvent]) -> list[MessageEvent]:
    """The same events, with neighbouring texts of one kind joined."""
    joined: list[MessageEvent] = []
    texts: list[str] = []
    for event in events:
        last = joined[-1] if joined else None
        if not isinstance(event, ToolCallBegin) and continues(event, last):
            texts.append(event.text)
            continue
        _close(joined, texts)
        joined.append(event)
        texts = [] if isinstance(event, ToolCallBegin) else [event.text]
    _close(joined, texts)
    return joined


def continues(event: MessageEvent, last: MessageEvent | None) -> bool:
    """Whether `event` is more of the text of the event before it."""
    if isinstance(event, ToolArgumentsDelta):
        return isinstance(last, ToolArgumentsDelta) and last.index == event.index
    return type(event) is type(last) and not isinstance(event, ToolCallBegin)


def _close(joined: list[MessageEvent], texts: list[str]) -> None:
    if len(texts) < 2:
        return
    last = joined[-1]
    text = "".join(texts)
    if isinstance(last, ToolArgumentsDelta):
        joined[-1] = ToolArgumentsDelta(last.index, text)
    elif isinstance(last, ReasoningDelta | ContentDelta):
        joined[-1] = type(last)(text)
