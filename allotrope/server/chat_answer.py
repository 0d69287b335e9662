"""Writes message deltas as OpenAI's chat completions, whole or in chunks. Must not know the engine or HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from allotrope.server.answers import OpenAIAnswer
from allotrope.server.generation import TokenScore
from allotrope.server.logprobs import Report
from allotrope.server.message_stream import MessageDelta, MessageStream
from allotrope.text.formats import ContentDelta, MessageEvent, ReasoningDelta, ToolArgumentsDelta, ToolCallBegin

if TYPE_CHECKING:
    from allotrope.server.message_formats import MessageFormats
    from allotrope.text.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass
class _Message:
    """The joined deltas of one sequence. `calls`: each with the pieces of its arguments."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[Json, list[str]]] = field(default_factory=list)
    tokens: list[TokenScore] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatAnswer(OpenAIAnswer):
    """POST /v1/chat/completions"""

    prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def __init__(
        self, model: str, stream: MessageStream, tokenizer: Tokenizer, report: Report, formats: MessageFormats
    ) -> None:
        super().__init__(model, [stream.generation], tokenizer, report)
        self._stream = stream
        self._formats = formats
        self._calls = [False] * self._count

    def opening(self) -> list[Json]:
        events = [
            self._chunk([self._choice(index, {"role": "assistant", "content": ""})]) for index in range(self._count)
        ]
        return [events[0] | self._about_prompt(), *events[1:]]

    def chunks(self, delta: MessageDelta) -> list[Json]:
        messages = [self._event(delta.index, event) for event in delta.events]
        if not messages and delta.finish_reason is None:
            messages = [{}]
        tokens: Sequence[TokenScore] = delta.tokens
        chunks = []
        for message in messages:
            chunks.append(self._chunk([self._choice(delta.index, message, tokens)]))
            tokens = ()
        if delta.finish_reason is not None:
            choice = self._choice(delta.index, {}, tokens)
            reason = self._finish_reason(delta.finish_reason, self._calls[delta.index])
            chunks.append(self._chunk([choice | {"finish_reason": reason, "stop_reason": delta.stop_reason}]))
        return chunks

    def whole(self, deltas: Sequence[MessageDelta]) -> Json:
        messages = [_Message() for _ in range(self._count)]
        for delta in deltas:
            self._accumulate(messages[delta.index], delta)
        choices = [self._whole_choice(index, message) for index, message in enumerate(messages)]
        return self._frame(self.object_whole, choices) | {"usage": self.usage()} | self._about_prompt()

    def usage(self) -> Json:
        """Tokens of prompts and answers so far."""
        usage = super().usage()
        details = {"reasoning_tokens": self._stream.reasoning_tokens} | usage.get("completion_tokens_details", {})
        return usage | {"completion_tokens_details": details}

    def _event(self, index: int, event: MessageEvent) -> Json:
        """The `delta` of one event."""
        match event:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return _reasoning(text)
            case ToolCallBegin():
                self._calls[index] = True
                return {"tool_calls": [{"index": event.index} | self._call(event)]}
            case ToolArgumentsDelta(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}

    def _call(self, event: ToolCallBegin) -> Json:
        """A call whose arguments are still to come."""
        return {
            "id": event.id or self._formats.new_call_id(),
            "type": "function",
            "function": {"name": event.name, "arguments": ""},
        }

    def _finish_reason(self, reason: str, calls_tools: bool) -> str:
        return "tool_calls" if calls_tools and reason == "stop" else reason

    def _choice(self, index: int, message: Json, tokens: Sequence[TokenScore] = ()) -> Json:
        scored = self._report.logprobs is not None and tokens
        choice: Json = {
            "index": index,
            "delta": message,
            "logprobs": self._writer.chat_logprobs(tokens) if scored else None,
            "finish_reason": None,
        }
        if self._report.token_ids:
            choice["token_ids"] = [token.id for token in tokens]
        return choice

    def _accumulate(self, message: _Message, delta: MessageDelta) -> None:
        for event in delta.events:
            match event:
                case ContentDelta(text):
                    message.content.append(text)
                case ReasoningDelta(text):
                    message.reasoning.append(text)
                case ToolCallBegin():
                    message.calls.append((self._call(event), []))
                case ToolArgumentsDelta(number, text):
                    message.calls[number][1].append(text)
        message.tokens += delta.tokens
        if delta.finish_reason is not None:
            message.finish_reason, message.stop_reason = delta.finish_reason, delta.stop_reason

    def _whole_choice(self, index: int, message: _Message) -> Json:
        content = "".join(message.content)
        written: Json = {"role": "assistant", "content": content or (None if message.calls else ""), "refusal": None}
        if message.reasoning:
            written |= _reasoning("".join(message.reasoning))
        if message.calls:
            for call, pieces in message.calls:
                call["function"]["arguments"] = "".join(pieces)
            written["tool_calls"] = [call for call, _ in message.calls]
        choice: Json = {
            "index": index,
            "message": written,
            "logprobs": None if self._report.logprobs is None else self._writer.chat_logprobs(message.tokens),
            "finish_reason": self._finish_reason(message.finish_reason or "", bool(message.calls)),
            "stop_reason": message.stop_reason,
        }
        if self._report.token_ids:
            choice["token_ids"] = [token.id for token in message.tokens]
        return choice

    def _about_prompt(self) -> Json:
        about: Json = {}
        if self._report.token_ids:
            about["prompt_token_ids"] = list(self._stream.generation.request.prompt_ids)
        if self._report.prompt_logprobs is not None:
            about["prompt_logprobs"] = self._writer.prompt_logprobs(self._stream.generation)
        return about


def _reasoning(text: str) -> Json:
    """Reasoning by both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}
