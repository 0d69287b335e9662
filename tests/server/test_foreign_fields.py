"""Fields of other engines are refused with what to write here; what nobody knows is named in a header."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from server_process import ServerProcess

from allotrope.errors import InvalidRequest
from allotrope.server import fields
from allotrope.server.rules import Honoured, Misplaced, Only, Renamed

Json = dict[str, Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
    "/tokenize": {"prompt": "hi"},
}
TABLES = {
    "chat": fields.CHAT,
    "completions": fields.COMPLETIONS,
    "tokenize": fields.TOKENIZE,
    "detokenize": fields.DETOKENIZE,
    "message": fields.MESSAGE,
}
# What a client of another engine sends, and words of the answer that help it on.
SENT: list[tuple[str, Json, str, str]] = [
    (CHAT, {"grammar": 'root ::= "a"'}, "grammar", "structured_outputs"),
    (CHAT, {"regex": "a+"}, "regex", "structured_outputs"),
    (CHAT, {"ebnf": "a"}, "ebnf", "structured_outputs"),
    (CHAT, {"json_schema": {"type": "object"}}, "json_schema", "structured_outputs"),
    (CHAT, {"format": "json"}, "format", "structured_outputs"),
    (CHAT, {"lora_path": "x"}, "lora_path", "adapters are not loaded"),
    (CHAT, {"repeat_penalty": 1.3}, "repeat_penalty", "write repetition_penalty"),
    (CHAT, {"mirostat": 2}, "mirostat", "Mirostat is not offered"),
    (CHAT, {"mirostat_mode": 1, "mirostat_tau": 5.0}, "mirostat_mode", "Mirostat is not offered"),
    (CHAT, {"enable_thinking": False}, "enable_thinking", "chat_template_kwargs"),
    (CHAT, {"thinking": {"type": "disabled"}}, "thinking", "chat_template_kwargs"),
    (CHAT, {"max_new_tokens": 9}, "max_new_tokens", "write max_tokens"),
    (CHAT, {"n_predict": 9}, "n_predict", "write max_tokens"),
    (CHAT, {"max_output_tokens": 9}, "max_output_tokens", "write max_tokens"),
    (CHAT, {"options": {"num_predict": 5}}, "options", "num_predict as max_tokens"),
    (CHAT, {"extra_body": {"top_k": 3}}, "extra_body", "in the body itself"),
    (CHAT, {"system": "be brief"}, "system", "role system"),
    (CHAT, {"prompt": "hi"}, "prompt", "write messages"),
    (CHAT, {"suffix": "end"}, "suffix", "before a suffix"),
    (COMPLETIONS, {"parameters": {"max_new_tokens": 5}}, "parameters", "max_new_tokens as max_tokens"),
    (COMPLETIONS, {"stopping_strings": ["x"]}, "stopping_strings", "write stop"),
    (COMPLETIONS, {"typical_p": 0.5}, "typical_p", "Allowed: 1.0"),
    (COMPLETIONS, {"dry_multiplier": 0.8}, "dry_multiplier", "DRY is not offered"),
    (COMPLETIONS, {"n_probs": 3}, "n_probs", "write logprobs"),
    (COMPLETIONS, {"messages": [{"role": "user", "content": "x"}]}, "messages", "one of /v1/chat/completions"),
    (COMPLETIONS, {"max_completion_tokens": 3}, "max_completion_tokens", "one of /v1/chat/completions"),
    (COMPLETIONS, {"truncation_side": "right"}, "truncation_side", "keeps the last tokens"),
    ("/tokenize", {"add_special": False}, "add_special", "write add_special_tokens"),
]
# What asks for nothing, or says again what the body says in our words.
TAKEN: list[tuple[str, Json]] = [
    (CHAT, {"mirostat": 0, "typical_p": 1, "do_sample": True, "lora_path": None, "grammar": None}),
    (CHAT, {"max_new_tokens": 1, "repetition_penalty": 1.2, "repeat_penalty": 1.2, "ban_eos_token": False}),
    (COMPLETIONS, {"n_predict": 1, "stop": ["x"], "stopping_strings": ["x"], "tools": [], "tool_choice": "none"}),
]


@pytest.mark.parametrize(("path", "more", "name", "help"), SENT, ids=[f"{path}-{name}" for path, _, name, _ in SENT])
def test_a_foreign_field_is_refused_with_a_hint(
    http: httpx.Client, path: str, more: Json, name: str, help: str
) -> None:
    response = http.post(path, json=BODIES[path] | more)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name
    assert error["message"].startswith(f"{name}=")
    assert help in error["message"]


@pytest.mark.parametrize(("path", "more"), TAKEN)
def test_neutral_values_are_accepted(http: httpx.Client, path: str, more: Json) -> None:
    response = http.post(path, json=BODIES[path] | more)
    assert response.status_code == 200, response.text
    assert "x-allotrope-ignored-fields" not in response.headers


@pytest.mark.parametrize("route", TABLES)
def test_rules_of_foreign_fields(route: str) -> None:
    table = TABLES[route]
    for name, rule in table.foreign.items():
        assert name not in table.known, name
        if isinstance(rule, Renamed):
            assert isinstance(table.known[rule.to], Honoured), name
        else:
            assert isinstance(rule, Only | Misplaced), name
        assert fields.unknown_fields({name: None}, table) == []
        with pytest.raises(InvalidRequest) as refused:
            fields.unknown_fields({name: "no such value"}, table)
        assert (refused.value.param, str(refused.value).partition("=")[0]) == (name, name)
        for neutral in getattr(rule, "values", ()) or getattr(rule, "neutral", ()):
            assert fields.unknown_fields({name: neutral}, table) == []


INNER: list[tuple[Json, str, str]] = [
    (
        {"stream": True, "stream_options": {"include_usages": True}},
        "stream_options.include_usages",
        "Allowed: include_usage",
    ),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "padded"),
    ({"messages": [{"role": "user", "content": "x", "zork": 1}]}, "messages[0].zork", "Allowed: role, content"),
    ({"messages": [{"role": "user", "content": "x", "images": ["y"]}]}, "messages[0].images", "reads text only"),
    (
        {"messages": [{"role": "assistant", "content": "x", "thinking": "y"}]},
        "messages[0].thinking",
        "write reasoning_content",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "schema": {}}}]},
        "tools[0].function.schema",
        "Allowed: name, description, parameters, strict",
    ),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "Allowed: type, function"),
    (
        {"messages": [{"role": "assistant", "content": "x", "prefix": True}]},
        "messages[0].prefix",
        "continue_final_message",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "zork": 1}]}]},
        "messages[0].content[0].zork",
        "Allowed: type, text",
    ),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format", "Allowed: type"),
]


@pytest.mark.parametrize(("more", "param", "help"), INNER, ids=[param for _, param, _ in INNER])
def test_unknown_inner_fields_are_refused(http: httpx.Client, more: Json, param: str, help: str) -> None:
    response = http.post(CHAT, json=BODIES[CHAT] | more)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert help in error["message"]


def test_an_answer_of_another_server_may_be_sent_back(http: httpx.Client) -> None:
    echoed = {"role": "assistant", "content": "yes", "refusal": None, "audio": None, "function_call": None}
    echoed |= {"tool_calls": [], "annotations": [], "reasoning": None, "reasoning_content": None, "invented": None}
    said = [{"role": "user", "content": "hi"}, echoed, {"role": "user", "content": "why"}]
    response = http.post(CHAT, json=BODIES[CHAT] | {"messages": said, "chat_template_kwargs": {"zork": 1}})
    assert response.status_code == 200, response.text
    assert "x-allotrope-ignored-fields" not in response.headers


def test_unknown_fields_are_named(http: httpx.Client, server: ServerProcess) -> None:
    response = http.post(CHAT, json=BODIES[CHAT] | {"zorkmid": 1, "nothing": None})
    assert response.status_code == 200
    assert response.headers["x-allotrope-ignored-fields"] == "zorkmid"
    server.wait_for_line(f"WARNING.*{CHAT}: ignored unknown fields: zorkmid")
