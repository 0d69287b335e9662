"""Every field of the Responses and Messages API is honoured, neutral or refused, as the tables of their folders say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.responses import response_create_params
from pydantic import BaseModel
from server_process import ServerProcess

from allotrope.errors import InvalidRequest
from allotrope.server import fields
from allotrope.server.fields import Fields
from allotrope.server.messages.fields import COUNT_TOKENS, MESSAGES
from allotrope.server.messages.protocol import CountTokensRequest, MessagesRequest
from allotrope.server.responses.fields import RESPONSES
from allotrope.server.responses.protocol import ResponsesRequest
from allotrope.server.rules import Honoured, Misplaced, Only, Renamed, WithoutEffect

Json = dict[str, Any]
ASKED = [{"role": "user", "content": "hi"}]
TABLES: dict[str, tuple[type[BaseModel], Fields, Json]] = {
    "/v1/responses": (ResponsesRequest, RESPONSES, {"input": "hi", "max_output_tokens": 1}),
    "/v1/messages": (MessagesRequest, MESSAGES, {"messages": ASKED, "max_tokens": 1}),
    "/v1/messages/count_tokens": (CountTokensRequest, COUNT_TOKENS, {"messages": ASKED}),
}
JSON_VALUES: dict[str, Any] = {"string": "x", "object": {"a": "b"}, "boolean": True, "integer": 7}


@pytest.fixture(scope="module")
def scripted(scripted_server: ServerProcess) -> Iterator[httpx.Client]:
    with scripted_server.http() as made:
        yield made


@pytest.mark.parametrize("path", TABLES)
def test_the_models_declare_exactly_what_is_honoured(path: str) -> None:
    model, table, _ = TABLES[path]
    assert set(model.model_fields) == {name for name, rule in table.known.items() if isinstance(rule, Honoured)}


def test_every_field_of_the_responses_client_is_known() -> None:
    params: Any = response_create_params.ResponseCreateParamsStreaming
    assert set(params.__required_keys__ | params.__optional_keys__) - set(RESPONSES.known) == set()


def test_every_field_of_the_messages_client_is_known() -> None:
    pytest.importorskip("anthropic")
    from anthropic.types import message_count_tokens_params, message_create_params

    create: Any = message_create_params.MessageCreateParamsStreaming
    assert set(create.__required_keys__ | create.__optional_keys__) - set(MESSAGES.known) == set()
    count: Any = message_count_tokens_params.MessageCountTokensParams
    assert set(count.__required_keys__ | count.__optional_keys__) - set(COUNT_TOKENS.known) == set()


@pytest.mark.parametrize("path", TABLES)
def test_foreign_fields_name_fields_of_this_api(path: str) -> None:
    _, table, _ = TABLES[path]
    for name, rule in table.foreign.items():
        assert name not in table.known, name
        assert isinstance(rule, Renamed | Only | Misplaced), name
        if isinstance(rule, Renamed):
            assert isinstance(table.known[rule.to], Honoured), name
        with pytest.raises(InvalidRequest) as refused:
            fields.unknown_fields({name: "no such value"}, table)
        assert refused.value.param == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param(path, name, id=f"{path}-{name}")
        for path, (_, table, _) in TABLES.items()
        for name, rule in table.known.items()
        if not isinstance(rule, Honoured)
    ],
)
def test_limited_fields(scripted: httpx.Client, path: str, name: str) -> None:
    _, table, body = TABLES[path]
    rule = table.known[name]
    assert isinstance(rule, Only | WithoutEffect)
    neutral = rule.values if isinstance(rule, Only) else (JSON_VALUES[rule.json_type],)
    for value in (*neutral, None):
        response = scripted.post(path, json=body | {name: value})
        assert response.status_code == 200, response.text
        assert "x-allotrope-ignored-fields" not in response.headers
    for value in ("something else", 7.5, {"b": 1}, True):
        taken = any(value is one or (type(value) is type(one) and value == one) for one in neutral)
        if taken or (isinstance(rule, WithoutEffect) and type(value) is type(neutral[0])):
            continue
        response = scripted.post(path, json=body | {name: value})
        assert response.status_code == 400, f"{name}={value!r}: {response.text}"
        assert response.json()["error"]["message"].startswith(f"{name}=")


# Each sampling field of these routes changes what it says; `test_fields` looks closer, at the code that they share.
SAMPLED: dict[str, tuple[Any, str]] = {
    "logit_bias": ({"1": 100}, ""),
    "stop": (", friend", "Hello there"),
    "allowed_token_ids": ([1], ""),
}


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_sampling_fields_reach_the_engine(scripted: httpx.Client, path: str, name: str) -> None:
    _, _, body = TABLES[path]
    value, expected = SAMPLED[name]
    longer = {limit: 9 for limit in ("max_tokens", "max_output_tokens") if limit in body}
    answer = scripted.post(path, json=body | longer | {name: value, "temperature": 0}).json()
    items = answer["output"] if "output" in answer else [{"content": answer["content"]}]
    assert "".join(part["text"] for item in items for part in item["content"]) == expected


WRONG: dict[str, dict[str, list[Any]]] = {
    "/v1/responses": {
        "input": [
            7, [], [7], [{}], [{"role": "king", "content": "x"}], [{"role": "user"}],
            [{"type": "item_reference", "id": "x"}],
            [{"type": "function_call_output", "call_id": "x", "output": "y"}], [{"type": "web_search_call"}],
            [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}],
            "one two " * 5000, "x" * 8_000_000,
        ],
        "tools": [
            [{}], [{"type": "web_search"}], [{"type": "function"}], [{"type": "function", "name": ""}], "x",
            [{"type": "function", "name": "f", "parameters": {"type": "string"}}],
            [{"type": "function", "name": f"f{i}"} for i in range(10_000)],
        ],
        "tool_choice": ["other", "required", {"type": "function", "name": "f"}, {"type": "allowed_tools"}, 7],
        "text": [7, {"format": {"type": "xml"}}, {"format": {"type": "json_schema"}}, {"verbosity": "high"}],
        "reasoning": [7, {"effort": "huge"}, {"summary": "detailed"}],
        "include": [["other"], "x"],
        "metadata": [{"a": 1}, {"k" * 65: "x"}, {str(i): "x" for i in range(17)}],
        "top_logprobs": [-1, 21],
        "max_output_tokens": [0, -1, "x", 10**400, 10_000_000],
        "previous_response_id": [7, "resp_none"],
        "instructions": [7],
        "chat_template_kwargs": [7, {"messages": []}],
    },
    "/v1/messages": {
        "messages": [
            None, 7, [], [{}], [{"role": "king", "content": "x"}], [{"role": "user", "content": "x" * 8_000_000}],
        ],
        "system": [7, [{"type": "image"}]],
        "max_tokens": [None, 0, -1, "x", 10_000_000],
        "tools": [[{}], [{"type": "bash_20250124", "name": "bash"}], [{"name": "f"}], "x"],
        "tool_choice": ["auto", {"type": "all"}, {"type": "any"}, {"type": "tool", "name": "f"}],
        "thinking": ["on", {"type": "very"}, {"type": "enabled", "budget_tokens": 0}],
        "stop_sequences": ["x", [""], ["x"] * 17, [7]],
        "output_config": [7, {"format": {"type": "json_schema"}}],
        "thread": [{"type": "create"}],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", WRONG)
def test_wrong_values_are_refused(scripted: httpx.Client, path: str) -> None:
    _, _, body = TABLES[path]
    for name, values in WRONG[path].items():
        for value in values:
            response = scripted.post(path, json=body | {name: value})
            shown = f"{name}={str(value)[:80]}: {response.status_code} {response.text[:300]}"
            assert response.status_code == 400, shown
            error = response.json()["error"]
            assert name in error["message"] and len(error["message"]) <= 1000, shown
            if path == "/v1/responses":
                assert error["param"].split("[")[0].split(".")[0] == name, shown


MISSING: dict[str, list[tuple[str, Any]]] = {
    "/v1/responses": [
        ("input[0].content[0].text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
        ("input[0].name", {"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}),
        ("tools[0].name", {"input": "x", "tools": [{"type": "function"}]}),
    ],
    "/v1/messages": [
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        (
            "messages[0].content[0].content[0].text",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text"}]}],
                    }
                ]
            },
        ),
    ],
}


@pytest.mark.parametrize("path", MISSING)
def test_a_missing_field_is_named_by_its_path(scripted: httpx.Client, path: str) -> None:
    for missing, body in MISSING[path]:
        response = scripted.post(path, json={"max_tokens": 1} | body if path == "/v1/messages" else body)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == f"{missing} is missing."


RAW: list[bytes] = [
    b"", b"{", b"[]", b'"text"', b'{"input": "\xff\xfe"}', b"[" * 100_000, b'{"input":' * 50_000,
    b'{"input": [' + b'{"content":' * 3000 + b"1" + b"}" * 3000 + b"]}",
    b'{"tools": [{"type": "function", "name": "f", "parameters": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}]}",
]  # fmt: skip


@pytest.mark.parametrize("path", TABLES)
def test_broken_bodies_are_refused(scripted: httpx.Client, path: str) -> None:
    for raw in RAW:
        response = scripted.post(path, content=raw)
        assert response.status_code == 400, f"{raw[:60]!r}: {response.status_code} {response.text[:300]}"
        assert response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/rerank", "/pooling"])
def test_pooling_is_refused_with_the_reason(scripted: httpx.Client, path: str) -> None:
    response = scripted.post(path, json={"input": "x"})
    assert response.status_code == 400
    assert "no hidden states" in response.json()["error"]["message"]


def test_the_description_keeps_the_apis_apart(scripted: httpx.Client) -> None:
    described = scripted.get("/openapi.json").json()
    schemas = described["components"]["schemas"]
    assert set(schemas["ResponsesRequest.InputMessage"]["properties"]) >= {"phase", "status"}
    assert set(schemas["MessagesRequest.InputMessage"]["properties"]) == {"role", "content"}
    text = scripted.get("/openapi.json").text
    for part in text.split('"$ref":"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in schemas
