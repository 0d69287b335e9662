"""Translates the body of a chat request to a `Conversation`."""

from __future__ import annotations

from typing import Any

from allotrope.errors import InvalidRequest
from allotrope.server.conversation import Conversation
from allotrope.server.protocol import ChatRequest, ChosenTool, FunctionTool, Message, TokenizeRequest
from allotrope.server.tools import NamedTool, Tool


def chat_conversation(body: ChatRequest | TokenizeRequest) -> Conversation:
    """The conversation of `body`. Raises `InvalidRequest`."""
    chat = body if isinstance(body, ChatRequest) else None
    choice = None if chat is None else chat.tool_choice
    return Conversation(
        messages=[_message(index, message) for index, message in enumerate(body.messages or ())],
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=NamedTool(choice.function.name) if isinstance(choice, ChosenTool) else choice or "auto",
        parallel_tool_calls=chat is None or chat.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning_effort,
        include_reasoning=chat is None or chat.include_reasoning is not False,
        template_variables=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message or False,
    )


def _tool(tool: FunctionTool) -> Tool:
    function = tool.function
    return Tool(function.name, function.description, function.parameters, function.strict or False)


def _message(index: int, message: Message) -> dict[str, Any]:
    """The message in the form that `Conversation` has."""
    if None not in (message.reasoning, message.reasoning_content) and message.reasoning != message.reasoning_content:
        raise InvalidRequest(
            f"messages[{index}] has reasoning and reasoning_content that differ; write one of them.",
            f"messages[{index}].reasoning",
        )
    content = message.content
    plain: dict[str, Any] = {
        "role": message.role,
        "content": content if not isinstance(content, list) else [part.model_dump() for part in content],
        "name": message.name,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": call.function.model_dump()}
            for call in message.tool_calls or ()
        ],
    }
    return {name: value for name, value in plain.items() if name in ("role", "content") or value not in (None, [])}
