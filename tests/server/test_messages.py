"""The Messages API by hand, for every form of its bodies and events; `test_messages_client` has the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted_model import AFTER, ARGUMENTS, JSON, PLAIN, PONDERED, REASONING
from server_process import API_KEY, MODEL_NAME, ServerProcess

from allotrope.server.messages.protocol import MessagesRequest
from allotrope.server.messages.translate import as_conversation
from allotrope.server.tools import NamedTool

Json = dict[str, Any]
PATH = "/v1/messages"
TOOL: Json = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASKED: list[Json] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def scripted(scripted_server: ServerProcess) -> Iterator[httpx.Client]:
    with scripted_server.http() as made:
        yield made


def answer(http: httpx.Client, **body: Any) -> Json:
    response = http.post(PATH, json={"max_tokens": 50, "messages": ASKED} | body)
    assert response.status_code == 200, response.text
    assert "x-allotrope-ignored-fields" not in response.headers
    whole: Json = response.json()
    return whole


def events(http: httpx.Client, **body: Any) -> list[Json]:
    response = http.post(PATH, json={"max_tokens": 50, "messages": ASKED, "stream": True} | body)
    assert response.status_code == 200, response.text
    parts = response.text.strip("\n").split("\n\n")
    read = []
    for part in parts:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        read.append(event)
    return read


def test_an_answer(scripted: httpx.Client) -> None:
    whole = answer(scripted)
    assert whole["content"] == [{"type": "text", "text": "".join(PLAIN)}]
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL_NAME)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    assert whole["usage"]["output_tokens"] == len(PLAIN) + 1


def test_the_id_of_a_request_is_where_clients_read_it(scripted: httpx.Client) -> None:
    body = {"max_tokens": 1, "messages": ASKED}
    headers = scripted.post(PATH, json=body, headers={"x-request-id": "mine"}).headers
    assert (headers["request-id"], headers["x-request-id"]) == ("mine", "mine")
    assert "request-id" not in scripted.get("/version").headers


def test_why_an_answer_stops(scripted: httpx.Client) -> None:
    assert answer(scripted, max_tokens=2)["stop_reason"] == "max_tokens"
    stopped = answer(scripted, stop_sequences=[", friend"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ", friend")
    assert stopped["content"] == [{"type": "text", "text": "Hello there"}]
    assert answer(scripted, tools=[TOOL])["stop_reason"] == "tool_use"


def test_events_of_reasoning_and_text(scripted: httpx.Client) -> None:
    begun, *rest = events(scripted, messages=[{"role": "user", "content": "think"}])
    assert begun["type"] == "message_start" and begun["message"]["content"] == []
    assert begun["message"]["usage"]["input_tokens"] > 0
    end, stop = rest[-2:]
    assert (stop["type"], end["delta"]["stop_reason"]) == ("message_stop", "end_turn")
    blocks: dict[int, str] = {}
    order = []
    for event in rest[:-2]:
        order.append((event["type"], event["index"]))
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]] = blocks.get(event["index"], "") + delta[delta["type"].removesuffix("_delta")]
    assert list(dict.fromkeys(order)) == [
        (f"content_block_{what}", index) for index in (0, 1) for what in ("start", "delta", "stop")
    ]
    assert blocks == {0: "".join(REASONING), 1: PONDERED}
    whole = answer(scripted, messages=[{"role": "user", "content": "think"}])
    assert [(block["type"], block[block["type"]]) for block in whole["content"]] == [
        ("thinking", "".join(REASONING)),
        ("text", PONDERED),
    ]
    assert whole["usage"]["output_tokens"] == end["usage"]["output_tokens"]


def test_reasoning_that_is_omitted(scripted: httpx.Client) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    blocks = answer(scripted, thinking=thinking)["content"]
    assert [(block["type"], block[block["type"]]) for block in blocks] == [("thinking", ""), ("text", PONDERED)]
    kinds = [
        event["delta"]["type"] for event in events(scripted, thinking=thinking) if "delta" in event and "index" in event
    ]
    assert set(kinds) == {"text_delta"}


def test_thinking_turns_reasoning_on(scripted: httpx.Client) -> None:
    assert [
        block["type"] for block in answer(scripted, thinking={"type": "enabled", "budget_tokens": 1024})["content"]
    ] == [
        "thinking",
        "text",
    ]
    assert [block["type"] for block in answer(scripted, thinking={"type": "disabled"})["content"]] == ["text"]


def test_thinking_is_asked_for_by_each_name_of_the_variable() -> None:
    body = MessagesRequest.model_validate(
        {"max_tokens": 1, "messages": ASKED, "thinking": {"type": "enabled"}, "chat_template_kwargs": {"a": 1}}
    )
    assert as_conversation(body).template_variables == {"enable_thinking": True, "thinking": True, "a": 1}


def test_a_body_that_is_too_large(keyed_server: ServerProcess) -> None:
    with keyed_server.http(headers={"x-api-key": API_KEY}) as http:
        refused = http.post(PATH, content=b" " * 100_001)
        assert (refused.status_code, refused.json()["error"]["type"]) == (413, "request_too_large")


def test_tools_round_trip(scripted: httpx.Client) -> None:
    first = answer(scripted, tools=[TOOL])
    (call,) = first["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
    said = [*ASKED, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = answer(scripted, tools=[TOOL], messages=said)
    assert second["content"] == [{"type": "text", "text": "".join(AFTER)}]
    most = 0
    for _ in range(5):
        streamed = events(scripted, tools=[TOOL])
        start = next(event for event in streamed if event["type"] == "content_block_start")
        assert start["content_block"] | {"id": ""} == {"type": "tool_use", "id": "", "name": "get_weather", "input": {}}
        pieces = [event["delta"]["partial_json"] for event in streamed if event["type"] == "content_block_delta"]
        assert json.loads("".join(pieces)) == ARGUMENTS
        most = max(most, len(pieces))
    # A server that falls behind joins them.
    assert most > 1


def test_a_schema(scripted: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    said = [{"role": "user", "content": "json"}]
    formed = answer(scripted, messages=said, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert formed["content"] == [{"type": "text", "text": "".join(JSON)}]


def test_a_last_message_of_the_assistant_is_continued(scripted: httpx.Client) -> None:
    said = [*ASKED, {"role": "assistant", "content": "Hello"}]
    assert answer(scripted, messages=said)["content"] == [{"type": "text", "text": "".join(PLAIN[1:])}]


def test_count_tokens(scripted: httpx.Client) -> None:
    body: Json = {"model": MODEL_NAME, "system": "Be short.", "messages": ASKED, "tools": [TOOL]}
    counted = scripted.post(f"{PATH}/count_tokens", json=body)
    assert counted.status_code == 200, counted.text
    usage = answer(scripted, **body)["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_cached_tokens_are_counted_apart(scripted: httpx.Client) -> None:
    said = [{"role": "user", "content": "one two three " * 30}]
    first, second = (answer(scripted, messages=said)["usage"] for _ in range(2))
    assert second["cache_read_input_tokens"] >= 16
    assert second["input_tokens"] + second["cache_read_input_tokens"] == first["input_tokens"]


CONVERSATIONS: list[tuple[Json, list[Json]]] = [
    (
        {"system": [
            {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
         "messages": [{"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]}]},
        [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "c\nd"}],
    ),
    (
        {"messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "2", "name": "g", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "2", "content": "two", "is_error": True},
                {"type": "tool_result", "tool_use_id": "1"},
                {"type": "text", "text": "c"}]},
        ]},
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "t", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "2", "content": "Error: two"},
            {"role": "tool", "tool_call_id": "1", "content": ""},
            {"role": "user", "content": "c"},
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "messages"), CONVERSATIONS, ids=["system", "turn"])
def test_blocks_become_messages(scripted: httpx.Client, body: Json, messages: list[Json]) -> None:
    assert list(as_conversation(MessagesRequest(max_tokens=1, **body)).messages) == messages
    answer(scripted, **body, max_tokens=1)


def test_choices_of_tools() -> None:
    def choice(**chosen: Any) -> tuple[Any, bool]:
        body = MessagesRequest(max_tokens=1, messages=ASKED, tools=[TOOL], tool_choice=chosen)
        conversation = as_conversation(body)
        return conversation.tool_choice, conversation.parallel_tool_calls

    assert choice(type="auto") == ("auto", True)
    assert choice(type="any", disable_parallel_tool_use=True) == ("required", False)
    assert choice(type="none") == ("none", True)
    assert choice(type="tool", name="get_weather") == (NamedTool("get_weather"), True)


WRONG: list[tuple[Json, str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "this server reads text only"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "answers no call"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "cannot have"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "only tools of the client"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
    ({"temperature": 1000}, "temperature"),
    ({"container": "x"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"stop": [""]}, "stop"),
]


@pytest.mark.parametrize(("more", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_refusals_have_the_form_of_the_api(scripted: httpx.Client, more: Json, message: str) -> None:
    response = scripted.post(PATH, json={"max_tokens": 5, "messages": ASKED} | more)
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert message in body["error"]["message"]


def test_effort_that_no_template_reads_is_refused(http: httpx.Client) -> None:
    for path in (PATH, f"{PATH}/count_tokens"):
        body: Json = {"messages": ASKED, "output_config": {"effort": "high"}}
        response = http.post(path, json=body | ({"max_tokens": 1} if path == PATH else {}))
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("output_config.effort=high is not supported")


def test_other_errors_have_it_too(scripted: httpx.Client) -> None:
    for path, body, status, kind in (
        (PATH, {"model": "other", "max_tokens": 1, "messages": ASKED}, 404, "not_found_error"),
        (f"{PATH}/batches", {}, 404, "not_found_error"),
    ):
        response = scripted.post(path, json=body)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert scripted.get(PATH).json()["error"]["type"] == "invalid_request_error"


def test_the_key_may_be_in_x_api_key(keyed_server: ServerProcess) -> None:
    body = {"max_tokens": 1, "messages": ASKED}
    with keyed_server.http() as http:
        assert http.post(PATH, json=body, headers={"x-api-key": API_KEY}).status_code == 200
        assert http.get("/v1/models", headers={"x-api-key": API_KEY}).status_code == 200
        refused = http.post(PATH, json=body, headers={"x-api-key": "wrong"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_that_must_be_called(scripted: httpx.Client, choice: Json) -> None:
    strict = TOOL | {"strict": True}
    forced = answer(scripted, tools=[strict], tool_choice=choice, max_tokens=200, temperature=0)
    (call,) = forced["content"]
    assert (forced["stop_reason"], call["type"], call["name"]) == ("tool_use", "tool_use", "get_weather")
    assert set(call["input"]) == {"city"}
    free = answer(scripted, tools=[TOOL], tool_choice={"type": "none"})
    assert free["content"] == [{"type": "text", "text": "".join(PLAIN)}]
