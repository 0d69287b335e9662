"""Grammars of tool calls: whatever follows one is, to the format's own parser, calls that fit the schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allotrope.grammars.backend import load_backend, words
from allotrope.grammars.vocabulary import Vocabulary
from allotrope.request import Grammar
from allotrope.server.tools import MAX_TOOLS
from allotrope.text import call_grammar
from allotrope.text.call_parts import CalledTool, NotWritable
from allotrope.text.formats import FORMATS, ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallBegin
from allotrope.text.formats.bodies import NamedParameters
from allotrope.text.formats.format import MessageFormat
from allotrope.text.formats.parser import make_parser

pytest.importorskip("llguidance", reason="grammars need llguidance")

SCHEMAS: dict[str, dict[str, Any]] = {
    "turn": {
        "type": "object",
        "properties": {
            "way": {"type": "string", "enum": ["left", "right"]},
            "steps": {"type": "integer", "minimum": 0, "maximum": 99},
            "fast": {"type": "boolean"},
        },
        "required": ["way", "steps"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [CalledTool(name, schema) for name, schema in SCHEMAS.items()]
WRITABLE = [one for one in FORMATS.values() if one.name not in ("think", "gemma4", "pythonic")]


def test_formats_without_a_grammar_say_so() -> None:
    for name in ("think", "gemma4", "pythonic"):
        with pytest.raises(NotWritable):
            call_grammar.forced_calls(FORMATS[name], TOOLS, many=True)


def test_definitions_that_would_stand_in_too_many_parameters() -> None:
    schema = {
        "$defs": {f"d{i}": {"type": "integer"} for i in range(100)},
        "properties": {f"p{i}": {"$ref": "#/$defs/d1"} for i in range(1000)},
    }
    with pytest.raises(NotWritable, match="too long"):
        call_grammar.forced_calls(FORMATS["qwen3_coder"], [CalledTool("f", schema)], many=False)
    call_grammar.forced_calls(FORMATS["hermes"], [CalledTool("f", schema)], many=False)


@pytest.mark.parametrize("format", WRITABLE, ids=lambda format: format.name)
def test_calls_of_as_many_tools_as_a_request_may_have(format: MessageFormat) -> None:
    tools = [CalledTool(f"f{index}", SCHEMAS["stop"]) for index in range(MAX_TOOLS)]
    assert written(format, call_grammar.forced_calls(format, tools, many=False), seed=0)


COLOURS = {"$defs": {"c": {"type": "string", "enum": ["red", "blue"]}}}
LISTED: list[dict[str, Any]] = [
    {"$ref": "#/$defs/c"},
    {"anyOf": [{"$ref": "#/$defs/c"}, {"type": "null"}]},
    {"allOf": [{"$ref": "#/$defs/c"}], "description": "x"},
]


@pytest.mark.parametrize("colour", LISTED)
def test_values_that_a_schema_lists_elsewhere_are_held(colour: dict[str, Any]) -> None:
    tool = CalledTool("f", COLOURS | {"type": "object", "properties": {"colour": colour}, "required": ["colour"]})
    part = json.dumps(call_grammar.forced_calls(FORMATS["qwen3_coder"], [tool], many=False))
    assert '"red|blue"' in part and "any_text" not in part
    assert ('"null"' in part) == ("anyOf" in colour)


@pytest.mark.parametrize(
    "more",
    [
        {"properties": {"s": {"anyOf": [{"type": "string", "pattern": "a+"}, {"type": "null"}]}}},
        {"properties": {"s": {"allOf": [{"type": "string"}, {"enum": ["a"]}]}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"s": {"type": "string"}}, "required": ["s"]}}},
        {"properties": {"s": {"type": "string"}}, "anyOf": [{"required": ["s"]}]},
    ],
)
def test_schemas_that_parameters_in_tags_cannot_keep(more: dict[str, Any]) -> None:
    with pytest.raises(NotWritable):
        call_grammar.forced_calls(FORMATS["qwen3_coder"], [CalledTool("f", {"type": "object"} | more)], many=False)
    call_grammar.forced_calls(FORMATS["hermes"], [CalledTool("f", {"type": "object"} | more)], many=False)


def special_texts(format: MessageFormat) -> list[str]:
    if format.channels is not None:
        tags = format.channels
        return [tags.start, tags.channel, tags.message, *tags.ends, *tags.others]
    assert format.tools is not None
    texts = [*format.tools.section, *format.tools.section_end, *format.tools.call, *format.tools.call_end]
    return [text for text in texts if len(text) > 2 and text[-1] in ">]"]


def vocabulary(format: MessageFormat) -> Vocabulary:
    """Bytes, the format's tags as special tokens, and an end token."""
    special = special_texts(format)
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in special] + [b"</s>"]
    return Vocabulary(tuple(tokens), frozenset(range(256, len(tokens))), (len(tokens) - 1,))


