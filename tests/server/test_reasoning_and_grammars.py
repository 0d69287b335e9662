"""Reasoning that a message begins with, and grammars of answers that may have reasoning before them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from scripted_model import PLAIN, PONDERED, REASONING
from server_process import ServerProcess

pytest.importorskip("llguidance", reason="grammars need llguidance")

Json = dict[str, Any]
SCHEMA: Json = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
STRUCTURE: Json = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}
ANSWERS = 'start: "yes" | "no"'


@pytest.fixture(scope="module")
def scripted(scripted_server: ServerProcess) -> Iterator[httpx.Client]:
    with scripted_server.http() as made:
        yield made


def message(http: httpx.Client, asked: str, begun: str | None = None, **more: Any) -> Json:
    body: Json = {"messages": [{"role": "user", "content": asked}], "temperature": 0, "max_tokens": 200, **more}
    if begun is not None:
        body["messages"].append({"role": "assistant", "content": begun})
        body["continue_final_message"] = True
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    found: Json = response.json()["choices"][0]["message"]
    return found


@pytest.mark.parametrize("begun", ["<think>The user asks. ", "\n<think>The user asks. "])
def test_a_reply_goes_on_with_reasoning(scripted: httpx.Client, begun: str) -> None:
    found = message(scripted, "a", begun)
    assert (found["reasoning_content"], found["content"]) == (REASONING[1], PONDERED)


@pytest.mark.parametrize("begun", ["<think>The user asks. I know it.</think>So", "Reasoning begins with <think>"])
def test_a_reply_goes_on_with_content(scripted: httpx.Client, begun: str) -> None:
    found = message(scripted, "a", begun, max_tokens=3)
    assert found.get("reasoning_content") is None and found["content"] is not None


def test_a_grammar_waits_for_the_end_of_reasoning_that_goes_on(scripted: httpx.Client) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    for begun in ("<think>", "<think>The user asks. "):
        found = message(scripted, "a", begun, response_format=asked)
        jsonschema.validate(json.loads(found["content"]), SCHEMA)
        assert found["reasoning_content"].endswith(REASONING[1])
    held = message(scripted, "a", "<think>The user asks. I know it.</think>", response_format=asked)
    jsonschema.validate(json.loads(held["content"]), SCHEMA)


def test_a_lark_grammar_holds_with_reasoning_and_without(scripted: httpx.Client) -> None:
    plain = message(scripted, "hi", guided_grammar=ANSWERS)
    assert plain["content"] in ("yes", "no") and plain.get("reasoning_content") is None
    thought = message(scripted, "think", guided_grammar=ANSWERS)
    assert thought["content"] in ("yes", "no") and thought["reasoning_content"] == "".join(REASONING)


def test_structures_and_triggers_hold_behind_reasoning(scripted: httpx.Client) -> None:
    thought = message(scripted, "think", response_format=STRUCTURE)
    assert thought["reasoning_content"] == "".join(REASONING) and thought["content"] == PONDERED


def test_a_sequence_that_echoes_ends_once(scripted: httpx.Client) -> None:
    def ended() -> dict[str, float]:
        lines = re.findall(
            r'^allotrope_request_success_total\{.*finished_reason="(\w+)".*\} (\S+)$',
            scripted.get("/metrics").text,
            re.M,
        )
        return {reason: float(count) for reason, count in lines}

    for more, tokens in (({"logprobs": 0}, 0), ({}, 1)):
        before = ended()
        body = {"prompt": ["hello", "<|plain|>"], "echo": True, "max_tokens": tokens, **more}
        answer = scripted.post("/v1/completions", json=body)
        assert (answer.status_code == 200 and PLAIN[0] in answer.text) or not tokens
        after = ended()
        assert sum(after.values()) - sum(before.values()) == 2, (before, after)
