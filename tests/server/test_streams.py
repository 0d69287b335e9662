"""A stream is the whole answer in parts, on both routes and however the engine may portion its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from allotrope.request import FinishReason, Request, SamplingParams, SequenceOutput, TokenLogprobs
from allotrope.server.answers import CompletionAnswer
from allotrope.server.chat_answer import ChatAnswer
from allotrope.server.generation import Delta, Generation, GenerationFailed
from allotrope.server.logprobs import Report
from allotrope.server.message_formats import MessageFormats
from allotrope.server.message_stream import MessageStream, PlainParser
from allotrope.server.responses.answer import ResponsesAnswer
from allotrope.server.responses.protocol import ResponsesRequest
from allotrope.text.formats import by_name
from allotrope.text.tokenizer import Tokenizer, load_tokenizer

Json = dict[str, Any]
CHAT: Json = {"messages": [{"role": "user", "content": "the cat"}], "temperature": 0, "max_tokens": 12}
COMPLETION: Json = {"prompt": "the cat", "temperature": 0, "max_tokens": 12}


def read_events(response: httpx.Response) -> list[Json]:
    """The JSON of each event; checks the frame around them."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def join_chat(events: list[Json]) -> list[Json]:
    """The choices of a whole chat answer, folded from its chunks."""
    choices: dict[int, Json] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        index = choice["index"]
        if index not in choices:
            assert choice["delta"] == {"role": "assistant", "content": ""}
            choices[index] = {"content": "", "logprobs": [], "token_ids": []}
            continue
        joined = choices[index]
        assert "finish_reason" not in joined, "nothing may follow the last chunk of a choice"
        joined["content"] += choice["delta"].get("content", "")
        joined["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        joined["token_ids"] += choice.get("token_ids", [])
        if choice["finish_reason"] is not None:
            assert choice["delta"] == {}
            joined |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    return [choices[index] for index in sorted(choices)]


def assert_equal_answers(left: Any, right: Any) -> None:
    """Equal but for the last bits of log-probabilities, which depend on what else ran in the same step."""
    if isinstance(left, float) and isinstance(right, float):
        assert left == pytest.approx(right, abs=1e-4)
    elif isinstance(left, list) and isinstance(right, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal_answers(one, other)
    elif isinstance(left, dict) and isinstance(right, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal_answers(left[key], right[key])
    else:
        assert left == right


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3, "temperature": 3.0, "seed": 5},
        {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"n": 2, "temperature": 3.0, "seed": 1, "stop": ["e", "a", "t", "\n", "1"], "logprobs": True},
        {"logit_bias": {"1": 100}},
    ],
)
def test_a_chat_stream_accumulates_to_the_whole_answer(http: httpx.Client, more: Json) -> None:
    whole = http.post("/v1/chat/completions", json=CHAT | more).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = read_events(http.post("/v1/chat/completions", json=CHAT | more | options))

    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1 and events[0]["id"].startswith("chatcmpl-")
    *chunks, last = events
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    counted = {key: value for key, value in last["usage"].items() if key != "prompt_tokens_details"}
    assert counted == {key: whole["usage"][key] for key in counted}
    for joined, choice in zip(join_chat(chunks), whole["choices"], strict=True):
        assert joined["content"] == choice["message"]["content"]
        assert_equal_answers(joined["logprobs"], (choice["logprobs"] or {"content": []})["content"])
        assert joined["token_ids"] == choice.get("token_ids", [])
        assert (joined["finish_reason"], joined["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2, "temperature": 3.0, "seed": 5, "logprobs": 2},
        {"echo": True, "logprobs": 1, "return_token_ids": True},
        {"prompt": ["one", "two", "three"], "n": 2, "temperature": 3.0, "seed": 2, "echo": True},
        {"max_tokens": 0, "echo": True, "logprobs": 0},
    ],
)
def test_a_completion_stream_accumulates_to_the_whole_answer(http: httpx.Client, more: Json) -> None:
    whole = http.post("/v1/completions", json=COMPLETION | more).json()
    events = read_events(http.post("/v1/completions", json=COMPLETION | more | {"stream": True}))
    assert all("usage" not in event for event in events)
    for choice in whole["choices"]:
        parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            if choice["logprobs"] is not None:
                joined = [item for part in parts for item in part["logprobs"][key]]
                assert_equal_answers(joined, choice["logprobs"][key])
        if "token_ids" in choice:
            assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]