def written(
    format: MessageFormat, part: dict[str, Any], seed: int, most: int = 3000, likely: Sequence[str] = ()
) -> str | None:
    """A text that follows a grammar, chosen at random. None if it does not end soon.

    `likely`: texts that come wherever they can.
    """
    known = vocabulary(format)
    matcher = (
        load_backend("llguidance", known)
        .compile(Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": part})))
        .matcher()
    )
    backend = load_backend("llguidance", known)
    choice, data, begun = random.Random(seed), b"", b""
    for _ in range(most):
        if matcher.complete:
            break
        bits = np.zeros((1, words(len(known.tokens))), dtype=np.int32)
        backend.fill([(matcher, 0)], bits)
        allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little")[: len(known.tokens)])
        begun = begun or (choice.choice(likely).encode() if likely and choice.random() < 0.3 else b"")
        token = begun[0] if begun and begun[0] in allowed else int(choice.choice(list(allowed)))
        begun = begun[1:] if begun and begun[0] == token else b""
        assert matcher.take(token), matcher.error
        if token == known.eos_ids[0]:
            break
        data += known.tokens[token]
    else:
        return None
    return data.decode()


def parsed(
    format: MessageFormat, text: str, of: Mapping[str, dict[str, Any]] = SCHEMAS
) -> tuple[list[tuple[str, Any]], str]:
    """(calls, other text)"""
    schemas = [{"type": "function", "function": {"name": n, "parameters": schema}} for n, schema in of.items()]
    parser = make_parser(format, format, tools=schemas, special_tokens=special_texts(format))
    events = [*parser.push(text), *parser.finish()]
    calls: list[tuple[str, list[str]]] = []
    rest = ""
    for event in events:
        match event:
            case ToolCallBegin(_, name):
                calls.append((name, []))
            case ToolArgumentsDelta(index, piece):
                calls[index][1].append(piece)
            case ContentDelta(piece) | ReasoningDelta(piece):
                rest += piece
    return [(name, json.loads("".join(pieces))) for name, pieces in calls], rest


@pytest.mark.parametrize("format", WRITABLE, ids=lambda one: one.name)
@pytest.mark.parametrize("many", [True, False])
def test_forced_calls_fit_their_schemas(format: MessageFormat, many: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    part = call_grammar.forced_calls(format, TOOLS, many=many)
    counts = []
    for seed in range(12):
        text = written(format, part, seed)
        if text is None:
            continue
        calls, rest = parsed(format, text)
        assert calls and not rest.strip(), text
        counts.append(len(calls))
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
    assert len(counts) >= 6
    assert many or set(counts) == {1}


@pytest.mark.parametrize("format", WRITABLE, ids=lambda one: one.name)
def test_strict_calls_in_text(format: MessageFormat) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    if format.name == "llama3_json":
        with pytest.raises(NotWritable, match="opens other texts"):
            call_grammar.calls_in_text(format, TOOLS, many=True)
        return
    part = call_grammar.calls_in_text(format, TOOLS, many=True)
    # In every spelling, and without their section.
    syntax = format.tools
    openings = [] if syntax is None else [*syntax.section, *syntax.call, "stop", '">', ">", *syntax.section_end]
    called = 0
    for seed in range(24):
        text = written(format, part, seed, likely=openings if seed % 2 else ())
        for name, arguments in parsed(format, text)[0] if text is not None else ():
            called += 1
            jsonschema.validate(arguments, SCHEMAS[name])
    assert called


IN_TAGS = [one for one in WRITABLE if one.tools is not None and isinstance(one.tools.body, NamedParameters)]


def tags_of(format: MessageFormat) -> list[str]:
    """Every text of the tags of a format."""
    assert format.tools is not None and isinstance(format.tools.body, NamedParameters)
    syntax, body = format.tools, format.tools.body
    texts = (*syntax.section, *syntax.section_end, *syntax.call, *syntax.call_end, *body.value_ends, *body.end)
    return sorted({*texts, *body.key, body.value} - {""})


def kept(format: MessageFormat, schema: dict[str, Any], seed: int = 1, likely: Sequence[str] = ()) -> Any:
    """Arguments of a call that the grammar writes, as they are read. None: the schema is refused, or takes long."""
    try:
        part = call_grammar.forced_calls(format, [CalledTool("f", schema)], many=False)
    except NotWritable:
        return None
    text = written(format, part, seed, likely=likely)
    if text is None:
        return None
    calls, rest = parsed(format, text, {"f": schema})
    assert [name for name, _ in calls] == ["f"] and not rest.strip(), text
    return calls[0][1]


def with_property(name: str, inner: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: inner}, "required": [name], "additionalProperties": False}


@pytest.mark.parametrize("format", IN_TAGS, ids=lambda one: one.name)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_names_and_values_are_read_as_they_are_written_or_refused(format: MessageFormat, data: st.DataObject) -> None:
    pieces = [
        *tags_of(format),
        "</s>",
        "a",
        " ",
        "\n",
        "<",
        ">",
        '"',
        "'",
        "{",
        "[1]",
        "1",
        "true",
        "null",
        "\\",
        "/",
        "é",
    ]
    texts = st.lists(st.sampled_from(pieces) | st.text(max_size=2), max_size=3).map("".join)
    values = texts | st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, -1.25])
    nested = st.lists(values, max_size=2) | st.dictionaries(texts, values, max_size=2)
    name, choices = data.draw(texts), data.draw(st.lists(values | nested, min_size=1, max_size=3))
    for inner in ({"const": choices[0]}, {"enum": choices}, {"anyOf": [{"enum": choices}, {"type": "null"}]}):
        found = kept(format, with_property(name, inner))
        if found is not None:
            assert set(found) == {name}
            assert json.dumps(found[name]) in [*map(json.dumps, choices), *["null"] * ("anyOf" in inner)]


