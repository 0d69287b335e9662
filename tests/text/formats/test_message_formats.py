"""What each format's text is as a message, whole and character by character."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from messages import Message, parse

from allotrope.errors import ConfigError
from allotrope.text.formats import (
    ContentDelta,
    ToolArgumentsDelta,
    ToolCallBegin,
    by_name,
    by_reasoning_parser,
    by_tool_parser,
    for_checkpoint,
)
from allotrope.text.formats.bodies import NamedParameters
from allotrope.text.formats.parameter_types import ToolSchemas
from allotrope.text.formats.reader import Reader

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "$defs": {"count": {"type": "integer"}},
                "properties": {
                    "n": {"$ref": "#/$defs/count"},
                    "o": {"type": "object"},
                    "b": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    "s": {"type": "string"},
                },
            },
        },
    }
]
DSML = "｜DSML｜"
CASES = {
    "hermes": (
        '<think>\nhm\n</think>\n\nHi \n<tool_call>\n{"name": "f", "arguments": {"s": "</tool_call>"}}\n</tool_call>\n'
        '<tool_call>{"arguments":{}, "name":"g"}</tool_call>',
        Message("hm", "Hi", (("f", None, '{"s": "</tool_call>"}'), ("g", None, "{}"))),
    ),
    "qwen3_coder": (
        "<think>hm</think>ok\n<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n"
        '<parameter=s>\nli"ne\n2\n\n</parameter>\n</function>\n</tool_call>',
        Message("hm", "ok", (("f", None, '{"n": 3, "s": "li\\"ne\\n2\\n"}'),)),
    ),
    "glm45": (
        "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key><arg_value>True</arg_value>"
        "<arg_key>s</arg_key><arg_value> 1</arg_value>\n</tool_call><tool_call>g</tool_call>",
        Message("", "", (("f", None, '{"n": 3, "b": true, "s": " 1"}'), ("g", None, "{}"))),
    ),
    "deepseek_v3": (
        "hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"n": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Message("", "hi", (("f", None, '{"n": 1}'), ("g", None, "{}"))),
    ),
    "deepseek_v31": (
        'hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        Message("", "hi", (("f", None, '{"n": 1}'),)),
    ),
    "dsml": (
        f'hi\n\n<{DSML}function_calls>\n<{DSML}invoke name="g">\n<{DSML}parameter name="x" string="true">1'
        f'</{DSML}parameter>\n<{DSML}parameter name="y" string="false">[1]</{DSML}parameter>\n</{DSML}invoke>\n'
        f"</{DSML}function_calls>",
        Message("", "hi", (("g", None, '{"x": "1", "y": [1]}'),)),
    ),
    "kimi_k2": (
        "hi<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0 <|tool_call_argument_begin|>"
        '{"n":1}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        Message("", "hi", (("f", "functions.f:0", '{"n":1}'), ("g", "functions.g:1", "{}"))),
    ),
    "harmony": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n":1}<|call|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>",
        Message("hm", "Wait.", (("f", None, '{"n":1}'), ("g", None, "{}"))),
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="n">3</parameter>\n<parameter name="s">a\n</parameter>'
        "\n</invoke>\n<invoke name=g>\n</invoke>\n</minimax:tool_call>",
        Message("", "", (("f", None, '{"n": 3, "s": "a\\n"}'), ("g", None, "{}"))),
    ),
    "gemma4": (
        '<|channel>thought\nhm<channel|>Hi<|tool_call>call:f{s:<|"|>x{"<|"|>,n:15,t:true,o:{k:[1,<|"|>b<|"|>],z:{}}}'
        "<tool_call|>",
        Message("hm", "Hi", (("f", None, '{"s": "x{\\"", "n": 15, "t": true, "o": {"k": [1, "b"], "z": {}}}'),)),
    ),
    "mistral": (
        '[THINK]hm[/THINK]ok[TOOL_CALLS]f[ARGS]{"n":1}[TOOL_CALLS]g{"b":2}[TOOL_CALLS]h[CALL_ID]abc[ARGS]{}',
        Message("hm", "ok", (("f", None, '{"n":1}'), ("g", None, '{"b":2}'), ("h", "abc", "{}"))),
    ),
    "mistral (list)": (
        '[TOOL_CALLS] [{"name":"f","arguments":{"n":1}}, {"name":"g","arguments":"{\\"a\\": 2}", "id": "x"}]',
        Message("", "", (("f", None, '{"n":1}'), ("g", None, '{"a": 2}'))),
    ),
    "llama3_json": (
        'so {"name": "x"} <|python_tag|>{"name":"f","parameters":{"n":1}}; {"name":"g","parameters":{}}',
        Message("", 'so {"name": "x"}', (("f", None, '{"n":1}'), ("g", None, "{}"))),
    ),
    "pythonic": (
        "[f(s=\"x\\n'\", n=[1,{'k':None}, -2.5], b=True), g()]",
        Message("", "", (("f", None, '{"s": "x\\n\'", "n": [1, {"k": null}, -2.5], "b": true}'), ("g", None, "{}"))),
    ),
    "mimo": (
        "<tool_call><function=f><parameter=s>\na\n</parameter></function></tool_call>",
        Message("", "", (("f", None, '{"s": "\\na\\n"}'),)),
    ),
}


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("case", CASES)
def test_message_of_a_text(case: str, size: int) -> None:
    text, message = CASES[case]
    parser = by_name(case.split()[0]).parser(tools=TOOLS, reasoning=True)
    assert parse(parser, [text[at : at + size] for at in range(0, len(text), size)]) == message


def test_arguments_come_as_they_are_written() -> None:
    """A string parameter is not held until its end, nor is a JSON object."""
    parser = by_name("qwen3_coder").parser(tools=TOOLS, reasoning=False)
    assert parser.push("<tool_call><function=f><parameter=s>ab") == [
        ToolCallBegin(0, "f"),
        ToolArgumentsDelta(0, '{"s": "ab'),
    ]
    assert parser.push("c") == [ToolArgumentsDelta(0, "c")]
    parser = by_name("hermes").parser(tools=True, reasoning=False)
    events = parser.push('Hi <tool_call>{"name": "f", "arguments": {"a": ')
    assert events == [ContentDelta("Hi"), ToolCallBegin(0, "f"), ToolArgumentsDelta(0, '{"a": ')]
    assert parser.push("1") == [ToolArgumentsDelta(0, "1")]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a <tool_call> b", "a <tool_call> b"),
        ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>'),
        ('<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg'),
        ("<tool_", "<tool_"),
        ("<tool_call>\n\ttext </tool_call> more ", "<tool_call>\n\ttext </tool_call> more "),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}', '<tool_call>{"name": "\\ud800", "arguments": {}}'),
    ],
)
def test_what_is_no_call_is_text(text: str, content: str) -> None:
    for size in (1, 1000):
        parser = by_name("hermes").parser(tools=True, reasoning=True)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert parse(parser, pieces) == Message("", content)


def test_a_failed_call_does_not_hide_the_next() -> None:
    text = '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = by_name("hermes").parser(tools=True, reasoning=True)
    assert parse(parser, text) == Message("", "<tool_call>", (("f", None, "{}"),))


def test_broken_arguments_stay_in_their_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": <b>}}</tool_call>after'
    parser = by_name("hermes").parser(tools=True, reasoning=True)
    assert parse(parser, text) == Message("", "after", (("f", None, '{"a": <b>}}'),))


def test_a_call_that_begins_ends_another() -> None:
    text = "So <tool_call><function=a>\nor <tool_call>:\n<tool_call>\n<function=b>\n</function>\n</tool_call>"
    parser = by_name("qwen3_coder").parser(tools=True, reasoning=True)
    assert parse(parser, text) == Message("", "So\nor <tool_call>:", (("a", None, "{}"), ("b", None, "{}")))
    parser = by_name("mistral").parser(tools=True, reasoning=True, special_tokens=["[TOOL_CALLS]"])
    text = '[TOOL_CALLS] [TOOL_CALLS] [{"name": "f", "arguments": {}}]'
    assert parse(parser, text) == Message("", "", (("f", None, "{}"),))


def test_the_end_of_a_section_that_has_no_beginning() -> None:
    text = f'<{DSML}invoke name="f">\n</{DSML}invoke>\n</{DSML}tool_calls>Done.'
    parser = by_name("dsml").parser(tools=True, reasoning=True)
    assert parse(parser, text) == Message("", "Done.", (("f", None, "{}"),))
    # In reasoning, it is a thought.
    parser = by_name("dsml").parser(tools=True, reasoning=True, prompt_opens_reasoning=True)
    assert parse(parser, f"{text}</think>") == Message(text, "", ())


@pytest.mark.parametrize(
    ("text", "content"),
    [("a</tool_call>b", "a</tool_call>b"), ("{call}b", "b"), ("a{call}b", "ab"), ("a {call}b", "a\nb")],
)
def test_content_around_calls(text: str, content: str) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = by_name("hermes").parser(tools=True, reasoning=True)
    assert parse(parser, text.replace("{call}", call)).content == content


def test_headers_that_never_end() -> None:
    parser = by_name("harmony").parser(tools=True, reasoning=True)
    assert parse(parser, "<|channel|>" * 2000 + "final<|message|>hi") == Message("", "hi")


def test_a_cut_value_is_not_closed() -> None:
    parser = by_name("qwen3_coder").parser(tools=TOOLS, reasoning=True)
    text = "<tool_call><function=f><parameter=s>ab</param"
    assert parse(parser, text) == Message("", "", (("f", None, '{"s": "ab</param'),))


def test_tools_and_reasoning_off() -> None:
    text = '<think>a</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call> '
    assert parse(by_name("hermes").parser(tools=False, reasoning=False), text) == Message("", text)
    only_calls = parse(by_name("hermes").parser(tools=True, reasoning=False), text)
    assert only_calls == Message("", "<think>a</think>", (("f", None, "{}"),))
    only_reasoning = parse(by_name("hermes").parser(tools=False, reasoning=True), text)
    assert only_reasoning == Message("a", '<tool_call>{"name": "f", "arguments": {}}</tool_call> ')


def test_special_tokens_are_no_text() -> None:
    special = ["<|im_end|>", "<|im_start|>", "<tool_call>"]
    parser = by_name("hermes").parser(tools=True, reasoning=True, special_tokens=special)
    assert parse(parser, "a<|im_end|>b<|im <tool_call>c<|im_end|>") == Message("", "ab<|im c")


def test_reasoning_that_the_prompt_begins() -> None:
    think = by_name("think")
    assert think.reasoning_is_open("<|im_start|>assistant\n<think>\n")
    assert not think.reasoning_is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not think.reasoning_is_open("what is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert by_name("gemma4").reasoning_is_open("<|turn>model\n<|channel>thought\n")
    assert by_name("harmony").reasoning_is_open("<|start|>assistant<|channel|>analysis<|message|>")
    for text in ("hm\n</think>\n\nHi", "<think>\nhm</think>Hi", "hm</think></think>\nHi"):
        parser = think.parser(tools=False, reasoning=True, prompt_opens_reasoning=True)
        assert parse(parser, text) == Message("hm", "Hi")


def test_values_that_are_not_of_their_type() -> None:
    values = {"n": "many", "o": "{'a': (1, None)}", "b": "none", "x": "1"}
    text = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
    parser = by_name("qwen3_coder").parser(tools=TOOLS, reasoning=True)
    [(_, _, arguments)] = parse(parser, f"<tool_call><function=f>{text}</function></tool_call>").calls
    assert arguments == '{"n": "many", "o": {"a": [1, null]}, "b": null, "x": "1"}'
    for number, written in (("+1_000", "1000"), (".5", "0.5"), ("0" * 400 + "1", "1"), ("0" + "9" * 400, None)):
        [(_, _, arguments)] = parse(by_name("pythonic").parser(tools=True, reasoning=True), f"[f(n={number})]").calls
        assert arguments == f'{{"n": {written}}}' or (written is None and json.loads(arguments) == {"n": number})


CALLS = {
    "qwen3_coder": "<tool_call><function=f>\n<parameter=o>\n{}\n</parameter>\n</function></tool_call>",
    "glm45": "<tool_call>f<arg_key>o</arg_key><arg_value>{}</arg_value></tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="o">{}</parameter></invoke></minimax:tool_call>',
    "dsml": f'<{DSML}invoke name="f"><{DSML}parameter name="o" string="false">{{}}</{DSML}parameter></{DSML}invoke>',
    "mimo": "<tool_call><function=f><parameter=o>{}</parameter></function></tool_call>",
}


@pytest.mark.parametrize("name", CALLS)
def test_json_goes_on_behind_tags_in_its_strings(name: str) -> None:
    syntax = by_name(name).tools
    assert syntax is not None and isinstance(syntax.body, NamedParameters)
    tags = "".join((*syntax.body.value_ends, *syntax.body.end, *syntax.call_end, *syntax.section_end, *syntax.call))
    value = {"a": [f'"{tags}', {tags: "\\"}], "b": True}
    text = CALLS[name].replace("{}", json.dumps(value, ensure_ascii=False))
    for pieces in ([text], list(text)):
        message = parse(by_name(name).parser(tools=TOOLS, reasoning=True), pieces)
        assert [json.loads(arguments) for _, _, arguments in message.calls] == [{"o": value}]
        assert not message.content


def test_a_string_that_does_not_end_hides_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    again = 0
    put_back = Reader.put_back

    def counted(self: Reader, text: str) -> None:
        nonlocal again
        again += len(text)
        put_back(self, text)

    monkeypatch.setattr(Reader, "put_back", counted)
    text = '<tool_call><function=f><parameter=o>["a</parameter><parameter=n>3</parameter></function></tool_call>'
    for pieces in ([text * 50], list(text * 50)):
        again = 0
        message = parse(by_name("qwen3_coder").parser(tools=TOOLS, reasoning=True), pieces)
        assert [json.loads(arguments) for _, _, arguments in message.calls] == [{"o": '["a', "n": 3}] * 50
        assert 0 < again < len(text * 50)


def test_schemas_that_refer_to_themselves_take_no_time() -> None:
    circle = {"anyOf": [{"$ref": "#/$defs/a"} for _ in range(200)] + [{"type": "integer"}]}
    parameters = {"properties": {"p": {"$ref": "#/$defs/a"}}, "$defs": {"a": circle}}
    started = time.monotonic()
    assert ToolSchemas([{"name": "f", "parameters": parameters}]).types("f", "p") == {"integer"}
    assert time.monotonic() - started < 1


def test_text_within_a_call_comes_behind_it() -> None:
    text = "<tool_call><function=f><parameter=s>a</parameter> so <parameter=x>b</parameter></function></tool_call>"
    for pieces in ([text], list(text)):
        parser = by_name("qwen3_coder").parser(tools=TOOLS, reasoning=True)
        events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
        kinds = [type(event).__name__ for event in events]
        assert kinds == sorted(kinds, key=["ToolCallBegin", "ToolArgumentsDelta", "ContentDelta"].index)
        assert "".join(event.text for event in events if isinstance(event, ContentDelta)).strip() == "so"
        arguments = "".join(event.text for event in events if isinstance(event, ToolArgumentsDelta))
        assert arguments == '{"s": "a", "x": "b"}'


def test_a_tag_within_the_answer_is_text() -> None:
    parser = by_name("think").parser(tools=False, reasoning=True)
    assert parse(parser, "a <think> b </think> c") == Message("", "a <think> b </think> c")


def test_a_call_ends_reasoning() -> None:
    parser = by_name("glm45").parser(tools=True, reasoning=True, prompt_opens_reasoning=True)
    assert parse(parser, "hm <tool_call> x <tool_call>f</tool_call>") == Message(
        "hm <tool_call> x ", "", (("f", None, "{}"),)
    )


@pytest.mark.parametrize(
    ("template", "architectures", "tool", "reasoning"),
    [
        ("<tool_call> arguments </think>", ["Qwen3ForCausalLM"], "hermes", "think"),
        ("<tool_call><function=x><parameter=y>", ["Qwen3MoeForCausalLM"], "qwen3_coder", None),
        ("<tool_call><function=x><parameter=y></think>", ["MiMoV2FlashForCausalLM"], "mimo", "think"),
        ("<tool_call><arg_key></think>", ["Glm4MoeForCausalLM"], "glm45", "think"),
        ("<｜tool▁calls▁begin｜> ```json", ["DeepseekV3ForCausalLM"], "deepseek_v3", None),
        ("<｜tool▁calls▁begin｜></think>", ["DeepseekV3ForCausalLM"], "deepseek_v31", "think"),
        (None, ["DeepseekV32ForCausalLM"], "dsml", "think"),
        (None, ["DeepseekV4ForCausalLM"], "dsml", "think"),
        ("<|start|><|channel|>analysis<|message|>", ["GptOssForCausalLM"], "harmony", "harmony"),
        ("[TOOL_CALLS] [THINK]", ["MistralForCausalLM"], "mistral", "mistral"),
        ("<|tool_call>call: <|channel>", ["Gemma4ForConditionalGeneration"], "gemma4", "gemma4"),
        ("[func_name1(params_name1=...)]", ["LlamaForCausalLM"], "pythonic", None),
        ("plain", ["KimiLinearForCausalLM"], "kimi_k2", None),
        ("plain", ["LlamaForCausalLM"], None, None),
        (None, [], None, None),
    ],
)
def test_choice(template: str | None, architectures: list[str], tool: str | None, reasoning: str | None) -> None:
    choice = for_checkpoint(template, architectures)
    assert (choice.tool and choice.tool.name, choice.reasoning and choice.reasoning.name) == (tool, reasoning)
    assert f"tool calls: {tool or 'unknown'}" in choice.reason
    assert f"reasoning: {reasoning or 'none'}" in choice.reason


def test_names_of_parsers() -> None:
    assert by_tool_parser("qwen3_xml").name == "qwen3_coder"
    assert by_tool_parser("openai").name == "harmony"
    assert by_reasoning_parser("deepseek_r1").name == "think"
    with pytest.raises(ConfigError, match=r"--tool-call-parser 'nope' is unknown; use one of .*hermes"):
        by_tool_parser("nope")
    with pytest.raises(ConfigError, match="--reasoning-parser 'hermes2'"):
        by_reasoning_parser("hermes2")
