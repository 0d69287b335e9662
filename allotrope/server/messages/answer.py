"""Writes an answer as a message of the Messages API, whole or as events. Must not know the engine or HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from allotrope.request import FinishReason
from allotrope.server.blocks import Block, Blocks, Change
from allotrope.server.errors import HttpError, messages_error_body
from allotrope.server.message_stream import MessageDelta, MessageStream

Json = dict[str, Any]

_STOP_REASONS: dict[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens"}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool": ("input_json_delta", "partial_json"),
}


class MessagesAnswer:
    """POST /v1/messages

    `shows_thinking`: thinking blocks have their text; otherwise they are empty.
    """

    named_events = True

    def __init__(
        self, model: str, stream: MessageStream, new_call_id: Callable[[], str], *, shows_thinking: bool = True
    ) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model, self._stream = model, stream
        self._shows_thinking = shows_thinking
        self._blocks = Blocks(new_call_id)
        self._finish_reason: FinishReason | None = None
        self._stopped_by: int | str | None = None

    def opening(self) -> list[Json]:
        return [{"type": "message_start", "message": self._message()}]

    def chunks(self, delta: MessageDelta) -> list[Json]:
        events = [event for one in delta.events for change in self._blocks.take(one) for event in self._write(change)]
        if delta.finish_reason is not None:
            self._finish_reason, self._stopped_by = delta.finish_reason, delta.stop_reason
        return events

    def closing(self) -> list[Json]:
        events = [event for change in self._blocks.end() for event in self._write(change)]
        return [
            *events,
            {"type": "message_delta", "delta": self._end(), "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def whole(self, deltas: Sequence[MessageDelta]) -> Json:
        for delta in deltas:
            self.chunks(delta)
        return self._message() | {"content": [self._content(block) for block in self._blocks.blocks]} | self._end()

    def failure(self, error: HttpError) -> list[Json]:
        return [messages_error_body(error)]

    def usage(self) -> Json:
        """Tokens of prompt and answer so far."""
        generation = self._stream.generation
        return {
            "prompt_tokens": len(generation.request.prompt_ids),
            "completion_tokens": generation.completion_tokens,
        }

    def _message(self) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _end(self) -> Json:
        if isinstance(self._stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stopped_by}
        called = self._finish_reason == "stop" and any(block.kind == "tool" for block in self._blocks.blocks)
        reason = "tool_use" if called else _STOP_REASONS.get(self._finish_reason or "stop")
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> Json:
        generation = self._stream.generation
        cached = generation.cached_tokens
        return {
            # The API counts the tokens from the cache apart.
            "input_tokens": len(generation.request.prompt_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generation.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._stream.reasoning_tokens},
        }

    def _write(self, change: Change) -> list[Json]:
        block = change.block
        match change.what:
            case "begin":
                return [{"type": "content_block_start", "index": block.index, "content_block": self._empty(block)}]
            case "more":
                if block.kind == "reasoning" and not self._shows_thinking:
                    return []
                kind, field = _DELTAS[block.kind]
                return [
                    {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, field: change.text}}
                ]
            case "end":
                return [{"type": "content_block_stop", "index": block.index}]

    def _empty(self, block: Block) -> Json:
        match block.kind:
            case "reasoning":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "text":
                return {"type": "text", "text": ""}
            case "tool":
                return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}

    def _content(self, block: Block) -> Json:
        """The whole block."""
        match block.kind:
            case "reasoning":
                return self._empty(block) | {"thinking": block.text if self._shows_thinking else ""}
            case "text":
                return self._empty(block) | {"text": block.text}
            case "tool":
                return self._empty(block) | {"input": block.arguments()}
