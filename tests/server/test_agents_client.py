"""OpenAI's agents, unchanged, against a live server: by the Responses API and by chat completions."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from scripted_model import AFTER, PERSON, PLAIN, PONDERED
from server_process import MODEL_NAME, ServerProcess

agents = pytest.importorskip("agents")
API = ("responses", "chat")


def model(server: ServerProcess, api: str) -> Any:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    return kind(model=MODEL_NAME, openai_client=client)


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize("api", API)
def test_an_agent_answers(scripted_server: ServerProcess, api: str) -> None:
    agent = agents.Agent(name="one", instructions="Be short.", model=model(scripted_server, api))
    result = asyncio.run(agents.Runner.run(agent, "hi"))
    assert result.final_output == "".join(PLAIN)


@pytest.mark.parametrize("api", API)
def test_an_agent_calls_its_tool(scripted_server: ServerProcess, api: str) -> None:
    asked = []

    @agents.function_tool(strict_mode=False)
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    agent = agents.Agent(name="one", tools=[get_weather], model=model(scripted_server, api))

    async def run() -> Any:
        result = agents.Runner.run_streamed(agent, "How is the weather?")
        async for _ in result.stream_events():
            pass
        return result, await agents.Runner.run(agent, "How is the weather?")

    streamed, whole = asyncio.run(run())
    assert asked == ["Paris", "Paris"]
    assert streamed.final_output == whole.final_output == "".join(AFTER)


@pytest.mark.parametrize("api", API)
def test_an_agent_holds_to_a_schema(scripted_server: ServerProcess, api: str) -> None:
    agent = agents.Agent(name="one", output_type=Person, model=model(scripted_server, api))
    result = asyncio.run(agents.Runner.run(agent, "json please"))
    assert result.final_output == Person(**PERSON)


def test_a_conversation_goes_on(scripted_server: ServerProcess) -> None:
    agent = agents.Agent(name="one", model=model(scripted_server, "responses"))

    async def run() -> tuple[Any, ...]:
        first = await agents.Runner.run(agent, "please think")
        second = await agents.Runner.run(agent, "hi", previous_response_id=first.last_response_id)
        # The items of an answer, reasoning among them, may also be sent back.
        again = await agents.Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "hi"}])
        return first.final_output, second.final_output, again.final_output

    assert asyncio.run(run()) == (PONDERED, "".join(PLAIN), "".join(PLAIN))
