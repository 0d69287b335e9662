"""Groups the events of one answer into blocks: reasoning, text and tool calls, each in a row of its own.

The responses and messages routes write one item or content block for each. This module must not know any JSON form.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from allotrope.text.formats import (
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallBegin,
)

BlockKind = Literal["reasoning", "text", "tool"]


@dataclass
class Block:
    """One block. `text`: what it holds so far; of a tool call, its arguments as JSON text.

    `index`: place among the answer's blocks. `id`: unique, without a prefix. `name`, `call_id`: of a tool call; the
    tool's result names the id. `open`: more text may come.
    """

    kind: BlockKind
    index: int
    id: str
    name: str = ""
    call_id: str = ""
    text: str = ""
    open: bool = True

    def arguments(self) -> dict[str, Any]:
        """The arguments of a tool call as an object. Text that is no JSON object is in it whole, as `INVALID_JSON`."""
        try:
            value = json.loads(self.text or "{}")
            # An escape can be half of a surrogate pair, which is no text.
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        except (ValueError, RecursionError):
            value = None
        return value if isinstance(value, dict) else {"INVALID_JSON": self.text}


class Change(NamedTuple):
    """A block begins, gains `text`, or ends."""

    what: Literal["begin", "more", "end"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one answer so far, in their order. `new_call_id`: for calls to which the model gives no id."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self.blocks: list[Block] = []
        self._tools: dict[int, Block] = {}

    def take(self, event: MessageEvent) -> Iterator[Change]:
        """The changes that `event` makes. A block ends where one of another kind, or another tool call, begins."""
        match event:
            case ReasoningDelta(text):
                yield from self._text("reasoning", text)
            case ContentDelta(text):
                yield from self._text("text", text)
            case ToolCallBegin(index, name, call_id):
                yield from self.end()
                block = self._begin("tool", name, call_id or self._new_call_id())
                self._tools[index] = block
                yield Change("begin", block)
            case ToolArgumentsDelta(index, text):
                block = self._tools[index]
                block.text += text
                if text:
                    yield Change("more", block, text)

    def end(self) -> Iterator[Change]:
        """End the block that is open, if there is one."""
        if self.blocks and self.blocks[-1].open:
            self.blocks[-1].open = False
            yield Change("end", self.blocks[-1])

    def message(self) -> dict[str, Any]:
        """The answer as a message of the assistant, in the form of a chat request."""
        message: dict[str, Any] = {"role": "assistant", "content": self._joined("text")}
        if reasoning := self._joined("reasoning"):
            message["reasoning_content"] = reasoning
        if calls := [block for block in self.blocks if block.kind == "tool"]:
            message["tool_calls"] = [tool_call(block.call_id, block.name, block.text) for block in calls]
        return message

    def _text(self, kind: BlockKind, text: str) -> Iterator[Change]:
        if not text:
            return
        if not (self.blocks and self.blocks[-1].open and self.blocks[-1].kind == kind):
            yield from self.end()
            yield Change("begin", self._begin(kind))
        self.blocks[-1].text += text
        yield Change("more", self.blocks[-1], text)

    def _begin(self, kind: BlockKind, name: str = "", call_id: str = "") -> Block:
        block = Block(kind, len(self.blocks), uuid.uuid4().hex, name, call_id)
        self.blocks.append(block)
        return block

    def _joined(self, kind: BlockKind) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call in the form of a chat message. `arguments`: JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
