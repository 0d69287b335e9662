"""The grammar of an answer: of what the client wants its content to be, its tools, and the reasoning before both."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from allotrope.errors import InvalidRequest
from allotrope.grammars.limits import check_limits
from allotrope.grammars.structural_tag import nested_tag
from allotrope.request import Grammar
from allotrope.server.tools import NamedTool, Tool
from allotrope.text import call_grammar, call_parts, formats
from allotrope.text.call_parts import CalledTool, NotWritable
from allotrope.text.formats import MessageFormat

if TYPE_CHECKING:
    from allotrope.server.conversation import Conversation

Json = dict[str, Any]

# A format that can write every call, for models that are forced to call tools and whose own format cannot.
_FORCED = "hermes"


def is_forced(conversation: Conversation) -> bool:
    """Whether the answer must call a tool."""
    return conversation.tool_choice == "required" or isinstance(conversation.tool_choice, NamedTool)


def called_format(conversation: Conversation, own: MessageFormat | None) -> MessageFormat | None:
    """The format of the calls of an answer. `own`: the model's; another one stands in where a call is forced in it."""
    if own is None or not is_forced(conversation):
        return own
    try:
        call_grammar.forced_calls(own, [CalledTool("f", None)], many=False)
    except NotWritable:
        return formats.by_name(_FORCED)
    return own


def answer_grammar(
    conversation: Conversation,
    content: Grammar | None,
    *,
    tools: MessageFormat | None,
    reasoning: MessageFormat | None,
    prompt_text: str,
) -> Grammar | None:
    """The grammar of the whole answer, or None if it may be anything.

    `content`: of the answer's content. `tools`, `reasoning`: the formats of its calls and of its reasoning. Raises
    `InvalidRequest`.
    """
    is_open = reasoning is not None and reasoning.reasoning_is_open(prompt_text, conversation.continued_text)
    # A channel's reasoning is told apart in any case, so its end cannot be in the prompt.
    if reasoning is not None and not is_open and _is_over(conversation, reasoning, prompt_text):
        reasoning = None
    part = _calls(conversation, content, tools)
    if part is None and content is None:
        return None
    param = "tools" if content is None or part is not None else content.param
    end = None if reasoning is None else reasoning.reasoning_end
    if content is not None and part is None:
        if reasoning is None or is_open:
            return replace(content, after=end)
        if not _may_be_part(content, reasoning):
            tags = reasoning.reasoning
            return replace(content, after=end, before=None if tags is None else tags.start)
        # Models vary the header of an answer on a channel, so that the grammar writes it, too.
        part = call_grammar.answer(reasoning, _part_of(content))
    assert part is not None
    if reasoning is None or (reasoning.channels is None and is_open):
        return _tag(part, param, end)
    # The model decides whether it reasons.
    return _tag(call_grammar.after_reasoning(reasoning, part), param, None)


def _may_be_part(content: Grammar, reasoning: MessageFormat) -> bool:
    """Whether the grammar of the content can stand in one with the reasoning before it."""
    return content.kind != "lark" and (reasoning.channels is None or content.kind != "structural_tag")


def _is_over(conversation: Conversation, reasoning: MessageFormat, prompt_text: str) -> bool:
    """Whether the prompt ends behind reasoning, so that the answer has none."""
    if conversation.continue_final_message:
        return True
    return reasoning.reasoning is not None and prompt_text.rstrip().endswith(reasoning.reasoning.end)


def _calls(conversation: Conversation, content: Grammar | None, format: MessageFormat | None) -> Json | None:
    """What holds the calls of an answer, with what else it may be. None: nothing needs to."""
    tools, choice, many = conversation.rendered_tools, conversation.tool_choice, conversation.parallel_tool_calls
    if not tools or format is None:
        return None
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.name]
    forced = is_forced(conversation)
    if not forced and content is None and not any(tool.strict for tool in tools):
        return None
    try:
        called = [_called(tool, format, forced) for tool in tools]
        if forced:
            return call_grammar.forced_calls(format, called, many=many)
        if content is None:
            return call_grammar.calls_in_text(format, called, many=many)
        calls = call_grammar.forced_calls(format, called, many=many)
        return call_parts.either(calls, call_grammar.answer(format, _part_of(content)))
    except NotWritable as error:
        what = "strict tools are" if content is None else f"tools with {content.param} are"
        raise InvalidRequest(
            f"{what} not supported here: the calls of the format {format.name} cannot be held to a schema, because "
            f"{error}. Leave one out, or set tool_choice to 'required'.",
            "tools",
        ) from None


def _called(tool: Tool, format: MessageFormat, forced: bool) -> CalledTool:
    """The tool, with the schema that its arguments must fit: if it is strict, or if the call is forced and can be."""
    called = CalledTool(tool.name, tool.parameters or {"properties": {}, "additionalProperties": False})
    if tool.strict:
        return called
    if not forced:
        return CalledTool(tool.name, None)
    try:
        call_grammar.forced_calls(format, [called], many=False)
    except NotWritable:
        return CalledTool(tool.name, None)
    return called


def _part_of(content: Grammar) -> Json:
    """A grammar as a part of a structural tag. Raises `InvalidRequest` for one that cannot be one."""
    match content.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            check_limits(content)
            return {"type": "regex", "pattern": content.source}
        case "lark":
            raise InvalidRequest("a grammar and tools cannot be used together; leave one out.", content.param)
    source = _read(content)
    if content.kind == "json_schema":
        return {"type": "json_schema", "json_schema": source}
    if content.kind == "choice" and isinstance(source, list):
        check_limits(content)
        return call_parts.either(*(call_parts.text(str(one)) for one in source))
    if content.kind == "structural_tag" and isinstance(tag := nested_tag(content)["format"], dict):
        return dict(tag)
    raise InvalidRequest(f"the {content.kind} cannot be used with tools or reasoning.", content.param)


def _read(grammar: Grammar) -> Any:
    try:
        return json.loads(grammar.source)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"the grammar ({grammar.kind}) is no JSON, or nested too deeply.", grammar.param) from None


def _tag(part: Json, param: str, after: str | None) -> Grammar:
    try:
        source = json.dumps({"type": "structural_tag", "format": part})
    except RecursionError:
        raise InvalidRequest(f"{param} has schemas that are nested too deeply.", param) from None
    return Grammar("structural_tag", source, after=after, param=param)
