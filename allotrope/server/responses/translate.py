"""From a body of the Responses API to a conversation. Must not know HTTP or answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from allotrope.errors import InvalidRequest
from allotrope.request import Grammar
from allotrope.server.blocks import tool_call
from allotrope.server.conversation import Conversation
from allotrope.server.responses.protocol import (
    AllowedTools,
    FunctionTool,
    InputFunctionCall,
    InputFunctionOutput,
    InputMessage,
    InputReasoning,
    InputText,
    Item,
    NamedChoice,
    ObjectFormat,
    Part,
    ResponsesRequest,
    SchemaFormat,
)
from allotrope.server.tools import NamedTool, Tool, ToolChoice
from allotrope.server.values import describe_value

Json = dict[str, Any]


def read_input(body: ResponsesRequest, earlier: Sequence[Json]) -> list[Json]:
    """The messages of `body`, without its instructions, after the `earlier` ones of the answer that it goes on from.

    Raises `InvalidRequest` for an output that answers no call, and for a body that says nothing.
    """
    items = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if not items and not (earlier or body.instructions):
        raise InvalidRequest("input is missing.", "input")
    messages = [*earlier]
    turn = _Turn(messages)
    for index, item in enumerate(items or ()):
        turn.take(item, f"input[{index}]")
    return messages


def as_conversation(body: ResponsesRequest, messages: Sequence[Json]) -> Conversation:
    """`messages` after the instructions of `body`, with its tools and the form of its answer."""
    opening = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    tools, choice = _tools(body)
    reasoning = body.reasoning
    return Conversation(
        messages=[*opening, *messages],
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=None if reasoning is None else reasoning.effort,
        template_variables=body.chat_template_kwargs or {},
        grammar=_grammar(body),
    )


class _Turn:
    """Appends items to `messages`. The items of one answer become one message of the assistant."""

    def __init__(self, messages: list[Json]) -> None:
        self._messages = messages
        self._answer: Json | None = None
        self._calls = {call["id"] for message in messages for call in message.get("tool_calls", ())}

    def take(self, item: Item, where: str) -> None:
        match item:
            case InputMessage(role="assistant"):
                answer = self._open(new="tool_calls")
                answer["content"] += _text(item.content, "")
            case InputMessage():
                self._append({"role": item.role, "content": _text(item.content, "\n")})
            case InputReasoning():
                # Reasoning begins an answer.
                answer = self._open(new="content")
                answer["reasoning_content"] = answer.get("reasoning_content", "") + _reasoning(item)
            case InputFunctionCall():
                self._calls.add(item.call_id)
                calls = self._open().setdefault("tool_calls", [])
                calls.append(tool_call(item.call_id, item.name, item.arguments))
            case InputFunctionOutput():
                if item.call_id not in self._calls:
                    raise InvalidRequest(
                        f"{where}.call_id={describe_value(item.call_id)} answers no call: no function_call with this "
                        "id is before it.",
                        f"{where}.call_id",
                    )
                self._append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, "\n")})

    def _append(self, message: Json) -> None:
        self._answer = None
        self._messages.append(message)

    def _open(self, new: str = "") -> Json:
        """The message of the answer that items belong to. `new`: a key with which it is over, and another begins."""
        if self._answer is None or self._answer.get(new) or (new == "content" and "tool_calls" in self._answer):
            answer: Json = {"role": "assistant", "content": ""}
            self._append(answer)
            self._answer = answer
        return self._answer


def _text(content: str | Sequence[Part], separator: str) -> str:
    if isinstance(content, str):
        return content
    return separator.join(part.text if isinstance(part, InputText) else part.refusal for part in content)


def _reasoning(item: InputReasoning) -> str:
    return "".join(_texts(item.content or ())) or "\n".join(_texts(item.summary or ()))


def _texts(parts: Iterable[Json]) -> list[str]:
    return [text for part in parts if isinstance(text := part.get("text"), str)]


def _tools(body: ResponsesRequest) -> tuple[list[Tool], ToolChoice]:
    tools = [_tool(tool) for tool in body.tools or ()]
    match body.tool_choice:
        case None:
            return tools, "auto"
        case NamedChoice(name=name):
            return tools, NamedTool(name)
        case AllowedTools(mode=mode, tools=allowed):
            names = {choice.name for choice in allowed}
            if missing := names - {tool.name for tool in tools}:
                raise InvalidRequest(
                    f"tool_choice allows {describe_value(min(missing))}, which is not in tools.", "tool_choice"
                )
            return [tool for tool in tools if tool.name in names], mode
        case str() as mode:
            return tools, mode


def _tool(tool: FunctionTool) -> Tool:
    return Tool(tool.name, tool.description, tool.parameters, tool.strict or False)


def _grammar(body: ResponsesRequest) -> Grammar | None:
    match None if body.text is None else body.text.format:
        case ObjectFormat():
            return Grammar("json_object", param="text")
        case SchemaFormat(json_schema=schema):
            return Grammar("json_schema", json.dumps(schema), param="text")
        case _:
            return None
