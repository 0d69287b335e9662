"""Fields that ask for structured output: each kind in each route, refusals that name the keyword, and hostile ones."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
from server_process import ServerProcess, wait_until_idle

Json = dict[str, Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 300},
}
SCHEMA: Json = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TAG: Json = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</f>",
    },
}
ASKING: list[Json] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None, "disable_any_whitespace": False}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA), "response_format": {"type": "text"}},
]


def text_of(http: httpx.Client, path: str, more: Json) -> str:
    response = http.post(path, json=BODIES[path] | more)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    text: str = choice["message"]["content"] if path == CHAT else choice["text"]
    return text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("asking", ASKING, ids=[str(i) for i in range(len(ASKING))])
def test_each_spelling_of_a_schema_holds(http: httpx.Client, path: str, asking: Json) -> None:
    jsonschema.validate(json.loads(text_of(http, path, asking | {"seed": 4})), SCHEMA)


@pytest.mark.parametrize(
    ("asking", "allowed"),
    [
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, {"yes", 'n"o'}),
        ({"guided_choice": ["one"]}, {"one"}),
        ({"structured_outputs": {"regex": "a[bc]d"}}, {"abd", "acd"}),
        ({"guided_regex": "x{3}"}, {"xxx"}),
        ({"structured_outputs": {"grammar": 'start: "l" ("m" | "n")'}}, {"lm", "ln"}),
        ({"guided_grammar": 'root ::= "p" | "q"'}, {"p", "q"}),
    ],
)
def test_other_kinds(http: httpx.Client, asking: Json, allowed: set[str]) -> None:
    assert text_of(http, CHAT, asking) in allowed


def test_structural_tags(http: httpx.Client) -> None:
    for asking in ({"response_format": TAG}, {"structured_outputs": {"structural_tag": json.dumps(TAG)}}):
        text = text_of(http, COMPLETIONS, asking | {"seed": 1})
        assert text.startswith("<f>") and text.endswith("</f>")
        jsonschema.validate(json.loads(text[3:-4]), SCHEMA)


def test_a_stream_and_its_siblings_hold(server: ServerProcess) -> None:
    body = BODIES[COMPLETIONS] | {"guided_json": SCHEMA, "n": 3, "stream": True, "logprobs": 1, "seed": 2}
    texts = ["", "", ""]
    with server.http() as http, http.stream("POST", COMPLETIONS, json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


REFUSED: list[tuple[Json, str, str]] = [
    ({"guided_json": {"type": "object", "unevaluatedProperties": False}}, "guided_json", "unevaluatedProperties"),
    ({"guided_json": {"not": {"type": "string"}}}, "guided_json", '"not"'),
    ({"structured_outputs": {"json": {"if": {}, "then": {}}}}, "structured_outputs", '"if"'),
    ({"guided_json": {"type": "string", "format": "zork"}}, "guided_json", "zork"),
    ({"guided_json": {"$ref": "http://example.org/x"}}, "guided_json", "example.org"),
    ({"guided_json": {"type": "array", "minItems": 3, "maxItems": 1}}, "guided_json", "minItems"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-ahead"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "response_format and"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"whitespace_pattern": " ", "json": {}}}, "structured_outputs", "whitespace_pattern"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "needs a schema"),
    ({"guided_regex": "a+", "allowed_token_ids": [0]}, "allowed_token_ids", "the grammar can go on"),
]


@pytest.mark.parametrize(("asking", "param", "help"), REFUSED, ids=[help for _, _, help in REFUSED])
def test_what_is_not_supported_is_named(http: httpx.Client, asking: Json, param: str, help: str) -> None:
    for stream in (False, True):
        response = http.post(CHAT, json=BODIES[CHAT] | asking | {"stream": stream})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert help in error["message"]


def _deep(levels: int) -> str:
    return '{"type":"object","properties":{"a":' * levels + "{}" + "}}" * levels


def _refs(levels: int) -> Json:
    parts: Json = {
        f"d{i}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "ab"}}
        for i in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": parts | {f"d{levels}": {"type": "string"}}}


HOSTILE: dict[str, Json] = {
    "deep": {"guided_json": _deep(5000)},
    "deep lists": {"guided_json": '{"enum":' + "[" * 50_000 + "]" * 50_000 + "}"},
    "product of alternatives": {
        "guided_json": {
            "allOf": [
                {"oneOf": [{"type": "object", "properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(4)]}
                for i in range(12)
            ]
        }
    },
    "references to itself": {"guided_json": {"$ref": "#"}},
    "references twice each": {"guided_json": _refs(40)},
    "many properties": {"guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(20_000)}}},
    "large enum": {"guided_json": {"enum": [f"v{i}" for i in range(100_000)]}},
    "long text": {"guided_json": {"type": "string", "minLength": 10**9}},
    "repetitions of repetitions": {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"},
    "states": {"guided_regex": "(a|b)*a(a|b){500}c"},
    "many choices": {"guided_choice": [f"c{i}" for i in range(20_000)]},
    "deep expression": {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
    "repetition of a rule": {"guided_grammar": 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"'},
    "ambiguous rule": {"guided_grammar": 'start: a\na: a a | "x" | '},
}


def test_hostile_grammars_harm_nobody(server: ServerProcess) -> None:
    """Each ends in bounded time, by a refusal or an answer, while others get theirs."""
    with server.http() as http, ThreadPoolExecutor(4) as pool:
        good = [pool.submit(text_of, http, CHAT, {"guided_json": SCHEMA, "seed": i}) for i in range(4)]
        for name, asking in HOSTILE.items():
            began = time.monotonic()
            response = http.post(CHAT, json=BODIES[CHAT] | asking | {"max_tokens": 20}, timeout=60)
            assert response.status_code in (200, 400, 500), (name, response.text)
            if response.status_code == 500:
                assert "grammar" in response.json()["error"]["message"], (name, response.text)
            assert time.monotonic() - began < 20, name
        for one in good:
            jsonschema.validate(json.loads(one.result()), SCHEMA)
        wait_until_idle(http)