@pytest.mark.parametrize("format", IN_TAGS, ids=lambda one: one.name)
@pytest.mark.parametrize(
    "name", ["trail ", " lead", "a<b", "x\ny", 'a"b', "{", "", "a>b", "[PAD]", "日本", "a\\d", "n" * 256, "n" * 257]
)
def test_names_that_the_parser_may_not_read(format: MessageFormat, name: str) -> None:
    found = kept(format, with_property(name, {"type": "boolean"}))
    safe = name in ("{", "[PAD]", "日本", "a\\d", "n" * 256)
    assert found in ({name: True}, {name: False}) if safe else found is None


@pytest.mark.parametrize("format", IN_TAGS, ids=lambda one: one.name)
def test_values_that_tags_would_end(format: MessageFormat) -> None:
    assert format.tools is not None and isinstance(format.tools.body, NamedParameters)
    for text in (*format.tools.body.value_ends, f"a{format.tools.body.value_end}b"):
        assert kept(format, with_property("v", {"const": text})) is None
        nested = {"w": [text]}
        assert kept(format, with_property("v", {"const": nested})) == {"v": nested}
    for text in ("</s>", "", "\n", " a\n", "a\\nb/"):
        assert kept(format, with_property("v", {"const": text})) == {"v": text}


FREE: list[Any] = [
    {"type": "string"},
    {"type": ["string", "null"]},
    {},
    {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    {"anyOf": [{"enum": ["auto", "1x", None]}, {"type": "integer", "minimum": 3, "maximum": 77}]},
    {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    {"type": "object", "additionalProperties": {"type": "string"}, "properties": {"a": {"type": "boolean"}}},
]


@pytest.mark.parametrize("format", IN_TAGS, ids=lambda one: one.name)
@pytest.mark.parametrize("inner", FREE, ids=json.dumps)
def test_tags_within_values_end_nothing(format: MessageFormat, inner: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = with_property("v", inner)
    schema["properties"]["w"] = {"type": "boolean"}
    schema["required"] = ["v", "w"]
    found = [kept(format, schema, seed, likely=[*tags_of(format), '"', "]", "}"]) for seed in range(6)]
    assert sum(one is not None for one in found) >= 2
    for arguments in found:
        if arguments is not None:
            jsonschema.validate(arguments, schema)


@pytest.mark.parametrize("format", IN_TAGS, ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("inner", "why"),
    [
        ({"type": "array", "items": {"$ref": "#"}}, "no definition"),
        ({"anyOf": [{"$ref": "#/$defs/none"}, {"type": "string"}]}, "no definition"),
        (False, "no value"),
        ({"type": "string", "enum": [1]}, "no value"),
        ({"oneOf": [{"type": "string"}, {"const": "a"}]}, "oneOf"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 3}, "anyOf"),
        ({"enum": ["a", "b"], "pattern": "a"}, "pattern"),
        ({"type": "string", "not": {"const": "a"}}, "not"),
        ({"type": "string", "enum": 7}, "enum is no list"),
        ({"anyOf": {"type": "string"}}, "anyOf is no list"),
    ],
)
def test_schemas_of_parameters_that_tags_cannot_keep(format: MessageFormat, inner: Any, why: str) -> None:
    with pytest.raises(NotWritable, match=why):
        call_grammar.forced_calls(format, [CalledTool("f", with_property("v", inner))], many=False)


@pytest.mark.parametrize("format", IN_TAGS, ids=lambda one: one.name)
def test_text_that_may_be_read_as_another_type(format: MessageFormat) -> None:
    for inner in (
        {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]},
        {"type": ["string", "integer"], "enum": ["1"]},
    ):
        tool = CalledTool("f", with_property("v", inner))
        # Its tags say what a value is.
        if format.name == "dsml":
            call_grammar.forced_calls(format, [tool], many=False)
        else:
            with pytest.raises(NotWritable, match="read as"):
                call_grammar.forced_calls(format, [tool], many=False)
    choices = ["auto", "none", None, 7]
    found = [kept(format, with_property("v", {"enum": choices}), seed) for seed in range(8)]
    assert all(one["v"] in choices for one in found) and len({*map(json.dumps, found)}) > 1


@pytest.mark.parametrize("format", IN_TAGS, ids=lambda one: one.name)
def test_a_parameter_that_no_value_fits_is_left_out(format: MessageFormat) -> None:
    schema = with_property("v", {"const": "a"})
    schema["properties"]["w"] = False
    assert kept(format, schema) == {"v": "a"}
