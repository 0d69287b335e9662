"""The clients that people use, unchanged, against a live server."""

from __future__ import annotations

import os
from collections.abc import Iterator

import openai
import pytest
from server_process import MODEL_NAME, ServerProcess

QUESTION = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).owned_by == "allotrope"


def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL_NAME, messages=QUESTION, max_completion_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    assert answer.usage is not None and answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 6
    repeated = client.chat.completions.create(model=MODEL_NAME, messages=QUESTION, max_tokens=6, temperature=0)
    assert repeated.choices[0].message.content == choice.message.content


def test_openai_stream_with_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL_NAME, messages=QUESTION, max_tokens=6, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=QUESTION,
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 6
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_openai_completions_with_echo_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL_NAME, prompt="the cat", max_tokens=4, temperature=0, echo=True, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text.startswith("the cat")
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert answer.usage is not None and len(choice.logprobs.token_logprobs) == answer.usage.total_tokens
    assert choice.logprobs.token_logprobs[0] is None and all(value < 0 for value in choice.logprobs.token_logprobs[1:])

    # Scoring the whole text at once gives the same log-probabilities as generating its end did.
    ids = client.completions.create(
        model=MODEL_NAME, prompt="the cat", max_tokens=4, temperature=0, extra_body={"return_token_ids": True}
    ).choices[0]
    assert ids.model_extra is not None
    scored = client.completions.create(
        model=MODEL_NAME,
        prompt=ids.model_extra["prompt_token_ids"] + ids.model_extra["token_ids"],
        max_tokens=0,
        echo=True,
        logprobs=2,
    ).choices[0]
    assert scored.logprobs is not None and scored.logprobs.token_logprobs is not None
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)


def test_openai_batch_of_token_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL_NAME, prompt=[[5, 6], [7, 8]], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_openai_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=QUESTION)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL_NAME, messages=QUESTION, temperature=1000)
    assert bad.value.param == "temperature" and "temperature=1000" in bad.value.message
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model=MODEL_NAME, messages=QUESTION, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert tools.value.param == "tools"


def test_openai_without_the_key(keyed_server: ServerProcess) -> None:
    with (
        openai.OpenAI(base_url=f"{keyed_server.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_litellm(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    target = {"api_base": f"{server.url}/v1", "api_key": "none", "messages": QUESTION, "max_tokens": 5}
    for provider in ("hosted_vllm", "openai"):
        whole = litellm.completion(model=f"{provider}/{MODEL_NAME}", temperature=0, **target)
        stream = litellm.completion(model=f"{provider}/{MODEL_NAME}", temperature=0, stream=True, **target)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert whole.usage.completion_tokens == 5
        assert text == whole.choices[0].message.content != ""
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(model=f"hosted_vllm/{MODEL_NAME}", temperature=1000, **target)


def test_langchain(server: ServerProcess) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=MODEL_NAME, temperature=0, max_tokens=5, stream_usage=True
    )
    whole = model.invoke([("system", "one two"), ("human", "the cat")])
    chunks = list(model.stream([("system", "one two"), ("human", "the cat")]))
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] == 5
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    assert [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata] == [5]
