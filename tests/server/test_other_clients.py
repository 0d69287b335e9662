"""Clients with an environment of their own (`make test-clients`): each calls a tool and asks for a schema."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel
from scripted_chat import ARGUMENTS
from server_process import MODEL_NAME, ServerProcess

pytest.importorskip("llguidance", reason="grammars need llguidance")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def test_instructor(chat_server: ServerProcess) -> None:
    instructor = pytest.importorskip("instructor", reason="make test-clients installs instructor")
    plain = openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0)
    for mode, script, age in (("TOOLS", "make-person", 37), ("TOOLS_STRICT", "make-person", 37),
                              ("JSON_SCHEMA", "person", 36)):  # fmt: skip
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        messages = [{"role": "user", "content": f"say {script}"}]
        found = client.chat.completions.create(
            model=MODEL_NAME, messages=messages, response_model=Person, temperature=0, max_retries=0
        )
        assert isinstance(found, Person) and found.age == age


def _model(chat_server: ServerProcess) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{chat_server.url}/v1", api_key="none")
    return OpenAIChatModel(MODEL_NAME, provider=provider)


def test_pydantic_ai_tools(chat_server: ServerProcess) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="make test-clients installs pydantic-ai")
    agent = pydantic_ai.Agent(_model(chat_server), instructions="Be short.")
    asked = []

    @agent.tool_plain
    def get_weather(city: str, days: int) -> str:
        """The weather of a city."""
        asked.append({"city": city, "days": days})
        return "say sunny"

    settings = {"temperature": 0.0}
    assert agent.run_sync("say weather", model_settings=settings).output == "It is sunny there."
    with agent.run_stream_sync("say weather", model_settings=settings) as streamed:
        assert streamed.get_output() == "It is sunny there."
    assert asked == [ARGUMENTS, ARGUMENTS]


def test_pydantic_ai_schema(chat_server: ServerProcess) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="make test-clients installs pydantic-ai")
    settings = {"temperature": 0.0}
    by_tool = pydantic_ai.Agent(_model(chat_server), output_type=Person)
    assert by_tool.run_sync("say final-result", model_settings=settings).output == Person(name="Kim", age=38)
    by_schema = pydantic_ai.Agent(_model(chat_server), output_type=pydantic_ai.NativeOutput(Person))
    assert by_schema.run_sync("say person", model_settings=settings).output == Person(name="Ada", age=36)
