"""Writes messages as each format does, by the format's definition, from which strategies make texts of models.

`WRITERS`: format → a strategy of `Written`. Text and values hold pieces of tags, but no whole tag of the format: that
would be another message.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from messages import Message

from allotrope.text.formats import FORMATS

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Written:
    """A text, and the message that it is. `calls`: (name, id, arguments). `tools`: of the request."""

    text: str
    reasoning: str
    content: str
    calls: tuple[tuple[str, str | None, Arguments], ...]
    tools: tuple[dict[str, Any], ...]

    def is_message(self, message: Message) -> bool:
        calls = tuple((name, call_id, json.loads(arguments)) for name, call_id, arguments in message.calls)
        return (message.reasoning, message.content, calls) == (self.reasoning, self.content, self.calls)


DSML = "｜DSML｜"
TAGS = {
    name: tags.split()
    for name, tags in {
        "hermes": "<think> </think> <tool_call> </tool_call>",
        "qwen3_coder": "<think> </think> <tool_call> </tool_call> <function= </function> <parameter= </parameter>",
        "glm45": "<think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
        "deepseek_v3": "<think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
        "<｜tool▁call▁end｜> <｜tool▁sep｜>",
        "kimi_k2": "<think> </think> <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
        "<|tool_call_end|> <|tool_call_argument_begin|>",
        "harmony": "<|start|> <|channel|> <|message|> <|end|> <|return|> <|call|> <|constrain|>",
        "minimax_m2": "<think> </think> <minimax:tool_call> </minimax:tool_call> <invoke </invoke> <parameter "
        "</parameter>",
        "gemma4": '<|channel> <channel|> <|tool_call> <tool_call|> <|"|>',
        "mistral": "[THINK] [/THINK] [TOOL_CALLS] [ARGS] [CALL_ID]",
        "llama3_json": "<|python_tag|>",
        "pythonic": "<|python_start|> <|python_end|>",
        "think": "<think> </think>",
    }.items()
}
TAGS["dsml"] = [f"<{e}{DSML}{name}" for e in ("", "/") for name in ("function_calls", "tool", "invoke", "parameter")]
TAGS["dsml"] += TAGS["think"]
TAGS["mimo"] = TAGS["qwen3_coder"]
TAGS["deepseek_v31"] = TAGS["deepseek_v3"]
# Characters that begin a call without a tag.
BEGINNINGS = {"llama3_json": "{", "pythonic": "["}
NAMES = st.sampled_from(["f", "get_weather", "search-web", "a1"])
KEYS = st.sampled_from(["s", "city", "n_1", "größe"])


def free_text(name: str) -> st.SearchStrategy[str]:
    """Text with pieces of the format's tags, but none whole, and without the characters that begin calls."""
    tags = TAGS[name]
    pieces = [tag[:cut] for tag in tags for cut in (1, len(tag) // 2, len(tag) - 1)] + [tag[1:] for tag in tags]
    words = ["a", "weather ", "\n", " ", "}", "]", '"', "\\", "'", ",", ":", "é", "😀", "```", "1", "null", "&lt;", "<"]
    texts = st.lists(st.sampled_from([*words, *pieces]) | st.text(max_size=3), max_size=8).map("".join)
    return texts.filter(
        lambda text: not any(tag in text for tag in tags) and not set(text) & set(BEGINNINGS.get(name, ""))
    )


def json_values(name: str) -> st.SearchStrategy[Any]:
    """Values of parameters whose strings have no whole tag."""
    simple = (
        st.none()
        | st.booleans()
        | st.integers(-(10**9), 10**9)
        | st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: round(x, 3))
        | free_text(name)
    )
    return st.recursive(
        simple, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
    )


def type_of(value: Any) -> str:
    for kind, name in ((str, "string"), (bool, "boolean"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


def schema(name: str, arguments: Arguments) -> dict[str, Any]:
    properties = {key: {"type": type_of(value)} for key, value in arguments.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def in_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


Call = tuple[str, Arguments]


def think(reasoning: str | None) -> str:
    return "" if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n"


def hermes(calls: list[Call]) -> str:
    objects = [f'{{"name": {json_text(name)}, "arguments": {json_text(arguments)}}}' for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


def coder(calls: list[Call], newline: str = "\n") -> str:
    texts = []
    for name, arguments in calls:
        values = [f"<parameter={k}>{newline}{in_text(v)}{newline}</parameter>" for k, v in arguments.items()]
        texts.append("\n".join(["<tool_call>", f"<function={name}>", *values, "</function>", "</tool_call>"]))
    return "\n".join(texts)


def glm45(calls: list[Call]) -> str:
    return "".join(
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{in_text(v)}</arg_value>\n" for k, v in arguments.items())
        + "</tool_call>"
        for name, arguments in calls
    )


def deepseek(calls: list[Call], *, block: bool) -> str:
    def body(name: str, arguments: str) -> str:
        return (
            f"function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```" if block else f"{name}<｜tool▁sep｜>{arguments}"
        )

    texts = [f"<｜tool▁call▁begin｜>{body(n, json_text(a))}<｜tool▁call▁end｜>" for n, a in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(texts)}<｜tool▁calls▁end｜>"


def dsml(calls: list[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        is_string = "true" if isinstance(value, str) else "false"
        return f'<{DSML}parameter name="{key}" string="{is_string}">{in_text(value)}</{DSML}parameter>\n'

    texts = [
        f'<{DSML}invoke name="{n}">\n{"".join(parameter(*item) for item in a.items())}</{DSML}invoke>\n'
        for n, a in calls
    ]
    return f"<{DSML}function_calls>\n{''.join(texts)}</{DSML}function_calls>"


def kimi_k2(calls: list[Call]) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json_text(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def minimax_m2(calls: list[Call]) -> str:
    texts = [
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{in_text(v)}</parameter>\n' for k, v in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    ]
    return f"<minimax:tool_call>\n{''.join(texts)}</minimax:tool_call>"


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return json_text(value)


def gemma4(calls: list[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>" for name, arguments in calls)


def mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json_text(arguments)}" for name, arguments in calls)


def llama3_json(calls: list[Call]) -> str:
    texts = [f'{{"name": {json_text(n)}, "parameters": {json_text(a)}}}' for n, a in calls]
    return "<|python_tag|>" + "; ".join(texts)


def pythonic(calls: list[Call]) -> str:
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"


def harmony(reasoning: str | None, content: str, calls: list[Call]) -> str:
    parts = [] if reasoning is None else [f"<|channel|>analysis<|message|>{reasoning}<|end|>"]
    parts += [f"<|channel|>{'commentary' if calls else 'final'}<|message|>{content}<|end|>"] if content else []
    parts += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json_text(arguments)}<|call|>"
        for name, arguments in calls
    ]
    return "<|start|>assistant".join(parts)


# Format → how it writes reasoning, and how calls.
TAGGED: dict[str, tuple[Callable[[str | None], str], Callable[[list[Call]], str]]] = {
    "hermes": (think, hermes),
    "qwen3_coder": (think, coder),
    "mimo": (think, lambda calls: coder(calls, "")),
    "glm45": (think, glm45),
    "deepseek_v3": (think, lambda calls: deepseek(calls, block=True)),
    "deepseek_v31": (think, lambda calls: deepseek(calls, block=False)),
    "dsml": (think, dsml),
    "kimi_k2": (think, kimi_k2),
    "minimax_m2": (think, minimax_m2),
    "gemma4": (lambda text: "" if text is None else f"<|channel>thought\n{text}<channel|>", gemma4),
    "mistral": (lambda text: "" if text is None else f"[THINK]{text}[/THINK]", mistral),
    "llama3_json": (lambda text: "", llama3_json),
    "pythonic": (lambda text: "", pythonic),
    "think": (think, lambda calls: ""),
}


@st.composite
def written(draw: st.DrawFn, name: str) -> Written:
    """A message of the format `name`. White space at the ends of its texts is left to the format's own."""
    form = FORMATS[name]
    has_calls = name != "think"
    texts = free_text(name).map(str.strip)
    has_reasoning = form.reasoning is not None or form.channels is not None
    reasoning = draw(st.none() | texts.filter(bool)) if has_reasoning else None
    # Python's calls come first in a message.
    content = "" if name == "pythonic" else draw(texts)
    arguments = st.dictionaries(KEYS, json_values(name), max_size=3)
    calls = draw(st.lists(st.tuples(NAMES, arguments), max_size=3)) if has_calls else []
    if name in ("pythonic", "llama3_json"):
        names = {"pythonic": "search_web"}
        calls = [(names.get(name, one) if "-" in one else one, values) for one, values in calls]
    # One schema for each name.
    calls = list({one: (one, values) for one, values in calls}.values())
    if name == "pythonic" and not calls:
        content = draw(texts)
    if form.channels is not None:
        text = harmony(reasoning, content, calls)
    else:
        write_reasoning, write_calls = TAGGED[name]
        text = write_reasoning(reasoning) + content
        text += draw(st.sampled_from(["", "\n", "\n\n"])) + write_calls(calls) if calls else ""
    return Written(
        text,
        reasoning or "",
        content,
        tuple(
            (one, f"functions.{one}:{index}" if name == "kimi_k2" else None, values)
            for index, (one, values) in enumerate(calls)
        ),
        tuple(schema(one, values) for one, values in calls),
    )
