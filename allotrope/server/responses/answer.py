"""Writes an answer as a response object of the Responses API, whole or as events. Must not know the engine or HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from allotrope.errors import InvalidRequest
from allotrope.request import FinishReason
from allotrope.server.blocks import Block, Blocks, Change
from allotrope.server.errors import HttpError
from allotrope.server.generation import TokenScore
from allotrope.server.logprobs import Report, TokenWriter
from allotrope.server.message_stream import MessageDelta, MessageStream
from allotrope.server.responses.protocol import ResponsesRequest
from allotrope.text.formats import ContentDelta

if TYPE_CHECKING:
    from allotrope.text.tokenizer import Tokenizer

Json = dict[str, Any]
Keep = Callable[[Json, Json], bool]

_LOGPROBS = "message.output_text.logprobs"
_PREFIXES = {"reasoning": "rs", "text": "msg", "tool": "fc"}
_INCOMPLETE: dict[FinishReason, str] = {"length": "max_output_tokens"}


def reports_logprobs(body: ResponsesRequest) -> bool:
    """Whether the text of the answer comes with log-probabilities."""
    return _LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


class ResponsesAnswer:
    """POST /v1/responses

    `keep(response, message)`: called once the answer has ended, before the client is told, with the response object and
    the answer as a message. Returns whether it is kept.
    """

    named_events = True

    def __init__(
        self,
        model: str,
        body: ResponsesRequest,
        stream: MessageStream,
        tokenizer: Tokenizer,
        new_call_id: Callable[[], str],
        keep: Keep,
    ) -> None:
        self._stream, self._keep = stream, keep
        self._frame = _frame(model, body)
        self._blocks = Blocks(new_call_id)
        self._writer = TokenWriter(tokenizer, Report(logprobs=body.top_logprobs or 0))
        self._scored = reports_logprobs(body)
        # Log-probabilities of each text block; and the tokens whose text is not sent yet.
        self._logprobs: dict[int, list[Json]] = {}
        self._held: list[TokenScore] = []
        self._finish_reason: FinishReason | None = None
        self._sequence_number = 0

    def opening(self) -> list[Json]:
        begun = self._frame | {"status": "in_progress", "output": [], "usage": None}
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def chunks(self, delta: MessageDelta) -> list[Json]:
        events, read = [], 0
        for event, end in zip(delta.events, delta.ends, strict=True):
            self._held += delta.tokens[read:end]
            read = end
            logprobs = self._take_logprobs(keep=isinstance(event, ContentDelta))
            for change in self._blocks.take(event):
                events += self._write(change, logprobs)
        self._held += delta.tokens[read:]
        self._finish_reason = delta.finish_reason or self._finish_reason
        return events

    def closing(self) -> list[Json]:
        events = [event for change in self._blocks.end() for event in self._write(change, [])]
        response = self._ended()
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def whole(self, deltas: Sequence[MessageDelta]) -> Json:
        for delta in deltas:
            self.chunks(delta)
        for _ in self._blocks.end():
            pass
        return self._ended()

    def failure(self, error: HttpError) -> list[Json]:
        fault = {"code": "server_error", "message": str(error)}
        items = [self._item(block) for block in self._blocks.blocks]
        failed = self._frame | {"status": "failed", "error": fault, "output": items, "usage": self._usage()}
        return [self._event("response.failed", response=failed)]

    def usage(self) -> Json:
        """Tokens of prompt and answer so far."""
        generation = self._stream.generation
        return {
            "prompt_tokens": len(generation.request.prompt_ids),
            "completion_tokens": generation.completion_tokens,
        }

    def _ended(self) -> Json:
        response = self._frame | {
            "status": "incomplete" if self._finish_reason in _INCOMPLETE else "completed",
            "completed_at": int(time.time()),
            "output": [self._item(block) for block in self._blocks.blocks],
            "usage": self._usage(),
        }
        if self._finish_reason in _INCOMPLETE:
            response["incomplete_details"] = {"reason": _INCOMPLETE[self._finish_reason]}
            response["completed_at"] = None
        response["store"] = self._keep(response, self._blocks.message())
        return response

    def _usage(self) -> Json:
        generation = self._stream.generation
        prompt, new = len(generation.request.prompt_ids), generation.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": self._stream.reasoning_tokens},
            "total_tokens": prompt + new,
        }

    def _take_logprobs(self, *, keep: bool) -> list[Json]:
        """The log-probabilities of the tokens since the last text. Those of other events are dropped."""
        tokens, self._held = self._held, []
        if not (keep and self._scored):
            return []
        entries: list[Json] = self._writer.chat_logprobs(tokens)["content"]
        return entries

    def _write(self, change: Change, logprobs: list[Json]) -> list[Json]:
        block = change.block
        place = {"item_id": self._id(block), "output_index": block.index}
        in_part = place | {"content_index": 0}
        match change.what, block.kind:
            case "begin", kind:
                added = self._event("response.output_item.added", output_index=block.index, item=self._item(block))
                if kind == "tool":
                    return [added]
                return [added, self._event("response.content_part.added", **in_part, part=self._part(block))]
            case "more", "text":
                self._logprobs.setdefault(block.index, []).extend(logprobs)
                return [self._event("response.output_text.delta", **in_part, delta=change.text, logprobs=logprobs)]
            case "more", "reasoning":
                return [self._event("response.reasoning_text.delta", **in_part, delta=change.text)]
            case "more", _:
                return [self._event("response.function_call_arguments.delta", **place, delta=change.text)]
            case _, "tool":
                whole = {"arguments": block.text, "name": block.name}
                ended = [self._event("response.function_call_arguments.done", **place, **whole)]
            case _, kind:
                scored = {"logprobs": self._logprobs.get(block.index, [])} if kind == "text" else {}
                name = "output_text" if kind == "text" else "reasoning_text"
                ended = [
                    self._event(f"response.{name}.done", **in_part, text=block.text, **scored),
                    self._event("response.content_part.done", **in_part, part=self._part(block)),
                ]
        return [*ended, self._event("response.output_item.done", output_index=block.index, item=self._item(block))]

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{block.id}"

    def _item(self, block: Block) -> Json:
        cut = self._finish_reason in _INCOMPLETE and block is self._blocks.blocks[-1]
        status = "in_progress" if block.open else "incomplete" if cut else "completed"
        item: Json = {"id": self._id(block), "status": status}
        # A block that has just begun has no part yet.
        parts = [] if block.open and not block.text else [self._part(block)]
        match block.kind:
            case "reasoning":
                return item | {"type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
            case "text":
                return item | {"type": "message", "role": "assistant", "content": parts}
            case "tool":
                call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
                return item | {"type": "function_call", **call}

    def _part(self, block: Block) -> Json:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._logprobs.get(block.index, [])
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}


def _frame(model: str, body: ResponsesRequest) -> Json:
    """The response object, but for what the answer adds."""
    try:
        given = body.model_dump(
            include={"tools", "tool_choice", "reasoning", "text"}, exclude_unset=True, by_alias=True, mode="json"
        )
    except ValueError as error:
        raise InvalidRequest("tools or text.format are nested too deeply to be repeated in the answer.") from error
    reasoning = {"effort": None, "summary": None} | (given.get("reasoning") or {})
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": reasoning,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium"} | _set(given.get("text")),
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": [{"parameters": None, "strict": False} | tool for tool in given.get("tools") or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }


def _set(fields: Json | None) -> Json:
    return {name: value for name, value in (fields or {}).items() if value is not None}
