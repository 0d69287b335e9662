"""Grammars of tool calls: whatever follows one is, to the format's own parser, calls that fit the schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from allotrope.grammars.backend import load_backend, words
from allotrope.grammars.vocabulary import Vocabulary
from allotrope.request import Grammar
from allotrope.text import call_grammar
from allotrope.text.call_grammar import CalledTool, NotWritable
from allotrope.text.formats import FORMATS, ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallBegin
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
    assert '"red"' in part and '"blue"' in part and "any_text" not in part
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


def written(format: MessageFormat, part: dict[str, Any], seed: int, most: int = 3000) -> str | None:
    """A text that follows a grammar, chosen at random. None if it does not end soon."""
    known = vocabulary(format)
    matcher = (
        load_backend("llguidance", known)
        .compile(Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": part})))
        .matcher()
    )
    backend = load_backend("llguidance", known)
    choice, data = random.Random(seed), b""
    for _ in range(most):
        if matcher.complete:
            break
        bits = np.zeros((1, words(len(known.tokens))), dtype=np.int32)
        backend.fill([(matcher, 0)], bits)
        allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little")[: len(known.tokens)])
        token = int(choice.choice(list(allowed)))
        assert matcher.take(token), matcher.error
        if token == known.eos_ids[0]:
            break
        data += known.tokens[token]
    else:
        return None
    return data.decode()


def parsed(format: MessageFormat, text: str) -> tuple[list[tuple[str, Any]], str]:
    """(calls, other text)"""
    schemas = [{"type": "function", "function": {"name": n, "parameters": schema}} for n, schema in SCHEMAS.items()]
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
    called = 0
    for seed in range(12):
        text = written(format, part, seed)
        for name, arguments in parsed(format, text)[0] if text is not None else ():
            called += 1
            jsonschema.validate(arguments, SCHEMAS[name])
    assert called
