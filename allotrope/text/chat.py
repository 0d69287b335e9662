"""Renders chat messages as prompt text by the checkpoint's Jinja template. Owns the form of messages and templates.

A template has the variables and functions that Transformers gives it (`messages`, `tools`, `documents`,
`add_generation_prompt`, the special tokens, `raise_exception`, `strftime_now`, `tojson`), and runs in the same sandbox
with the same whitespace rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from allotrope.errors import ConfigError, InvalidRequest

_RESERVED_VARIABLES = ("messages", "add_generation_prompt")
# A template with this condition writes tool calls only where it holds.
_CALLS_WITHOUT_CONTENT = re.compile(r"""assistant['"] and message(\.|\[['"])content(['"]\])? is none""")
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


class ToolArguments(dict[str, Any]):
    """The arguments of a tool call, for any template: a mapping that is, as a string, its JSON text.

    Some templates iterate the arguments or write them by `tojson`, others add them to a string.
    """

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        # A template reads an attribute before a key, and no argument's name may be hidden by one.
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: Any) -> str:
        return self._text + other

    def __radd__(self, other: Any) -> str:
        return other + self._text


def normalise_messages(messages: Any) -> list[dict[str, Any]]:
    """`messages` in the form that templates read: each one a dict with a `role` and a string as `content`.

    Text parts are joined by newlines. An assistant's missing content becomes "". Keys that are null are left out.
    Arguments of tool calls become `ToolArguments`, if they are a JSON object. An assistant's reasoning gets each of the
    names by which templates read it.
    Raises `InvalidRequest` with param `messages` for other input, such as image parts.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest("messages must be a list with at least one message.", "messages")
    try:
        return [_normalise_message(index, message) for index, message in enumerate(messages)]
    except RecursionError:
        raise InvalidRequest("messages are nested too deeply.", "messages") from None


def _normalise_message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} is a {type(message).__name__}; an object is needed.", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role is {role!r}; a string such as 'user' is needed.", "messages")
    plain = {str(key): _plain(value, where) for key, value in message.items() if value is not None}
    plain |= {"role": role, "content": _content(message.get("content"), role, where)}
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_normalise_call(call) for call in calls]
    if role == "assistant":
        plain |= _reasoning(plain)
    return plain


def _normalise_call(call: Any) -> Any:
    """A tool call whose arguments are `ToolArguments`. What is no JSON object stays as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    read, text = function.get("arguments"), ""
    if isinstance(read, str):
        text = read.strip() or "{}"
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            return call
    if not isinstance(read, dict):
        return call
    arguments = ToolArguments(read, text or json.dumps(read, ensure_ascii=False))
    return {**call, "function": {**function, "arguments": arguments}}


def _reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The reasoning of a message by each name that templates read."""
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name)), None)
    if reasoning is None:
        return {}
    # There is a template that takes `thinking` with tool calls only if there is no content.
    names = _REASONING_NAMES[:-1] if message["content"] and message.get("tool_calls") else _REASONING_NAMES
    return dict.fromkeys(names, reasoning)


def _content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        actual = "missing" if content is None else f"a {type(content).__name__}"
        raise InvalidRequest(f"{where}.content is {actual}; a string or a list of text parts is needed.", "messages")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f"{where}.content[{index}] is of type {kind!r}; only text parts "
                '({"type": "text", "text": "..."}) are supported.',
                "messages",
            )
        texts.append(text)
    return "\n".join(texts)


def render_chat(
    template: str,
    messages: Any,
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt that `template` renders from `messages` (in any form that `normalise_messages` accepts).

    The role `developer` becomes `system` for a template that does not mention it. The empty content of a message with
    tool calls becomes null for a template that writes them only then.
    `special_tokens`: name of the variable, such as `bos_token` → token. `variables`: further variables of the template,
    such as `tools`. Raises `InvalidRequest` if the template is invalid, refuses the messages, or fails on them.
    """
    extra = {key: _variable(value, key) for key, value in (variables or {}).items()}
    reserved = [key for key in _RESERVED_VARIABLES if key in extra]
    if reserved:
        raise InvalidRequest(f"a chat template variable cannot be named {reserved[0]!r}.", "messages")
    context = {"tools": None, "documents": None, **special_tokens, **extra}
    chat = normalise_messages(messages)
    _fit(chat, template)
    try:
        return _compiled(template).render(messages=chat, add_generation_prompt=add_generation_prompt, **context)
    except TemplateError as error:
        raise InvalidRequest(f"the chat template cannot take these messages: {error}", "messages") from error
    except Exception as error:
        # A template is a program from the checkpoint. On unexpected messages it can raise any error, which then
        # concerns this request only.
        raise InvalidRequest(
            f"the chat template failed over these messages: {type(error).__name__}: {error}", "messages"
        ) from error


def _fit(chat: list[dict[str, Any]], template: str) -> None:
    """Adapt messages, in place, to what `template` can read."""
    knows_developer = "developer" in template
    calls_without_content = _CALLS_WITHOUT_CONTENT.search(template) is not None
    for message in chat:
        if message["role"] == "developer" and not knows_developer:
            message["role"] = "system"
        if calls_without_content and message.get("tool_calls") and message["content"] == "":
            message["content"] = None


def read_chat_template(value: str) -> str:
    """The template of an option's value: the path of a file, or Jinja text. Raises `ConfigError` if it is neither."""
    if _is_file(value):
        template = _read_file(value)
    elif "{" in value:
        template = value
    else:
        raise ConfigError(f"bad options: chat_template={value!r} is neither a file nor a Jinja template.")
    try:
        _compiled(template)
    except TemplateError as error:
        raise ConfigError(f"bad options: chat_template={value[:80]!r} is not valid Jinja: {error}.") from error
    return template


def _is_file(value: str) -> bool:
    try:
        return Path(value).expanduser().is_file()
    except OSError:
        # The text of a template can be longer than any name of a file.
        return False


def _read_file(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"bad options: chat_template={path!r} cannot be read: {error}.") from error


@lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """Names of the variables that `template` reads. There are none if it is not valid Jinja."""
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(template)))
    except TemplateError:
        return frozenset()


def _variable(value: Any, name: str) -> Any:
    try:
        return _plain(value, name)
    except RecursionError:
        where = name if name == "tools" else "chat_template_kwargs"
        raise InvalidRequest(f"{where} is nested too deeply.", where) from None


def _plain(value: Any, where: str) -> Any:
    """A copy of `value` in JSON's types, so that a template cannot call methods of other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    raise InvalidRequest(f"{where} has a value of type {type(value).__name__}; only JSON is supported.", "messages")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks replies for training. It renders its contents."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own `tojson` escapes HTML, and prompts are not HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
