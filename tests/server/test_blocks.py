"""Events of an answer become blocks, and blocks become items and content, also where an answer breaks off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from allotrope.request import Request, SamplingParams
from allotrope.server.blocks import Blocks
from allotrope.server.errors import HttpError
from allotrope.server.generation import Generation
from allotrope.server.message_stream import MessageDelta, MessageStream, PlainParser
from allotrope.server.messages.answer import MessagesAnswer
from allotrope.server.responses.answer import ResponsesAnswer
from allotrope.server.responses.protocol import ResponsesRequest
from allotrope.text.formats import ContentDelta, MessageEvent, ReasoningDelta, ToolArgumentsDelta, ToolCallBegin
from allotrope.text.tokenizer import Tokenizer, load_tokenizer

Json = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_model))


def new_stream(tokenizer: Tokenizer) -> MessageStream:
    request = Request(request_id="1", prompt_ids=(1, 2, 3), params=SamplingParams())
    return MessageStream(Generation(request, tokenizer), PlainParser)


def numbered() -> Callable[[], str]:
    """Makes ids call_0, call_1, ..."""
    numbers = iter(range(1000))
    return lambda: f"call_{next(numbers)}"


@st.composite
def answers(draw: st.DrawFn) -> list[MessageEvent]:
    """Events in an order that a parser gives."""
    events: list[MessageEvent] = []
    calls = 0
    texts = st.text("ab ", max_size=3)
    for kind in draw(st.lists(st.sampled_from(["reasoning", "text", "tool"]), max_size=8)):
        if kind == "tool":
            events.append(
                ToolCallBegin(calls, draw(st.sampled_from(["f", "g"])), draw(st.sampled_from([None, "mine"])))
            )
            events += [ToolArgumentsDelta(calls, text) for text in draw(st.lists(texts, max_size=3))]
            calls += 1
        else:
            made = ReasoningDelta if kind == "reasoning" else ContentDelta
            events += [made(text) for text in draw(st.lists(texts, max_size=3))]
    return events


@given(answers())
def test_blocks_hold_what_the_events_say(events: list[MessageEvent]) -> None:
    blocks = Blocks(numbered())
    changes = [change for event in events for change in blocks.take(event)] + list(blocks.end())
    for kind, made in (("reasoning", ReasoningDelta), ("text", ContentDelta), ("tool", ToolArgumentsDelta)):
        said = "".join(event.text for event in events if isinstance(event, made))
        assert "".join(block.text for block in blocks.blocks if block.kind == kind) == said
    # Each block begins, grows and ends before the next one begins.
    order = [(change.block.index, change.what) for change in changes]
    assert order == sorted(order, key=lambda pair: (pair[0], ("begin", "more", "end").index(pair[1])))
    for block in blocks.blocks:
        own = [change for change in changes if change.block is block]
        assert [change.what for change in own if change.what != "more"] == ["begin", "end"]
        assert "".join(change.text for change in own) == block.text
        assert block.text or block.kind == "tool"


@given(answers(), st.sampled_from(["stop", "length"]))
def test_streams_and_whole_answers_say_the_same(tokenizer: Tokenizer, events: list[MessageEvent], reason: Any) -> None:
    deltas = [MessageDelta(0, (event,), (), ends=(0,)) for event in events] + [MessageDelta(0, (), (), reason)]
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

    def responses() -> ResponsesAnswer:
        body = ResponsesRequest(input="hi")
        return ResponsesAnswer("m", body, new_stream(tokenizer), tokenizer, numbered(), lambda response, message: True)

    streamed = responses()
    sent = [*streamed.opening(), *(one for delta in deltas for one in streamed.chunks(delta)), *streamed.closing()]
    for number, event in enumerate(sent):
        assert adapter.validate_python(event).type == event["type"]
        assert event["sequence_number"] == number
    last, whole = sent[-1]["response"], responses().whole(deltas)
    assert [_named(item) for item in last["output"]] == [_named(item) for item in whole["output"]]
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in done] == [item["id"] for item in last["output"]]
    assert (last["status"] == "completed") == (reason == "stop") == (sent[-1]["type"] == "response.completed")

    message = MessagesAnswer("m", new_stream(tokenizer), numbered())
    blocks: list[Json] = []
    for delta in deltas:
        for event in message.chunks(delta):
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
    content = MessagesAnswer("m", new_stream(tokenizer), numbered()).whole(deltas)["content"]
    assert [(block["type"], block.get("id")) for block in blocks] == [(b["type"], b.get("id")) for b in content]


def _named(item: Json) -> Json:
    return {name: value for name, value in item.items() if name != "id"}


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "7", '{"a": 1'])
def test_arguments_that_are_no_object_are_not_lost(tokenizer: Tokenizer, arguments: str) -> None:
    events = (ToolCallBegin(0, "f"), ToolArgumentsDelta(0, arguments))
    whole = MessagesAnswer("m", new_stream(tokenizer), numbered()).whole([MessageDelta(0, events, (), "stop")])
    expected = {"INVALID_JSON": arguments} if arguments else {}
    assert whole["content"] == [{"type": "tool_use", "id": "call_0", "name": "f", "input": expected}]


def test_arguments_with_half_a_character_can_be_sent(tokenizer: Tokenizer) -> None:
    events = (ToolCallBegin(0, "f"), ToolArgumentsDelta(0, r'{"a": "x\ud83d", "b": "\ud83d\ude00"}'))
    whole = MessagesAnswer("m", new_stream(tokenizer), numbered()).whole([MessageDelta(0, events, (), "stop")])
    assert json.loads(msgspec.json.encode(whole))["content"][0]["input"] == {"a": "x?", "b": "\U0001f600"}


def test_a_stream_that_breaks_off(tokenizer: Tokenizer) -> None:
    kept: list[Json] = []

    def keep(response: Json, message: Json) -> bool:
        kept.append(response)
        return True

    body = ResponsesRequest(input="hi")
    answer = ResponsesAnswer("m", body, new_stream(tokenizer), tokenizer, numbered(), keep)
    answer.opening()
    answer.chunks(MessageDelta(0, (ContentDelta("so far"),), (), ends=(0,)))
    (failed,) = answer.failure(HttpError(500, "the engine has ended"))
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine has ended"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "so far"
    assert kept == []
    (error,) = MessagesAnswer("m", new_stream(tokenizer), numbered()).failure(HttpError(503, "gone"))
    assert error == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}
