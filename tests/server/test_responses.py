"""The Responses API by the official client, and by hand where the client does not go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from scripted_model import AFTER, ARGUMENTS, JSON, PERSON, PLAIN, PONDERED, REASONING
from server_process import API_KEY, MODEL_NAME, ServerProcess

Json = dict[str, Any]
TOOL: Json = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@pytest.fixture(scope="module")
def client(scripted_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def scripted(scripted_server: ServerProcess) -> Iterator[httpx.Client]:
    with scripted_server.http() as made:
        yield made


def test_create(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL_NAME, input="hi", temperature=0, metadata={"a": "b"})
    assert (answer.output_text, answer.status, answer.model) == ("".join(PLAIN), "completed", MODEL_NAME)
    (item,) = answer.output
    assert (item.type, item.status) == ("message", "completed")
    assert answer.usage is not None and answer.usage.output_tokens == len(PLAIN) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.metadata, answer.temperature, answer.error) == ({"a": "b"}, 0, None)


def test_an_answer_that_is_cut(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL_NAME, input="hi", max_output_tokens=2)
    assert (answer.output_text, answer.status) == ("".join(PLAIN[:2]), "incomplete")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


def test_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL_NAME, input="please think", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = {kind: kinds.count(kind) for kind in kinds if kind.endswith("delta")}
    assert set(deltas) == {"response.reasoning_text.delta", "response.output_text.delta"}
    assert list(dict.fromkeys(kinds)) == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.reasoning_text.delta", "response.reasoning_text.done", "response.content_part.done",
        "response.output_item.done", "response.output_text.delta", "response.output_text.done", "response.completed",
    ]  # fmt: skip
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "".join(REASONING)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == PONDERED
    last = events[-1]
    assert last.type == "response.completed"
    whole = client.responses.create(model=MODEL_NAME, input="please think")
    assert [_without_ids(item) for item in last.response.output] == [_without_ids(item) for item in whole.output]
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert last.response.usage is not None and whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert whole.usage.output_tokens_details.reasoning_tokens >= len(REASONING)


def _without_ids(item: BaseModel) -> Json:
    return {name: value for name, value in item.model_dump().items() if name not in ("id", "call_id")}


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL_NAME, input="hi", tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 1
    (call,) = final.output
    assert call.type == "function_call" and json.loads(call.arguments) == ARGUMENTS


@pytest.mark.parametrize("kept", [True, False])
def test_tools_round_trip(client: openai.OpenAI, kept: bool) -> None:
    asked: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    first = client.responses.create(model=MODEL_NAME, input=asked, tools=[TOOL], store=kept)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)
    output: Json = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    if kept:
        said, previous = [output], first.id
    else:
        said, previous = [*asked, *first.output, output], None
    second = client.responses.create(model=MODEL_NAME, input=said, tools=[TOOL], previous_response_id=previous)
    assert second.output_text == "".join(AFTER)


def test_conversation_goes_on(client: openai.OpenAI, scripted: httpx.Client) -> None:
    first = client.responses.create(model=MODEL_NAME, input="please think", instructions="Be short.")
    second = client.responses.create(model=MODEL_NAME, input="hi", previous_response_id=first.id)
    # Reasoning, text and question are all in the prompt; the instructions are not.
    said = [
        {"role": "user", "content": "please think"},
        {"role": "assistant", "content": PONDERED, "reasoning_content": "".join(REASONING)},
        {"role": "user", "content": "hi"},
    ]
    tokens = scripted.post("/tokenize", json={"messages": said}).json()["count"]
    assert second.usage is not None and second.usage.input_tokens == tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(second.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(model=MODEL_NAME, input="hi", previous_response_id=second.id)
    assert (gone.value.code, gone.value.param) == ("previous_response_not_found", "previous_response_id")


def test_answers_are_apart_for_each_key(client: openai.OpenAI, scripted_server: ServerProcess) -> None:
    mine = client.responses.create(model=MODEL_NAME, input="hi")
    with openai.OpenAI(base_url=f"{scripted_server.url}/v1", api_key="another", max_retries=0) as other:
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(mine.id)
        with pytest.raises(openai.BadRequestError):
            other.responses.create(model=MODEL_NAME, input="hi", previous_response_id=mine.id)


def test_an_answer_that_is_not_stored(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL_NAME, input="hi", store=False)
    assert answer.model_dump()["store"] is False
    assert client.responses.create(model=MODEL_NAME, input="hi").model_dump()["store"] is True
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


class Person(BaseModel):
    name: str
    age: int


def test_parse(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model=MODEL_NAME, input="json please", text_format=Person)
    assert answer.output_text == "".join(JSON)
    assert answer.output_parsed == Person(**PERSON)


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL_NAME, input="hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    (item,) = answer.output
    assert item.type == "message" and item.content[0].type == "output_text"
    logprobs = item.content[0].logprobs
    assert logprobs is not None
    assert [entry.token for entry in logprobs][: len(PLAIN)] == [*PLAIN]
    assert {len(entry.top_logprobs) for entry in logprobs} == {2}


INPUTS: list[tuple[Any, list[Json]]] = [
    ("hi", [{"role": "user", "content": "hi"}]),
    (
        [{"role": "developer", "content": "Be short."}, {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]}],
        [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "one\ntwo"}],
    ),
    (
        [
            {"role": "user", "content": "a"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}],
             "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "s"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        ],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "r", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c2", "content": "two"},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
            {"role": "assistant", "content": "no", "reasoning_content": "s"},
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("said", "messages"), INPUTS, ids=["text", "messages", "turn"])
def test_input_becomes_messages(scripted: httpx.Client, said: Any, messages: list[Json]) -> None:
    from allotrope.server.responses.protocol import ResponsesRequest
    from allotrope.server.responses.translate import read_input

    assert read_input(ResponsesRequest(input=said), []) == messages
    answer = scripted.post("/v1/responses", json={"input": said, "max_output_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert "x-allotrope-ignored-fields" not in answer.headers


def test_unknown_fields_of_items_are_named(scripted: httpx.Client) -> None:
    said = [{"role": "user", "content": "hi", "zork": 1, "nothing": None}]
    answer = scripted.post("/v1/responses", json={"input": said, "max_output_tokens": 1, "blub": 2})
    assert answer.headers["x-allotrope-ignored-fields"] == "blub, input%5B0%5D.zork"


def test_strict_refuses_them(keyed_server: ServerProcess) -> None:
    with keyed_server.http(headers={"authorization": f"Bearer {API_KEY}"}) as http:
        said = [{"role": "user", "content": "hi", "zork": 1}]
        answer = http.post("/v1/responses", json={"input": said})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "input[0].zork"


def test_allowed_tools(scripted: httpx.Client) -> None:
    other = TOOL | {"name": "other"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}
    body: Json = {"input": "hi", "max_output_tokens": 50, "tools": [TOOL]}
    alone = scripted.post("/v1/responses", json=body).json()
    chosen = scripted.post("/v1/responses", json=body | {"tools": [TOOL, other], "tool_choice": allowed}).json()
    assert chosen["usage"]["input_tokens"] == alone["usage"]["input_tokens"]
    assert chosen["tool_choice"] == allowed


def test_keys_of_a_later_client_are_not_kept() -> None:
    from allotrope.server.responses.store import ResponseStore

    store = ResponseStore(max_entries=2, max_bytes=10_000)
    for name in ("a", "b", "c"):
        assert store.put(b"key", {"id": name}, [{"role": "user", "content": name}])
    assert [store.messages(b"key", name) for name in ("a", "b")] == [None, [{"role": "user", "content": "b"}]]
    assert store.put(b"key", {"id": "d"}, [])
    # The answer that was used last stays.
    assert (store.response(b"key", "c"), store.response(b"key", "b")) == (None, {"id": "b"})
    assert store.response(b"other", "b") is None and not store.delete(b"other", "b")
    assert store.delete(b"key", "b") and store.delete(b"key", "d")
    assert (len(store), store.size) == (0, 0)


def test_the_store_is_bounded_in_bytes() -> None:
    from allotrope.server.responses.store import ResponseStore

    store = ResponseStore(max_entries=100, max_bytes=3000)
    for index in range(10):
        assert store.put(b"", {"id": str(index)}, [{"content": "x" * 1000}])
        assert store.size <= 3000
    assert len(store) == 2
    assert not store.put(b"", {"id": "big"}, [{"content": "x" * 3000}])
    assert len(store) == 2
    assert not ResponseStore(max_entries=0, max_bytes=3000).put(b"", {"id": "a"}, [])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_tool_that_must_be_called(client: openai.OpenAI, choice: Any) -> None:
    answer = client.responses.create(
        model=MODEL_NAME, input="hi", tools=[TOOL | {"strict": True}], tool_choice=choice, temperature=0
    )
    (call,) = answer.output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"city"}


@pytest.mark.parametrize("depth", [100, 200, 300, 450])
def test_deep_schemas_are_no_error_of_the_server(scripted: httpx.Client, depth: int) -> None:
    deep: Any = {}
    for _ in range(depth):
        deep = {"default": deep}
    bodies: list[Json] = [
        {"tools": [TOOL | {"parameters": {"type": "object", "default": deep}}]},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object", "default": deep}}}},
    ]
    for body in bodies:
        answer = scripted.post("/v1/responses", json={"input": "hi", "max_output_tokens": 1} | body)
        assert answer.status_code in (200, 400), answer.text


def test_a_stream_that_is_refused_has_a_status(scripted: httpx.Client) -> None:
    refused = scripted.post("/v1/responses", json={"input": "hi", "stream": True, "max_output_tokens": 100_000})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_output_tokens"
