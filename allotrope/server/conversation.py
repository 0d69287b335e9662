"""A conversation as every API with messages means it, and its way into the engine.

The routes translate their bodies to a `Conversation`; `read_conversation` makes the engine's request and the parser of
the answer of it. This module must not know HTTP or any JSON form of a body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from allotrope.errors import InvalidRequest
from allotrope.request import Grammar, SamplingParams
from allotrope.server.answer_grammar import answer_grammar, called_format
from allotrope.server.engine_request import check_count, limit_length, log_prompt, make_request
from allotrope.server.generation import Generation
from allotrope.server.message_stream import MessageStream
from allotrope.server.tools import Tool, ToolChoice, check_tools
from allotrope.server.values import describe_value
from allotrope.text.chat import normalise_messages, variables_of

if TYPE_CHECKING:
    from allotrope.server.prompts import RenderedPrompt
    from allotrope.server.state import ServerState, Serving

# Variables by which templates turn reasoning on and off.
SWITCHES = ("enable_thinking", "thinking")
_RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "template")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, and how they are to be answered.

    `messages`: in the form that `allotrope.text.chat.normalise_messages` accepts: `role`, `content`, `name`,
    `reasoning_content`, an assistant's `tool_calls` in OpenAI's form, a tool's `tool_call_id`.
    `parallel_tool_calls`: False ends the answer with its first call. `reasoning_effort`: "none" turns reasoning off;
    None leaves it to the template. `include_reasoning`: False leaves the reasoning out of the answer.
    `template_variables`: more variables of the chat template. `add_generation_prompt`: None means True, unless the
    last message is continued. `grammar`: what the content must be, where the sampling parameters do not say it.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    grammar: Grammar | None = None

    @property
    def rendered_tools(self) -> Sequence[Tool]:
        """The tools that the prompt shows: none if the answer may call none."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def continued_text(self) -> str | None:
        """The text that the answer goes on with; None: it begins a message."""
        if not self.continue_final_message:
            return None
        (last,) = normalise_messages(self.messages[-1:])
        return str(last["content"])

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends with the tokens that begin the answer."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


def check_conversation(conversation: Conversation) -> None:
    """Raise `InvalidRequest` for options that conflict, and for tools and messages that no template could read."""
    for name in _RESERVED_VARIABLES:
        if name in conversation.template_variables:
            raise InvalidRequest(f"chat_template_kwargs must not set {name}.", "chat_template_kwargs")
    if conversation.continue_final_message and conversation.opens_answer:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true.", "continue_final_message"
        )
    check_tools(conversation.tools, conversation.tool_choice)
    _check_messages(conversation.messages)