@pytest.mark.parametrize("more", [{}, {"return_tokens_as_token_ids": True}, {"stop": ["no such text"]}])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_point_into_the_text(http: httpx.Client, echo: bool, more: Json) -> None:
    """Neither a special token nor the bytes of one character count, whatever a token is written as."""
    prompt = "日本 cat é"
    body = COMPLETION | {"prompt": prompt, "echo": echo, "logprobs": 0, "max_tokens": 12, "temperature": 0, **more}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    offsets, text = choice["logprobs"]["text_offset"], choice["text"]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(text)
    written = http.post("/v1/completions", json=body | {"return_tokens_as_token_ids": False}).json()["choices"][0]
    checked = 0
    for token, offset in zip(written["logprobs"]["tokens"], offsets, strict=True):
        if token.isascii() and not token.startswith("<"):
            assert text[offset : offset + len(token)] == token, (token, offset, text)
            checked += 1
    assert checked >= (6 if echo else 1)


@pytest.mark.parametrize("more", [{}, {"skip_special_tokens": False}])
@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_count_special_tokens_that_the_echo_shows(http: httpx.Client, as_ids: bool, more: Json) -> None:
    prompt: Any = "<|im_start|>cat<|im_end|> dog"
    if as_ids:
        prompt = http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    body = COMPLETION | {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, **more}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    text, logprobs = choice["text"], choice["logprobs"]
    assert ("<|im_end|>" in text) == (not as_ids or bool(more))
    for token, offset in [*zip(logprobs["tokens"], logprobs["text_offset"], strict=True)][:-1]:
        assert token not in text or text[offset : offset + len(token)] == token, (token, offset)


def test_usage_in_every_chunk(http: httpx.Client) -> None:
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True, "include_usage": True}}
    events = read_events(http.post("/v1/chat/completions", json=CHAT | options))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] < 4 and counts[-1] == 12


def test_a_repeated_prompt_is_reported_as_cached(http: httpx.Client) -> None:
    body = {"prompt": list(range(4, 104)), "max_tokens": 1, "temperature": 0}
    first = http.post("/v1/completions", json=body).json()["usage"]
    second = http.post("/v1/completions", json=body).json()["usage"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert 80 <= second["prompt_tokens_details"]["cached_tokens"] < 100


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_model))


def _generate(
    tokenizer: Tokenizer, params: SamplingParams, portions: list[list[int]]
) -> tuple[Generation, Iterator[Delta]]:
    """A generation, and its deltas as they are asked for."""
    generation = Generation(Request(request_id="r", prompt_ids=(5,), params=params), tokenizer)

    def deltas() -> Iterator[Delta]:
        for place, portion in enumerate(portions):
            scores = tuple(TokenLogprobs(token, -1.0, 1, ((token, -1.0),)) for token in portion)
            reason: FinishReason | None = "length" if place == len(portions) - 1 else None
            yield from generation.take(SequenceOutput("r", 0, tuple(portion), reason, logprobs=scores))

    return generation, deltas()


