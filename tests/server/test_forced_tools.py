"""Tools that must be called, strict ones, and schemas beside them: held by a grammar, behind the reasoning."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from scripted_chat import ARGUMENTS, SCRIPTS, WEATHER
from server_process import wait_until_idle
from test_tools import ask, body, calls_of, http  # noqa: F401 (a fixture)

Json = dict[str, Any]
pytest.importorskip("llguidance", reason="grammars need llguidance")
jsonschema = pytest.importorskip("jsonschema")

TURN: Json = {
    "type": "object",
    "properties": {
        "way": {"type": "string", "enum": ["left", "right"]},
        "steps": {"type": "integer", "minimum": 1, "maximum": 40},
        "fast": {"type": "boolean"},
    },
    "required": ["way", "steps"],
    "additionalProperties": False,
}
TOOLS: list[Json] = [
    {"type": "function", "function": {"name": "turn", "parameters": TURN}},
    {"type": "function", "function": {"name": "stop"}},
]
PERSON: Json = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON_FORMAT: Json = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
RANDOM: Json = {"temperature": 1.0, "reasoning_effort": "none", "max_tokens": 400}


def check(calls: list[tuple[str, Any]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(arguments, TURN if name == "turn" else {"type": "object", "maxProperties": 0})


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_fits_its_schema(http: httpx.Client, seed: int) -> None:  # noqa: F811
    choice = ask(http, "plain", tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed, **RANDOM)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert len(calls_of(choice)) == 1
    check(calls_of(choice))


@pytest.mark.parametrize("name", ["turn", "stop"])
def test_a_named_call(http: httpx.Client, name: str) -> None:  # noqa: F811
    request = RANDOM | {"tools": TOOLS, "tool_choice": named(name), "parallel_tool_calls": False, "seed": 5}
    choice = ask(http, "plain", **request)
    assert [called for called, _ in calls_of(choice)] == [name]
    check(calls_of(choice))


def test_several_answers_with_logprobs(http: httpx.Client) -> None:  # noqa: F811
    request = RANDOM | {"tools": TOOLS, "tool_choice": named("turn"), "parallel_tool_calls": False, "seed": 6}
    answer = http.post("/v1/chat/completions", json=body("plain", n=4, logprobs=True) | request)
    choices = answer.json()["choices"]
    for choice in choices:
        check(calls_of(choice))
        assert choice["logprobs"]["content"]
    assert len({json.dumps(calls_of(choice)) for choice in choices}) > 1


def test_a_required_call_follows_reasoning(http: httpx.Client) -> None:  # noqa: F811
    choice = ask(http, "think-weather", tools=[WEATHER], tool_choice="required")
    assert choice["message"]["reasoning_content"] == "Look!"
    assert calls_of(choice) == [("get_weather", ARGUMENTS | {"city": "Bonn"})]
    assert calls_of(ask(http, "weather", tools=[WEATHER], tool_choice="required")) == [("get_weather", ARGUMENTS)]


def test_a_schema_follows_reasoning(http: httpx.Client) -> None:  # noqa: F811
    choice = ask(http, "think-person", response_format=PERSON_FORMAT)
    assert choice["message"]["reasoning_content"] == "Of whom?"
    assert json.loads(choice["message"]["content"]) == {"name": "Ida", "age": 35}
    assert json.loads(ask(http, "person", response_format=PERSON_FORMAT)["message"]["content"])["name"] == "Ada"


def test_a_schema_and_tools(http: httpx.Client) -> None:  # noqa: F811
    both: Json = {"tools": [WEATHER], "response_format": PERSON_FORMAT}
    assert calls_of(ask(http, "weather", **both)) == [("get_weather", ARGUMENTS)]
    assert json.loads(ask(http, "person", **both)["message"]["content"]) == {"name": "Ada", "age": 36}
    assert json.loads(ask(http, "think-person", **both)["message"]["content"]) == {"name": "Ida", "age": 35}


def test_strict_tools_are_held_to_their_schemas(http: httpx.Client) -> None:  # noqa: F811
    strict: Json = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    assert calls_of(ask(http, "ponder-weather", tools=[strict])) == [("get_weather", ARGUMENTS | {"city": "Rome"})]
    assert ask(http, "plain", tools=[strict])["message"]["content"] == SCRIPTS["plain"]
    free = ask(http, "broken", tools=[WEATHER])
    held = ask(http, "broken", tools=[strict], max_tokens=40)
    assert "and so on" in str(free["message"]) and "and so on" not in str(held["message"])
    wait_until_idle(http)


def test_a_schema_that_is_not_supported_names_the_tools(http: httpx.Client) -> None:  # noqa: F811
    odd = {"type": "object", "properties": {"x": {"type": "string", "not": {"enum": ["a"]}, "uniqueItems": 7}}}
    tool: Json = {"type": "function", "function": {"name": "odd", "parameters": odd, "strict": True}}
    answer = http.post("/v1/chat/completions", json=body("plain", tools=[tool], tool_choice="required"))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools", answer.text