def named_answers(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages; those that answer a tool call have the tool's name, which some templates write."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and message.get("name") is None and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Every message has content or calls tools, and every tool message answers a call before it."""
    calls: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        made = message.get("tool_calls") or ()
        if message.get("content") is None and not made and not message.get("reasoning_content"):
            raise InvalidRequest(f"{where}.content is missing.", f"{where}.content")
        if made and message["role"] != "assistant":
            raise InvalidRequest(
                f"{where} has tool_calls and the role {message['role']}; only the assistant calls tools.",
                f"{where}.tool_calls",
            )
        calls.update(call["id"] for call in made)
        answered = message.get("tool_call_id")
        if message["role"] != "tool":
            if answered is not None:
                raise InvalidRequest(
                    f"{where} has a tool_call_id and the role {message['role']}; only tool messages answer calls.",
                    f"{where}.tool_call_id",
                )
        elif answered is None:
            raise InvalidRequest(f"{where}.tool_call_id is missing.", f"{where}.tool_call_id")
        elif answered not in calls:
            raise InvalidRequest(
                f"{where}.tool_call_id={describe_value(answered)} answers no call: no assistant message before it has "
                "tool_calls with this id.",
                f"{where}.tool_call_id",
            )


async def render_conversation(serving: Serving, conversation: Conversation) -> RenderedPrompt:
    """The prompt of a conversation. Raises `InvalidRequest`."""
    check_conversation(conversation)
    tools = conversation.rendered_tools
    template = serving.prompts.template_for(tools=bool(tools)) or ""
    if tools and serving.formats.tools is None:
        raise InvalidRequest(
            "tools are not supported: the format of this model's tool calls is unknown. The operator names it with "
            "--tool-call-parser.",
            "tools",
        )
    if tools and template and "tools" not in variables_of(template):
        raise InvalidRequest("tools are not supported: this model's chat template does not read them.", "tools")
    variables = _template_variables(conversation, template, serving.formats.reasoning is not None)
    if tools:
        variables["tools"] = [tool.as_template_reads() for tool in tools]
    return await serving.prompts.read_conversation(conversation, variables)


def _template_variables(conversation: Conversation, template: str, reasoning_is_known: bool) -> dict[str, Any]:
    """The variables of `template` for this conversation, without its tools.

    `reasoning_effort` sets those variables that turn reasoning on or off and that the client did not set itself. Raises
    `InvalidRequest` if the template reads none of them.
    """
    given, effort = dict(conversation.template_variables), conversation.reasoning_effort
    if effort is None:
        return given
    read = variables_of(template)
    switches: dict[str, Any] = {name: effort != "none" for name in SWITCHES if name in read}
    if "reasoning_effort" in read and not (switches and effort == "none"):
        switches["reasoning_effort"] = effort
    if not switches and (effort != "none" or reasoning_is_known):
        raise InvalidRequest(
            f"reasoning_effort={effort} is not supported: this model's chat template reads none of the variables "
            f"reasoning_effort, {', '.join(SWITCHES)}.",
            "reasoning_effort",
        )
    return switches | given


async def read_conversation(
    state: ServerState,
    conversation: Conversation,
    params: SamplingParams,
    *,
    max_tokens: int | None,
    truncate: int | None = None,
    length_field: str = "max_tokens",
) -> MessageStream:
    """The engine's request for the answer to a conversation, and the parser of the answer.

    `params`: sampling parameters, whose `grammar` is set here. `max_tokens`: the client's own limit, if it set one.
    `truncate`: number of the prompt's last tokens to keep. `length_field`: the API's name of `max_tokens`. Raises
    `InvalidRequest`.
    """
    serving = state.ready()
    formats, tools = serving.formats, conversation.rendered_tools
    check_count(serving, params.n, f"n={params.n} asks for {params.n} sequences", "n")
    prompt = await render_conversation(serving, conversation)
    ids = serving.prompts.truncate(prompt.ids, truncate, max_tokens or 1)
    if max_tokens is None:
        params = limit_length(state, params, len(ids))
    is_open = formats.reasoning_is_open(prompt.text, conversation.continued_text)
    structured = tools or formats.reasoning is not None
    called = called_format(conversation, formats.tools) if tools else None
    grammar = answer_grammar(
        conversation,
        conversation.grammar or params.grammar,
        tools=called,
        reasoning=formats.reasoning,
        prompt_text=prompt.text,
    )
    params = dataclasses.replace(params, grammar=grammar)
    keeps_special_tokens = not params.skip_special_tokens
    new_parser = formats.parsers(
        called,
        [tool.as_template_reads() for tool in tools],
        reasoning_is_open=is_open,
        calls_are_held=grammar is not None,
        keeps_special_tokens=keeps_special_tokens,
    )
    if structured:
        # The parser reads tags that are special tokens.
        params = dataclasses.replace(params, skip_special_tokens=False)
    try:
        request = make_request(serving, ids, params)
    except InvalidRequest as error:
        raise _in_terms_of_messages(error, length_field) from None
    log_prompt(state, ids)
    generation = Generation(
        request,
        serving.tokenizer,
        continues_text=conversation.continue_final_message,
        keeps_end_token=bool(structured),
        textless=formats.textless_ids(keeps_special_tokens=keeps_special_tokens) if structured else frozenset(),
        may_end=not conversation.parallel_tool_calls,
    )
    return MessageStream(
        generation,
        new_parser,
        opens_in_reasoning=is_open,
        include_reasoning=conversation.include_reasoning,
        single_call=not conversation.parallel_tool_calls,
    )


def _in_terms_of_messages(error: InvalidRequest, length_field: str) -> InvalidRequest:
    """`error` with the names of fields that the client used."""
    if error.param == "prompt":
        return InvalidRequest(f"messages: {error}", "messages")
    if error.param == "max_tokens":
        return InvalidRequest(str(error).replace("max_tokens", length_field), length_field)
    return error
