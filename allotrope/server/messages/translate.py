"""From a body of the Messages API to a conversation. Must not know HTTP or answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from allotrope.errors import InvalidRequest
from allotrope.request import Grammar
from allotrope.server.blocks import tool_call
from allotrope.server.conversation import SWITCHES, Conversation
from allotrope.server.messages.protocol import (
    Block,
    CountTokensRequest,
    FreeChoice,
    InputMessage,
    MessagesRequest,
    NamedChoice,
    TextBlock,
    ThinkingBlock,
    ThinkingOff,
    ThinkingOn,
    ToolResultBlock,
    ToolUseBlock,
)
from allotrope.server.tools import NamedTool, Tool, ToolChoice
from allotrope.server.values import describe_value

Json = dict[str, Any]

_CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}


def as_conversation(body: MessagesRequest | CountTokensRequest) -> Conversation:
    """The messages of `body` after its system prompt, with its tools and the form of its answer.

    Raises `InvalidRequest` for blocks in a message where they cannot be, and for a result that answers no call.
    """
    system = [] if body.system is None else [{"role": "system", "content": _joined(body.system)}]
    messages = system + _read_messages(body.messages)
    choice, parallel = _choice(body)
    effort = None if body.output_config is None else body.output_config.effort
    return Conversation(
        messages=messages,
        tools=[Tool(tool.name, tool.description, tool.input_schema, tool.strict or False) for tool in body.tools or ()],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        reasoning_effort="none" if isinstance(body.thinking, ThinkingOff) else effort,
        template_variables=_variables(body),
        continue_final_message=_is_continued(messages[-1]),
        grammar=_grammar(body),
    )


def _read_messages(messages: Sequence[InputMessage]) -> list[Json]:
    read: list[Json] = []
    calls: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if isinstance(message.content, str):
            read.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            read.append(_answer(message.content, where))
            calls.update(call["id"] for call in read[-1].get("tool_calls", ()))
        else:
            read += _said(message.role, message.content, calls, where)
    return read


def _answer(blocks: Sequence[Block], where: str) -> Json:
    """A message of the assistant."""
    answer: Json = {"role": "assistant", "content": ""}
    for index, block in enumerate(blocks):
        match block:
            case TextBlock():
                answer["content"] += block.text
            case ThinkingBlock():
                answer["reasoning_content"] = answer.get("reasoning_content", "") + block.thinking
            case ToolUseBlock():
                calls = answer.setdefault("tool_calls", [])
                calls.append(tool_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False)))
            case ToolResultBlock():
                raise _misplaced(block.type, "assistant", f"{where}.content[{index}]")
    return answer


def _said(role: str, blocks: Sequence[Block], calls: set[str], where: str) -> list[Json]:
    """The messages of a user's (or system) message: one for each tool result, and one for text in a row."""
    said: list[Json] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            said.append({"role": role, "content": "\n".join(texts)})
            texts.clear()

    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock() if role == "user":
                if block.tool_use_id not in calls:
                    raise InvalidRequest(
                        f"{place}.tool_use_id={describe_value(block.tool_use_id)} answers no call: no tool_use with "
                        "this id is before it.",
                        f"{place}.tool_use_id",
                    )
                end_text()
                said.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
            case _:
                raise _misplaced(block.type, role, place)
    end_text()
    return said or [{"role": role, "content": ""}]


def _misplaced(kind: str, role: str, place: str) -> InvalidRequest:
    return InvalidRequest(f"{place} is of type {kind}, which a message of the role {role} cannot have.", place)


def _result(block: ToolResultBlock) -> str:
    text = _joined(block.content or "")
    return f"Error: {text}" if block.is_error else text


def _joined(content: str | Iterable[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _is_continued(message: Json) -> bool:
    """Whether the answer goes on from a last message of the assistant. One that calls tools is over."""
    return message["role"] == "assistant" and not message.get("tool_calls")


def _choice(body: MessagesRequest | CountTokensRequest) -> tuple[ToolChoice, bool]:
    """The choice of tools, and whether one answer may call several."""
    match body.tool_choice:
        case FreeChoice(type=kind, disable_parallel_tool_use=single):
            return _CHOICES[kind], not single
        case NamedChoice(name=name, disable_parallel_tool_use=single):
            return NamedTool(name), not single
        case _:
            return "auto", True


def _variables(body: MessagesRequest | CountTokensRequest) -> Json:
    variables = body.chat_template_kwargs or {}
    return {**dict.fromkeys(SWITCHES, True), **variables} if isinstance(body.thinking, ThinkingOn) else variables


def _grammar(body: MessagesRequest | CountTokensRequest) -> Grammar | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    return Grammar("json_schema", json.dumps(body.output_config.format.json_schema), param="output_config")