@settings(deadline=None, max_examples=150)
@given(
    ids=st.lists(st.integers(0, 319), min_size=1, max_size=24),
    cuts=st.sets(st.integers(1, 23)),
    stop=st.sampled_from([(), ("a",), ("the", "at"), ("\ufffd",)]),
    include=st.booleans(),
)
def test_answers_do_not_depend_on_tokens_per_step(
    tokenizer: Tokenizer, ids: list[int], cuts: set[int], stop: tuple[str, ...], include: bool
) -> None:
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, logprobs=1, max_tokens=None)
    edges = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    portions = [ids[start:end] for start, end in pairwise(edges)]
    report = Report(logprobs=1, token_ids=True)
    answers = []
    for split in ([ids], portions, [[token] for token in ids]):
        generation, deltas = _generate(tokenizer, params, split)
        pieces = list(deltas)
        stream = MessageStream(generation, PlainParser)
        messages = [message for piece in pieces if (message := stream.take(piece)) is not None]
        chat = ChatAnswer("tiny", stream, tokenizer, report, MessageFormats()).whole(messages)
        completion = CompletionAnswer("tiny", [generation], tokenizer, report).whole(pieces)
        answers += [(body["object"], body["choices"], body["usage"]) for body in (chat, completion)]
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert answers[0:2] == answers[2:4] == answers[4:6]


CALLS = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
TEXTS = [
    f"<think>\nthe cat\n</think>\n\nthe dog {CALLS}\n{CALLS}",
    f"{CALLS} and more",
    "<think>no end",
    '<tool_call>{"name": "f", "arguments": {"a": [1,',
    "plain <|im_start|> text <tool_call>",
]


@settings(deadline=None, max_examples=100)
@given(
    text=st.sampled_from(TEXTS),
    cuts=st.sets(st.integers(1, 120)),
    stop=st.sampled_from([(), ("dog",), ("}}",), ("</think>",)]),
    single=st.booleans(),
)
@example(text=TEXTS[0], cuts=set(), stop=(), single=True)
def test_messages_do_not_depend_on_tokens_per_step(
    tokenizer: Tokenizer, text: str, cuts: set[int], stop: tuple[str, ...], single: bool
) -> None:
    params = SamplingParams(stop=stop, logprobs=1, max_tokens=None, skip_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    edges = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    formats = MessageFormats(by_name("hermes"), by_name("hermes"), special_tokens=frozenset({"<|im_start|>"}))
    parsers = formats.parsers(
        formats.tools, [], reasoning_is_open=False, calls_are_held=False, keeps_special_tokens=False
    )
    answers = []
    for split in ([ids], [ids[start:end] for start, end in pairwise(edges)], [[token] for token in ids]):
        generation, deltas = _generate(tokenizer, params, split)
        stream = MessageStream(generation, parsers, single_call=single)
        messages = [message for delta in deltas if (message := stream.take(delta)) is not None]
        answer = ChatAnswer("tiny", stream, tokenizer, Report(logprobs=1, token_ids=True), formats)
        (whole,) = answer.whole(messages)["choices"]
        for call in whole["message"].get("tool_calls", []):
            call["id"] = ""
        streamed = [choice["delta"] for one in messages for chunk in answer.chunks(one) for choice in chunk["choices"]]
        assert "".join(delta.get("content", "") for delta in streamed) == (whole["message"]["content"] or "")
        assert "".join(
            call["function"]["arguments"] for delta in streamed for call in delta.get("tool_calls", [])
        ) == "".join(call["function"]["arguments"] for call in whole["message"].get("tool_calls", []))
        body = ResponsesRequest(input="hi", top_logprobs=1)
        response = ResponsesAnswer("tiny", body, stream, tokenizer, lambda: "", lambda response, message: False)
        content = [item.get("content") for item in response.whole(messages)["output"]]
        answers.append((whole, stream.reasoning_tokens, generation.completion_tokens, content))
        assert [message.finish_reason for message in messages[:-1]] == [None] * (len(messages) - 1)
    assert answers[0] == answers[1] == answers[2]


def test_a_sequence_that_the_engine_drops_fails_the_request(tokenizer: Tokenizer) -> None:
    generation = Generation(Request(request_id="r", prompt_ids=(5,), params=SamplingParams(n=2)), tokenizer)
    generation.take(SequenceOutput("r", 0, (6,)))
    with pytest.raises(GenerationFailed, match="not numbers"):
        generation.take(SequenceOutput("r", 1, finish_reason="error", error="scores are not numbers"))
