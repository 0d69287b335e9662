"""Every request field is honoured, neutral or refused: the tables against the models, the SDK, and the live server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel

from allotrope.server import fields, protocol
from allotrope.server.rules import Honoured, Only, WithoutEffect

Json = dict[str, Any]
TABLES: list[tuple[type[BaseModel], fields.Fields]] = [
    (protocol.ChatRequest, fields.CHAT),
    (protocol.CompletionRequest, fields.COMPLETIONS),
    (protocol.TokenizeRequest, fields.TOKENIZE),
    (protocol.DetokenizeRequest, fields.DETOKENIZE),
]
INNER_TABLES: list[tuple[type[BaseModel], fields.Fields]] = [
    (protocol.Message, fields.MESSAGE),
    (protocol.TextPart, fields.PART),
    (protocol.ToolCall, fields.TOOL_CALL),
    (protocol.FunctionCall, fields.FUNCTION_CALL),
    (protocol.FunctionTool, fields.TOOL),
    (protocol.ChosenTool, fields.TOOL),
    (protocol.Function, fields.FUNCTION),
    (protocol.ChosenFunction, fields.CHOSEN_FUNCTION),
    (protocol.StreamOptions, fields.STREAM_OPTIONS),
]
BODIES: dict[str, tuple[str, Json]] = {
    "ChatRequest": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    "CompletionRequest": ("/v1/completions", {"prompt": "hi", "max_tokens": 1}),
    "TokenizeRequest": ("/tokenize", {"prompt": "hi"}),
    "DetokenizeRequest": ("/detokenize", {"tokens": [5]}),
}
JSON_VALUES: dict[str, Any] = {"string": "x", "object": {"a": "b"}, "boolean": True}


@pytest.mark.parametrize(("model", "table"), TABLES + INNER_TABLES)
def test_the_models_declare_exactly_what_is_honoured(model: type[BaseModel], table: fields.Fields) -> None:
    assert set(model.model_fields) == {name for name, rule in table.known.items() if isinstance(rule, Honoured)}


@pytest.mark.parametrize(
    ("table", "params"),
    [
        (fields.CHAT, chat_create_params.CompletionCreateParamsStreaming),
        (fields.COMPLETIONS, completion_create_params.CompletionCreateParamsStreaming),
    ],
)
def test_every_field_of_the_official_client_is_known(table: fields.Fields, params: Any) -> None:
    assert set(params.__required_keys__ | params.__optional_keys__) - set(table.known) == set()


def _limited() -> list[Any]:
    return [
        pytest.param(model.__name__, name, rule, id=f"{model.__name__}-{name}")
        for model, table in TABLES
        for name, rule in table.known.items()
        if not isinstance(rule, Honoured)
    ]


@pytest.mark.parametrize(("model", "name", "rule"), _limited())
def test_limited_fields(http: httpx.Client, model: str, name: str, rule: WithoutEffect | Only) -> None:
    path, body = BODIES[model]
    neutral = rule.values if isinstance(rule, Only) else (JSON_VALUES[rule.json_type],)
    for value in (*neutral, None):
        response = http.post(path, json=body | {name: value})
        assert response.status_code == 200, response.text
        assert "x-allotrope-ignored-fields" not in response.headers
    for value in ("something else", 7.5, {"b": 1}, True):
        taken = any(value is v or (type(value) is type(v) and value == v) for v in neutral)
        if taken or (isinstance(rule, WithoutEffect) and type(value) is type(neutral[0])):
            continue
        response = http.post(path, json=body | {name: value})
        assert response.status_code == 400, f"{name}={value!r}: {response.text}"
        error = response.json()["error"]
        assert error["param"] == name
        assert error["message"].startswith(f"{name}=")


class Probe:
    """Asks the server with one field after another; greedy and short unless told otherwise."""

    def __init__(self, http: httpx.Client, chat: bool) -> None:
        self.http = http
        self.chat = chat
        self.path = "/v1/chat/completions" if chat else "/v1/completions"
        prompt: Json = {"messages": [{"role": "user", "content": "the cat"}]} if chat else {"prompt": "the cat"}
        self.base: Json = prompt | {"temperature": 0, "max_tokens": 8, "return_token_ids": True}

    def body(self, **more: Any) -> Json:
        response = self.http.post(self.path, json=self.base | more)
        assert response.status_code == 200, response.text
        body: Json = response.json()
        return body

    def choice(self, **more: Any) -> Json:
        choice: Json = self.body(**more)["choices"][0]
        return choice

    def ids(self, **more: Any) -> list[int]:
        ids: list[int] = self.choice(**more)["token_ids"]
        return ids

    def text(self, **more: Any) -> str:
        choice = self.choice(**more)
        text: str = choice["message"]["content"] if self.chat else choice["text"]
        return text

    def refused(self, **more: Any) -> Json:
        response = self.http.post(self.path, json=self.base | more)
        assert response.status_code in (400, 404), response.text
        error: Json = response.json()["error"]
        return error


WILD: Json = {"temperature": 50.0, "seed": 3}


def _is_greedy_again(name: str, value: float) -> Callable[[Probe], None]:
    def check(probe: Probe) -> None:
        assert probe.ids(**WILD) != probe.ids()
        assert probe.ids(**(WILD | {name: value})) == probe.ids()

    return check


def _changes_greedy(name: str, value: float) -> Callable[[Probe], None]:
    def check(probe: Probe) -> None:
        plain = probe.ids(max_tokens=32)
        assert len(set(plain)) < 32, "the plain answer must repeat a token for this to show anything"
        assert probe.ids(max_tokens=32, **{name: value}) != plain

    return check


def _seed(probe: Probe) -> None:
    assert probe.ids(temperature=50.0, seed=1) == probe.ids(temperature=50.0, seed=1)
    assert probe.ids(temperature=50.0, seed=1) != probe.ids(temperature=50.0, seed=2)


def _stop(probe: Probe) -> None:
    text = probe.text(max_tokens=32)
    place = next(i for i in range(3, len(text)) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i)
    stop = text[place : place + 2]
    choice = probe.choice(max_tokens=32, stop=[stop, "never seen"])
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
    assert probe.text(max_tokens=32, stop=stop) == text[:place]
    assert probe.text(max_tokens=32, stop=stop, include_stop_str_in_output=True) == text[: place + 2]


def _stop_token_ids(probe: Probe) -> None:
    ids = probe.ids()
    place = next(i for i in range(2, 8) if ids.index(ids[i]) == i)
    choice = probe.choice(stop_token_ids=[ids[place]])
    assert choice["token_ids"] == ids[: place + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[place])


def _min_tokens(probe: Probe) -> None:
    ids = probe.ids()
    assert len(probe.ids(stop_token_ids=[ids[0]])) == 1
    assert len(probe.ids(stop_token_ids=[ids[0]], min_tokens=4)) > 4


def _ignore_eos(probe: Probe) -> None:
    end = {"logit_bias": {"1": 100}}
    choice = probe.choice(**end)
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([1], "stop", None)
    assert probe.ids(**end, ignore_eos=True) == [1] * 8


def _skip_special_tokens(probe: Probe) -> None:
    end = {"logit_bias": {"2": 100}}
    assert probe.text(**end) == ""
    assert probe.text(**end, skip_special_tokens=False) == "<|im_start|>" * 8


def _n(probe: Probe) -> None:
    choices = probe.body(n=3, temperature=50.0, seed=1)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3


def _logprobs(probe: Probe) -> None:
    if probe.chat:
        content = probe.choice(logprobs=True, top_logprobs=3)["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [3] * 8
        assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] < 0 for entry in content)
        assert probe.refused(top_logprobs=3)["param"] == "top_logprobs"
    else:
        logprobs = probe.choice(logprobs=3)["logprobs"]
        assert all(max(top.values()) == chosen < 0 for top, chosen in
                   zip(logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True))  # fmt: skip
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 8
    assert probe.choice()["logprobs"] is None


def _prompt_logprobs(probe: Probe) -> None:
    body = probe.body(prompt_logprobs=2)
    holder = body if probe.chat else body["choices"][0]
    entries = holder["prompt_logprobs"]
    assert entries[0] is None
    assert [str(token) in entry for token, entry in
            zip(holder["prompt_token_ids"][1:], entries[1:], strict=True)] == [True] * (len(entries) - 1)  # fmt: skip
    assert all(2 <= len(entry) <= 3 for entry in entries[1:])


def _model(probe: Probe) -> None:
    assert probe.body(model="tiny")["model"] == "tiny"
    assert probe.refused(model="other")["code"] == "model_not_found"


def _stream(probe: Probe) -> None:
    response = probe.http.post(
        probe.path, json=probe.base | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("data: [DONE]\n\n")
    assert '"completion_tokens":8' in response.text
    assert probe.refused(stream_options={"include_usage": True})["param"] == "stream_options"


def _truncate(probe: Probe) -> None:
    assert probe.body(truncate_prompt_tokens=2)["usage"]["prompt_tokens"] == 2
    assert probe.body(truncate_prompt_tokens=-1)["usage"] == probe.body()["usage"]
    assert probe.refused(truncate_prompt_tokens=0)["param"] == "truncate_prompt_tokens"


def _return_token_ids(probe: Probe) -> None:
    body = probe.body()
    holder = body if probe.chat else body["choices"][0]
    assert len(holder["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert "token_ids" not in probe.choice(return_token_ids=False)


def _tokens_as_ids(probe: Probe) -> None:
    choice = probe.choice(logprobs=probe.chat or 0, return_tokens_as_token_ids=True)
    named = [f"token_id:{token}" for token in choice["token_ids"]]
    logprobs = choice["logprobs"]
    assert ([entry["token"] for entry in logprobs["content"]] if probe.chat else logprobs["tokens"]) == named


def _max_completion_tokens(probe: Probe) -> None:
    assert len(probe.ids(max_tokens=None, max_completion_tokens=3)) == 3
    assert probe.refused(max_completion_tokens=3)["param"] == "max_completion_tokens"
    assert probe.refused(max_tokens=None, max_completion_tokens=9999)["param"] == "max_completion_tokens"


def _generation_prompt(probe: Probe) -> None:
    unclosed = probe.body()["prompt_token_ids"]
    closed = probe.body(add_generation_prompt=False)["prompt_token_ids"]
    assert unclosed[: len(closed)] == closed and len(closed) < len(unclosed)


def _continue(probe: Probe) -> None:
    closed = probe.body(add_generation_prompt=False)["prompt_token_ids"]
    left_open = probe.body(continue_final_message=True)["prompt_token_ids"]
    assert closed[: len(left_open)] == left_open and len(left_open) < len(closed)
    both = probe.refused(continue_final_message=True, add_generation_prompt=True)
    assert both["param"] == "continue_final_message"


def _template_kwargs(probe: Probe) -> None:
    louder = probe.body(chat_template_kwargs={"shout": "aaa"})
    assert louder["usage"]["prompt_tokens"] > probe.body()["usage"]["prompt_tokens"]
    assert probe.refused(chat_template_kwargs={"messages": []})["param"] == "chat_template_kwargs"


def _messages(probe: Probe) -> None:
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]
    joined = probe.body(messages=[{"role": "user", "content": "the\ncat"}])
    assert probe.body(messages=[{"role": "user", "content": parts}])["prompt_token_ids"] == joined["prompt_token_ids"]


def _prompt(probe: Probe) -> None:
    choices = probe.body(prompt=[[5, 6], [7]], n=2)["choices"]
    assert [(choice["index"], choice["prompt_token_ids"]) for choice in choices] == [
        (0, [5, 6]), (1, [5, 6]), (2, [7]), (3, [7])]  # fmt: skip
    assert probe.ids(prompt=[[5, 6]]) == probe.ids(prompt=[5, 6]) == choices[0]["token_ids"]
    assert [choice["text"] for choice in probe.body(prompt=["one", "two"])["choices"]] == [
        probe.text(prompt="one"), probe.text(prompt="two")]  # fmt: skip


def _echo(probe: Probe) -> None:
    assert probe.text(echo=True) == "the cat" + probe.text()
    scored = probe.choice(echo=True, logprobs=1, max_tokens=0)
    assert (scored["text"], scored["finish_reason"], scored["token_ids"]) == ("the cat", "length", [])
    assert scored["logprobs"]["token_logprobs"][0] is None
    assert len(scored["logprobs"]["tokens"]) == len(scored["prompt_token_ids"])


def _max_tokens(probe: Probe) -> None:
    assert len(probe.ids(max_tokens=3)) == len(probe.ids(max_tokens=3.0)) == 3


def _best_of(probe: Probe) -> None:
    assert len(probe.body(n=2, best_of=2)["choices"]) == 2
    assert probe.refused(n=1, best_of=2)["param"] == "best_of"


def _special_tokens(probe: Probe) -> None:
    with_bos = probe.choice()["prompt_token_ids"]
    assert probe.choice(add_special_tokens=False)["prompt_token_ids"] == with_bos[1:]


FUNCTION: Json = {"type": "function", "function": {"name": "f"}}


def _tools(probe: Probe) -> None:
    # What tools do, where the model has a format for them, is in test_tools.
    assert probe.ids(tools=[]) == probe.ids(tools=[FUNCTION], tool_choice="none") == probe.ids()
    assert probe.refused(tools=[FUNCTION])["param"] == "tools"
    assert "--tool-call-parser" in probe.refused(tools=[FUNCTION])["message"]
    assert probe.refused(tool_choice="required")["param"] == "tool_choice"
    named = {"type": "function", "function": {"name": "g"}}
    assert probe.refused(tools=[FUNCTION], tool_choice=named)["param"] == "tool_choice"
    assert probe.ids(parallel_tool_calls=False) == probe.ids()


def _reasoning(probe: Probe) -> None:
    # The template reads no variable by which reasoning is turned on, and there is none to turn off.
    assert probe.ids(reasoning_effort="none") == probe.ids(include_reasoning=False) == probe.ids()
    assert probe.refused(reasoning_effort="high")["param"] == "reasoning_effort"


def _follows(name: str, asks: Any) -> Callable[[Probe], None]:
    return lambda probe: _equal(probe.text(**{name: asks}), "abc")


SHARED: dict[str, Callable[[Probe], None]] = {
    "temperature": _is_greedy_again("temperature", 0),
    "top_p": _is_greedy_again("top_p", 1e-6),
    "top_k": _is_greedy_again("top_k", 1),
    "min_p": _is_greedy_again("min_p", 1.0),
    "presence_penalty": _changes_greedy("presence_penalty", 2.0),
    "frequency_penalty": _changes_greedy("frequency_penalty", 2.0),
    "repetition_penalty": _changes_greedy("repetition_penalty", 50.0),
    "seed": _seed,
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "include_stop_str_in_output": _stop,
    "min_tokens": _min_tokens,
    "max_tokens": _max_tokens,
    "ignore_eos": _ignore_eos,
    "logit_bias": lambda probe: _equal(probe.ids(logit_bias={"9": 100}), [9] * 8),
    "allowed_token_ids": lambda probe: _equal(set(probe.ids(allowed_token_ids=[9, 10])) <= {9, 10}, True),
    "n": _n,
    "logprobs": _logprobs,
    "prompt_logprobs": _prompt_logprobs,
    "skip_special_tokens": _skip_special_tokens,
    "model": _model,
    "stream": _stream,
    "stream_options": _stream,
    "truncate_prompt_tokens": _truncate,
    "return_token_ids": _return_token_ids,
    "return_tokens_as_token_ids": _tokens_as_ids,
    "response_format": _follows(
        "response_format", {"type": "structural_tag", "format": {"type": "const_string", "value": "abc"}}
    ),
    "structured_outputs": _follows("structured_outputs", {"choice": ["abc"]}),
    "guided_json": lambda probe: _equal(probe.text(guided_json={"const": 12}), "12"),
    "guided_regex": _follows("guided_regex", "abc"),
    "guided_choice": _follows("guided_choice", ["abc"]),
    "guided_grammar": _follows("guided_grammar", 'start: "abc"'),
}
CHAT_ONLY = {
    "messages": _messages,
    "max_completion_tokens": _max_completion_tokens,
    "top_logprobs": _logprobs,
    "add_generation_prompt": _generation_prompt,
    "continue_final_message": _continue,
    "chat_template_kwargs": _template_kwargs,
    "tools": _tools,
    "tool_choice": _tools,
    "parallel_tool_calls": _tools,
    "reasoning_effort": _reasoning,
    "include_reasoning": _reasoning,
}
COMPLETIONS_ONLY = {
    "prompt": _prompt,
    "echo": _echo,
    "best_of": _best_of,
    "add_special_tokens": _special_tokens,
}


def _equal(left: Any, right: Any) -> None:
    assert left == right


def test_every_honoured_field_has_its_check() -> None:
    assert set(SHARED | CHAT_ONLY) == set(protocol.ChatRequest.model_fields)
    assert set(SHARED | COMPLETIONS_ONLY) == set(protocol.CompletionRequest.model_fields)


@pytest.mark.parametrize("name", SHARED | CHAT_ONLY)
def test_chat_honours(http: httpx.Client, name: str) -> None:
    (SHARED | CHAT_ONLY)[name](Probe(http, chat=True))


@pytest.mark.parametrize("name", SHARED | COMPLETIONS_ONLY)
def test_completions_honour(http: httpx.Client, name: str) -> None:
    (SHARED | COMPLETIONS_ONLY)[name](Probe(http, chat=False))
