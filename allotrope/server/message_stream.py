"""Turns the text of a generation into message events: reasoning, content and tool calls.

Every API with messages writes its answers from `MessageDelta`. This module must not know HTTP or any JSON form.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from allotrope.request import FinishReason
from allotrope.server.generation import Delta, Generation, TokenScore
from allotrope.text.formats import (
    ContentDelta,
    MessageEvent,
    MessageParser,
    ReasoningDelta,
    ToolCallBegin,
)
from allotrope.text.formats.events import continues, join_events

if TYPE_CHECKING:
    from allotrope.engine.client import EngineClient
    from allotrope.server.metrics import Metrics


@dataclass(frozen=True)
class MessageDelta:
    """What sequence `index` of an answer gains.

    `tokens`: the tokens of `events`, with those that add no event. `ends`: per event, how many of `tokens` were read
    when its last text came. The last delta of a sequence has a `finish_reason`: an answer that calls tools ends with
    "stop", as others do.
    """

    index: int
    events: tuple[MessageEvent, ...]
    tokens: tuple[TokenScore, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    ends: tuple[int, ...] = ()


class PlainParser:
    """Parser of a format without structure: all text is content."""

    def push(self, text: str) -> list[MessageEvent]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[MessageEvent]:
        return []


@dataclass
class _Sequence:
    parser: MessageParser
    in_reasoning: bool
    # Tokens that have added no event yet.
    held: list[TokenScore] = field(default_factory=list)
    done: bool = False


class MessageStream:
    """The message deltas of `generation`.

    `new_parser`: makes the parser of one sequence. `opens_in_reasoning`: the prompt ends within reasoning.
    `include_reasoning`: False leaves the reasoning out of the events. `single_call`: a sequence ends before its second
    tool call. `reasoning_tokens`: number of tokens so far that belong to reasoning, over all sequences.
    """

    def __init__(
        self,
        generation: Generation,
        new_parser: Callable[[], MessageParser],
        *,
        opens_in_reasoning: bool = False,
        include_reasoning: bool = True,
        single_call: bool = False,
    ) -> None:
        self.generation = generation
        self.reasoning_tokens = 0
        self._include_reasoning = include_reasoning
        self._single_call = single_call
        self._sequences = [_Sequence(new_parser(), opens_in_reasoning) for _ in range(generation.request.params.n)]

    async def deltas(self, engine: EngineClient, metrics: Metrics) -> AsyncGenerator[MessageDelta, None]:
        """Run the request and yield its message deltas. Closing and errors are those of `Generation.deltas`."""
        async with aclosing(self.generation.deltas(engine, metrics)) as deltas:
            async for delta in deltas:
                message = self.take(delta)
                if message is not None:
                    yield message

    def take(self, delta: Delta) -> MessageDelta | None:
        """The message delta that `delta` adds, or None if it adds no event and ends nothing."""
        sequence = self._sequences[delta.index - self.generation.first_index]
        if sequence.done:
            return None
        reason, stop_reason = delta.finish_reason, delta.stop_reason
        events: list[tuple[MessageEvent, int]] = []
        # The parser reads token by token, so that each token is counted where it belongs.
        for read, (token, text) in enumerate(zip_longest(delta.tokens, delta.pieces or (delta.text,)), start=1):
            new = sequence.parser.push(text) if text else []
            if self._single_call and (second := _second_call(new)) is not None:
                events += [(event, len(sequence.held)) for event in new[:second]]
                reason, stop_reason = "stop", None
                self.generation.end(delta.index, max(0, len(delta.tokens) - read))
                break
            self._count(sequence, new, token)
            events += [(event, len(sequence.held)) for event in new]
        else:
            if reason is not None:
                events += [(event, len(sequence.held)) for event in sequence.parser.finish()]
        sequence.done = reason is not None
        return self._message(sequence, delta.index, events, reason, stop_reason)

    def _count(self, sequence: _Sequence, new: list[MessageEvent], token: TokenScore | None) -> None:
        if new:
            sequence.in_reasoning = isinstance(new[-1], ReasoningDelta)
        if token is not None:
            sequence.held.append(token)
            self.reasoning_tokens += sequence.in_reasoning

    def _message(
        self,
        sequence: _Sequence,
        index: int,
        events: list[tuple[MessageEvent, int]],
        reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> MessageDelta | None:
        """`events`: each with the number of tokens held when it came."""
        if not self._include_reasoning:
            events = [one for one in events if not isinstance(one[0], ReasoningDelta)]
        if not events and reason is None:
            return None
        tokens, sequence.held = tuple(sequence.held), []
        ends: list[int] = []
        last: MessageEvent | None = None
        for event, end in events:
            if continues(event, last):
                ends.pop()
            ends.append(end)
            last = event
        joined = join_events([event for event, _ in events])
        return MessageDelta(index, tuple(joined), tokens, reason, stop_reason, tuple(ends))


def _second_call(events: list[MessageEvent]) -> int | None:
    """Position of the first event that belongs to a second tool call, if there is one."""
    return next((i for i, event in enumerate(events) if isinstance(event, ToolCallBegin) and event.index > 0), None)
