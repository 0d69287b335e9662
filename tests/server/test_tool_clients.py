"""The clients that people use, unchanged: each calls a tool, brings back its answer, and asks for a schema."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from scripted_chat import ARGUMENTS, WEATHER
from server_process import MODEL_NAME, ServerProcess

needs_grammars = pytest.mark.skipif(find_spec("llguidance") is None, reason="grammars need llguidance")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@pytest.fixture(scope="module")
def client(chat_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def say(script: str) -> list[Any]:
    return [{"role": "user", "content": f"say {script}"}]


def test_openai_round_trip(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL_NAME, "tools": [WEATHER], "temperature": 0}
    first = client.chat.completions.create(messages=say("ponder-weather"), **asked).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.tool_calls is not None
    (call,) = first.message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS | {"city": "Rome"}
    answer = {"role": "tool", "tool_call_id": call.id, "content": "say sunny"}
    messages = [*say("ponder-weather"), first.message, answer]
    second = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert second.message.content == "It is sunny there."


def test_openai_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL_NAME, messages=say("both"), tools=[WEATHER], temperature=0, stream=True
    )
    calls: dict[int, list[str]] = {}
    reason = None
    for chunk in stream:
        (choice,) = chunk.choices
        for call in choice.delta.tool_calls or []:
            assert (call.id is None) == (call.index in calls)
            calls.setdefault(call.index, []).append(call.function.arguments or "" if call.function else "")
        reason = choice.finish_reason
    assert [json.loads("".join(pieces))["city"] for pieces in calls.values()] == ["Lima", "Oslo"]
    assert reason == "tool_calls"


def test_openai_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL_NAME, messages=say("ponder-weather"), tools=[WEATHER], temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert message.content == "One moment, please."
    assert message.tool_calls is not None and message.tool_calls[0].function.name == "get_weather"


@needs_grammars
def test_openai_parse(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0}
    schema = client.chat.completions.parse(messages=say("think-person"), response_format=Person, **asked)
    assert schema.choices[0].message.parsed == Person(name="Ida", age=35)
    tool = openai.pydantic_function_tool(Person)
    strict = client.chat.completions.parse(messages=say("make-person"), tools=[tool], **asked).choices[0].message
    assert strict.tool_calls is not None
    assert strict.tool_calls[0].function.parsed_arguments == Person(name="Eve", age=37)


def test_litellm(chat_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    pytest.importorskip("mcp", reason="litellm imports mcp for requests with tools")
    litellm = pytest.importorskip("litellm")
    target = {"api_base": f"{chat_server.url}/v1", "api_key": "none", "tools": [WEATHER], "temperature": 0}
    for provider in ("hosted_vllm", "openai"):
        asked = {"model": f"{provider}/{MODEL_NAME}"} | target
        message = litellm.completion(messages=say("ponder-weather"), **asked).choices[0].message
        (call,) = message.tool_calls
        assert message.reasoning_content == "I must look it up."
        assert json.loads(call.function.arguments)["city"] == "Rome"
        stream = litellm.completion(messages=say("weather"), stream=True, **asked)
        whole = litellm.stream_chunk_builder(list(stream)).choices[0]
        assert json.loads(whole.message.tool_calls[0].function.arguments) == ARGUMENTS
        answer = {"role": "tool", "tool_call_id": call.id, "content": "say sunny"}
        messages = [*say("ponder-weather"), message.model_dump(), answer]
        assert litellm.completion(messages=messages, **asked).choices[0].message.content == "It is sunny there."


@needs_grammars
def test_litellm_schema(chat_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    answer = litellm.completion(
        model=f"hosted_vllm/{MODEL_NAME}",
        api_base=f"{chat_server.url}/v1",
        api_key="none",
        messages=say("person"),
        response_format=Person,
    )
    assert Person.model_validate_json(answer.choices[0].message.content)


def _langchain(chat_server: ServerProcess) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=f"{chat_server.url}/v1", api_key="none", model=MODEL_NAME, temperature=0)


def test_langchain_tools(chat_server: ServerProcess) -> None:
    pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    model = _langchain(chat_server).bind_tools([WEATHER])
    question = HumanMessage("say weather")
    called = model.invoke([question])
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", ARGUMENTS)
    streamed = None
    for chunk in model.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None and streamed.tool_calls[0]["args"] == ARGUMENTS
    answer = ToolMessage("say sunny", tool_call_id=call["id"])
    assert model.invoke([question, called, answer]).content == "It is sunny there."


@needs_grammars
def test_langchain_structured_output(chat_server: ServerProcess) -> None:
    pytest.importorskip("langchain_openai")
    for method, script in (("json_schema", "person"), ("function_calling", "make-person")):
        model = _langchain(chat_server).with_structured_output(Person, method=method)
        found = model.invoke(f"say {script}")
        assert isinstance(found, Person) and found.age in (36, 37)
