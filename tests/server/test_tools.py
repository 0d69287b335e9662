"""Tools and reasoning over HTTP: a model whose text is known, whole and streamed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted_chat import ARGUMENTS, SCRIPTS, WEATHER
from server_process import ServerProcess, wait_until_idle
from test_streams import read_events

Json = dict[str, Any]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def http(chat_server: ServerProcess) -> Iterator[httpx.Client]:
    with chat_server.http() as client:
        yield client


def body(script: str, **more: Any) -> Json:
    return {"messages": [{"role": "user", "content": f"say {script}"}], "temperature": 0} | more


def ask(http: httpx.Client, script: str, **more: Any) -> Json:
    """The only choice of a whole answer, after a check that the stream joins to the same."""
    request = body(script, **more)
    answer = http.post(CHAT, json=request)
    assert answer.status_code == 200, answer.text
    events = read_events(http.post(CHAT, json=request | {"stream": True, "stream_options": {"include_usage": True}}))
    choices = answer.json()["choices"]
    for choice in choices:
        joined = join(events, choice["index"])
        assert joined == {
            "content": choice["message"]["content"] or "",
            "reasoning_content": choice["message"].get("reasoning_content", ""),
            "calls": [call["function"] for call in choice["message"].get("tool_calls", [])],
            "finish_reason": choice["finish_reason"],
        }
    details = answer.json()["usage"]["completion_tokens_details"]
    assert events[-1]["usage"]["completion_tokens_details"] == details
    return choices[0] | {"reasoning_tokens": details["reasoning_tokens"]}


def join(events: list[Json], index: int) -> Json:
    """The message of a stream, as clients put it together."""
    joined: Json = {"content": "", "reasoning_content": "", "calls": [], "finish_reason": None}
    for choice in (choice for event in events for choice in event["choices"] if choice["index"] == index):
        assert joined["finish_reason"] is None, "nothing may follow the last chunk of a choice"
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        joined["content"] += delta.get("content") or ""
        joined["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(joined["calls"]):
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                joined["calls"].append({"name": call["function"]["name"], "arguments": ""})
            joined["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        joined["finish_reason"] = choice["finish_reason"]
    return joined


def calls_of(choice: Json) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"].get("tool_calls", [])
    ]


def test_the_log_says_which_formats_are_read(chat_server: ServerProcess) -> None:
    line = chat_server.wait_for_line("formats of messages")[0]
    assert line
    assert any("hermes" in entry and "think" in entry for entry in chat_server.log if "formats of messages" in entry)


def test_a_call(http: httpx.Client) -> None:
    choice = ask(http, "weather", tools=[WEATHER])
    assert calls_of(choice) == [("get_weather", ARGUMENTS)]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["tool_calls"][0]["id"].startswith("call_")
    assert choice["reasoning_tokens"] == 0


def test_reasoning_content_and_a_call(http: httpx.Client) -> None:
    choice = ask(http, "ponder-weather", tools=[WEATHER])
    assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == "I must look it up."
    assert choice["message"]["content"] == "One moment, please."
    assert calls_of(choice) == [("get_weather", {"city": "Rome", "days": 2})]
    assert 0 < choice["reasoning_tokens"] < 20


def test_reasoning_alone(http: httpx.Client) -> None:
    choice = ask(http, "ponder")
    assert choice["message"]["reasoning_content"] == "They greet me. I greet them."
    assert choice["message"]["content"] == "Good evening!"
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    hidden = ask(http, "ponder", include_reasoning=False)
    assert "reasoning_content" not in hidden["message"] and hidden["message"]["content"] == "Good evening!"
    assert hidden["reasoning_tokens"] == choice["reasoning_tokens"] > 0


def test_text_without_tools_stays_text(http: httpx.Client) -> None:
    assert ask(http, "weather")["message"]["content"] == SCRIPTS["weather"]
    assert ask(http, "weather", tools=[WEATHER], tool_choice="none")["message"]["content"] == SCRIPTS["weather"]


def test_text_that_looks_like_a_special_token_stays(http: httpx.Client) -> None:
    for tools in ([], [WEATHER]):
        assert ask(http, "struck", tools=tools)["message"]["content"] == SCRIPTS["struck"]


def test_two_calls_and_one(http: httpx.Client) -> None:
    both = [("get_weather", {"city": city, "days": 2}) for city in ("Lima", "Oslo")]
    assert calls_of(ask(http, "both", tools=[WEATHER])) == both
    one = ask(http, "both", tools=[WEATHER], parallel_tool_calls=False)
    assert calls_of(one) == both[:1] and one["finish_reason"] == "tool_calls"
    wait_until_idle(http)


@pytest.mark.parametrize("script", ["nonsense", "broken"])
def test_what_is_no_call_is_not_lost(http: httpx.Client, script: str) -> None:
    choice = ask(http, script, tools=[WEATHER])
    calls = choice["message"].get("tool_calls", [])
    told = (choice["message"]["content"] or "") + "".join(call["function"]["arguments"] for call in calls)
    for word in {"nonsense": ("no JSON at all", "indeed"), "broken": ("city", "and so on")}[script]:
        assert word in told


def test_a_tool_that_was_not_offered_comes_through(http: httpx.Client) -> None:
    assert calls_of(ask(http, "unknown", tools=[WEATHER])) == [("no_such_tool", {})]


def test_a_round_trip(http: httpx.Client) -> None:
    first = ask(http, "weather", tools=[WEATHER])
    call = first["message"]["tool_calls"][0]
    answered = [
        {"role": "developer", "content": "be brief"},
        *body("weather")["messages"],
        first["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "warm, so say sunny"}]},
    ]
    second = http.post(CHAT, json={"messages": answered, "tools": [WEATHER], "temperature": 0}).json()["choices"][0]
    assert second["message"]["content"] == "It is sunny there." and second["finish_reason"] == "stop"
    tokens = http.post("/tokenize", json={"messages": answered, "tools": [WEATHER], "return_token_strs": True}).json()
    prompt = "".join(tokens["token_strs"])
    assert '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}' in prompt
    assert "<tools>" in prompt and "<|im_start|>system\nbe brief" in prompt


def test_reasoning_goes_back_by_both_names(http: httpx.Client) -> None:
    for name in ("reasoning_content", "reasoning"):
        messages = [*body("x")["messages"], {"role": "assistant", "content": "a", name: "why"}, *body("y")["messages"]]
        tokens = http.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
        assert "<think>why</think>a" in "".join(tokens["token_strs"])


def test_reasoning_effort(http: httpx.Client) -> None:
    def prompt(**more: Any) -> str:
        request = {"messages": body("plain")["messages"], "return_token_strs": True} | more
        return "".join(http.post("/tokenize", json=request).json()["token_strs"])

    assert "</think>" in prompt(reasoning_effort="none")
    assert "</think>" not in prompt(reasoning_effort="high")
    assert "</think>" in prompt(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})


def test_n_logprobs_and_stop_strings(http: httpx.Client) -> None:
    answer = http.post(CHAT, json=body("ponder-weather", tools=[WEATHER], n=3, logprobs=True, return_token_ids=True))
    for choice in answer.json()["choices"]:
        assert calls_of(choice) == [("get_weather", {"city": "Rome", "days": 2})]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    stopped = ask(http, "ponder-weather", tools=[WEATHER], stop=["moment"])
    assert (stopped["message"]["content"], stopped["stop_reason"]) == ("One ", "moment")
    assert stopped["finish_reason"] == "stop" and "tool_calls" not in stopped["message"]


def test_a_call_that_is_cut_short(http: httpx.Client) -> None:
    choice = ask(http, "weather", tools=[WEATHER], max_tokens=14)
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments and '{"city": "Paris", "days": 2}'.startswith(arguments)


FUNCTION = WEATHER["function"]
DEEP: Json = {"type": "object"}
for _ in range(90):
    DEEP = {"type": "object", "properties": {"x": DEEP}}
CALLED = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
BAD: dict[str, tuple[Json, str]] = {
    "10,000 tools": ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)]}, "tools"),
    "a name twice": ({"tools": [WEATHER, WEATHER]}, "tools"),
    "a name with spaces": ({"tools": [{"type": "function", "function": {"name": "get weather"}}]}, "tools"),
    "no schema of an object": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools",
    ),
    "a type that there is not": (
        {
            "tools": [
                {"type": "function", "function": FUNCTION | {"parameters": {"properties": {"x": {"type": "any"}}}}}
            ]
        },
        "tools",
    ),
    "properties that are a list": (
        {"tools": [{"type": "function", "function": FUNCTION | {"parameters": {"properties": ["x"]}}}]},
        "tools",
    ),
    "required of a wrong type": (
        {"tools": [{"type": "function", "function": FUNCTION | {"parameters": {"required": True}}}]},
        "tools",
    ),
    "deep parameters": ({"tools": [{"type": "function", "function": FUNCTION | {"parameters": DEEP}}]}, "tools"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
    "another tool's name": (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    "an answer without a call": (
        {"messages": [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "a", "content": "x"}]},
        "messages[1].tool_call_id",
    ),
    "an answer to another call": (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "b", "content": "x"},
            ]
        },
        "messages[1].tool_call_id",
    ),
    "an answer without an id": (
        {"messages": [{"role": "assistant", "tool_calls": [CALLED]}, {"role": "tool", "content": "x"}]},
        "messages[1].tool_call_id",
    ),
    "a user's call": (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [CALLED]}]},
        "messages[0].tool_calls",
    ),
    "no content": ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    "two reasonings": (
        {"messages": [{"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}]},
        "messages[0].reasoning",
    ),
}


@pytest.mark.parametrize(("more", "param"), BAD.values(), ids=BAD)
def test_bad_tools_are_refused_soon(http: httpx.Client, more: Json, param: str) -> None:
    started = time.monotonic()
    answer = http.post(CHAT, json=body("plain") | more)
    assert time.monotonic() - started < 5
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and len(error["message"]) < 1000
    assert ask(http, "plain")["message"]["content"] == SCRIPTS["plain"]


def test_arguments_that_are_no_json_go_back_as_they_are(http: httpx.Client) -> None:
    for arguments in ("", "{", '["a"]', "[" * 5000):
        call = CALLED | {"function": {"name": "get_weather", "arguments": arguments}}
        answered = {"role": "tool", "tool_call_id": "a", "content": "say sunny"}
        messages = [*body("x")["messages"], {"role": "assistant", "tool_calls": [call]}, answered]
        answer = http.post(CHAT, json={"messages": messages, "tools": [WEATHER], "temperature": 0})
        assert answer.status_code in (200, 400), answer.text
        if arguments != "[" * 5000:
            assert answer.json()["choices"][0]["message"]["content"] == "It is sunny there."
