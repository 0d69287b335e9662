"""Messages, templates, and what is said when they do not fit."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from allotrope.errors import ConfigError, InvalidRequest
from allotrope.text.chat import normalise_messages, read_chat_template, render_chat, variables_of
from allotrope.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def test_prompt_ids(byte_level: Tokenizer) -> None:
    ids = byte_level.apply_chat_template([{"role": "system", "content": "short"}, *HELLO])
    text = "<|im_start|>system\nshort<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert byte_level.decode(ids, skip_special_tokens=False) == text
    assert ids == byte_level.encode(text, add_special_tokens=False)
    assert ids.count(byte_level.eos_ids[1]) == 2
    assert byte_level.render_chat(HELLO, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


def test_text_parts_and_missing_replies_become_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
    ]
    assert normalise_messages(messages) == [
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]},
    ]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("hello", "at least one message"),
        (["hello"], "messages[0] is a str"),
        ([{"content": "x"}], "messages[0].role is None"),
        ([*HELLO, {"role": "user"}], "messages[1].content is missing"),
        ([{"role": "user", "content": 3}], "messages[0].content is a int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content[0] is of type 'text'"),
        ([{"role": "user", "content": "x", "extra": object()}], "a value of type object"),
    ],
)
def test_other_messages_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        normalise_messages(messages)
    assert words in str(caught.value) and caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "endfor"),
        ("{{ messages[0].content + 3 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_template_failures_are_invalid_requests(template: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render_chat(template, HELLO, {})
    assert words in str(caught.value) and caught.value.param == "messages"


def test_template_sees_what_transformers_shows() -> None:
    template = (
        "{{ bos_token }}{% for m in messages -%}\n    {% if loop.first %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}\n"
        "{% if tools %}{{ tools | tojson }}{% endif %}{{ strftime_now('%Y') }}{{ flag }}{{ nothing }}"
    )
    messages = [*HELLO, {"role": "assistant", "content": "hi"}]
    tools = [{"name": "é<"}]
    text = render_chat(template, messages, {"bos_token": "<s>"}, variables={"tools": tools, "flag": True})
    assert text == f'<s>hi[{{"name": "é<"}}]{datetime.now().year}True'


def test_template_is_rendered_as_by_transformers(byte_level_directory: Path, byte_level: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(byte_level_directory))
    template = (
        "{%- set ns = namespace(n=0) %}\n{{- bos_token }}\n{%- for m in messages %}\n  {% set ns.n = ns.n + 1 %}\n"
        "  {%- generation %}{{ ns.n }}: {{ m['content'] | trim }}{% endgeneration %}\n\n{% endfor %}\n"
        "{%- if add_generation_prompt %}\n  go {{ tools | tojson(indent=1) }}\n{% endif %}"
    )
    messages = [{"role": "user", "content": " a\n"}, {"role": "assistant", "content": "<b>"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for chosen in (template, None):
        expected = theirs.apply_chat_template(
            messages, chat_template=chosen, tools=tools, add_generation_prompt=True, tokenize=False
        )
        assert byte_level.render_chat(messages, template=chosen, tools=tools) == expected


def test_variables_cannot_replace_the_messages(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="cannot be named 'messages'"):
        byte_level.apply_chat_template(HELLO, **{"messages": []})


@pytest.mark.parametrize(("name", "where"), [("tools", "tools"), ("more", "chat_template_kwargs")])
def test_deeply_nested_variables_are_refused(name: str, where: str) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match=f"{where} is nested too deeply") as caught:
        render_chat("", HELLO, {}, variables={name: deep})
    assert caught.value.param == where


def test_a_model_without_template_is_refused_with_a_hint(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.chat_template is None
    with pytest.raises(InvalidRequest, match=r"no chat template.*as template"):
        sentencepiece.apply_chat_template(HELLO)
    ids = sentencepiece.apply_chat_template(HELLO, template="{{ bos_token }}{{ messages[0].content }}")
    assert sentencepiece.decode(ids, skip_special_tokens=False) == "<s> hello"


def test_template_option(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}", encoding="utf-8")
    assert read_chat_template(str(file)) == read_chat_template("{{ messages[0].content }}")
    with pytest.raises(ConfigError, match="neither a file"):
        read_chat_template("missing.jinja")
    with pytest.raises(ConfigError, match="not valid Jinja"):
        read_chat_template("{% for %}")
    # No name of a file is so long.
    long = "{{ messages[0].content }}" * 100
    assert read_chat_template(long) == long
    file.write_bytes(b"{{ '\xff' }}")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_chat_template(str(file))


CALLING = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"text": "é", "n": [1, 2]}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": ""}},
        ],
    },
]


IN_ANY_WAY = {
    "{% for key, value in arguments.items() %}{{ key }}={{ value | tojson }};{% endfor %}": 'text="é";n=[1, 2];||',
    "{% for key, value in arguments | items %}{{ key }}={{ value | tojson }};{% endfor %}": 'text="é";n=[1, 2];||',
    "{{ arguments | tojson }}": '{"text": "é", "n": [1, 2]}|{}|',
    "{{ '<' + arguments + '>' }}": '<{"text": "é", "n": [1, 2]}>|<{}>|',
    "{{ '<' ~ arguments ~ '>' }}": '<{"text": "é", "n": [1, 2]}>|<{}>|',
    "{% if arguments is string %}text{% else %}{{ arguments.text }}{% endif %}": "é||",
}


@pytest.mark.parametrize(("written", "text"), IN_ANY_WAY.items())
def test_templates_read_arguments_in_any_way(written: str, text: str) -> None:
    setting = "{% set arguments = call.function.arguments %}"
    template = "{% for call in messages[1].tool_calls %}" + setting + written + "|{% endfor %}"
    assert render_chat(template, CALLING, {}) == text


def test_arguments_that_are_no_object_stay_text() -> None:
    for text in ("[1]", "{", "7", "[" * 100_000):
        call = {"function": {"name": "f", "arguments": text}}
        messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
        assert render_chat("{{ messages[1].tool_calls[0].function.arguments }}", messages, {}) == text


def test_content_of_messages_that_call_tools() -> None:
    only_then = (
        "{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}call"
    )
    assert render_chat(only_then + "{% endif %}{% endfor %}", CALLING, {}) == "call"
    assert render_chat("{{ messages[1].content + '.' }}", CALLING, {}) == "."


def test_roles_and_reasoning() -> None:
    messages = [
        {"role": "developer", "content": "short"},
        {"role": "assistant", "content": "x", "reasoning": "why"},
        {"role": "user", "content": "y", "thinking": "kept"},
    ]
    shown = "{% for m in messages %}{{ m.role }} {{ m.reasoning_content }} {{ m.thinking }},{% endfor %}"
    assert render_chat(shown, messages, {}) == "system  ,assistant why why,user  kept,"
    assert render_chat("{# developer #}" + shown, messages, {}).startswith("developer ")


def test_variables_of_a_template() -> None:
    template = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}{{ messages }}"
    assert variables_of(template) == {"thinking", "messages"}
    assert variables_of("{% if %}") == frozenset()
