"""The official client of the Messages API, unchanged, against a live server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from scripted_model import AFTER, ARGUMENTS, PERSON, PLAIN, PONDERED, REASONING
from server_process import API_KEY, MODEL_NAME, ServerProcess

anthropic = pytest.importorskip("anthropic")

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SHARED: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 50}


@pytest.fixture(scope="module")
def client(scripted_server: ServerProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=scripted_server.url, api_key="none", max_retries=0) as made:
        yield made


def test_create(client: Any) -> None:
    message = client.messages.create(**SHARED, messages=ASKED, system="Be short.")
    assert [block.text for block in message.content] == ["".join(PLAIN)]
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", len(PLAIN) + 1)
    counted = client.messages.count_tokens(model=MODEL_NAME, messages=ASKED, system="Be short.")
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_stream(client: Any) -> None:
    with client.messages.stream(**SHARED, messages=[{"role": "user", "content": "think"}]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == PONDERED
    thinking, said = final.content
    assert (thinking.type, thinking.thinking) == ("thinking", "".join(REASONING))
    assert (said.type, said.text, final.stop_reason) == ("text", PONDERED, "end_turn")


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_round_trip(client: Any, streamed: bool) -> None:
    if streamed:
        with client.messages.stream(**SHARED, messages=ASKED, tools=[TOOL]) as stream:
            first = stream.get_final_message()
    else:
        first = client.messages.create(**SHARED, messages=ASKED, tools=[TOOL])
    (call,) = first.content
    assert (first.stop_reason, call.name, call.input) == ("tool_use", "get_weather", ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    said = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**SHARED, messages=said, tools=[TOOL])
    assert [block.text for block in second.content] == ["".join(AFTER)]


def test_tool_runner(client: Any) -> None:
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Name of the city.
        """
        asked.append(city)
        return "sunny"

    runner = client.beta.messages.tool_runner(**SHARED, messages=ASKED, tools=[get_weather])
    final = runner.until_done()
    assert asked == ["Paris"]
    assert [block.text for block in final.content] == ["".join(AFTER)]


class Person(BaseModel):
    name: str
    age: int


def test_parse(client: Any) -> None:
    said = [{"role": "user", "content": "json"}]
    message = client.messages.parse(**SHARED, messages=said, output_format=Person)
    assert message.parsed_output == Person(**PERSON)


def test_typed_errors(client: Any, keyed_server: ServerProcess) -> None:
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        client.messages.create(**SHARED, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=1, messages=ASKED)
    with (
        anthropic.Anthropic(base_url=keyed_server.url, api_key="wrong", max_retries=0) as refused,
        pytest.raises(anthropic.AuthenticationError),
    ):
        refused.messages.create(**SHARED, messages=ASKED)
    with anthropic.Anthropic(base_url=keyed_server.url, api_key=API_KEY, max_retries=0) as friend:
        assert friend.messages.create(**(SHARED | {"max_tokens": 1}), messages=ASKED).stop_reason == "max_tokens"
