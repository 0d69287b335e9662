"""Malformed and hostile requests beside good ones: each bad one learns what was wrong, no good one notices."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, wait_until_idle
from tiny_model import MAX_MODEL_LEN, VOCAB_SIZE

from allotrope.errors import InvalidRequest
from allotrope.server.body import parse
from allotrope.server.fields import CHAT as CHAT_FIELDS
from allotrope.server.protocol import ChatRequest

Json = dict[str, Any]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BASE: dict[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
GOOD_PROMPTS = [[4 + i, 9, 30 + i] for i in range(50)]


@dataclass(frozen=True)
class Case:
    """A request that must be refused with `status`, by an error that names `param` (None: no field is at fault)."""

    path: str
    body: bytes
    param: str | None
    status: int = 400


def _nested(depth: int) -> list[Any]:
    """Lists in lists."""
    return [_nested(depth - 1)] if depth > 1 else []


HUGE = 10**400
WRONG: dict[str, list[Any]] = {
    "temperature": ["hot", -0.1, 101, 1e308, HUGE, True, [], {}],
    "top_p": ["all", 0, -1, 1.01, HUGE, False],
    "top_k": ["few", -2, 2**31, 1.5, HUGE],
    "min_p": ["x", -0.5, 2, HUGE],
    "presence_penalty": ["x", -2.1, 3, HUGE],
    "frequency_penalty": ["x", -2.1, 3, HUGE],
    "repetition_penalty": ["x", 0, -1, 101, HUGE, 5e-324],
    "seed": ["x", 2**63, -(2**63), HUGE, 0.5],
    "n": ["x", 0, -1, 129, HUGE, 1.5, True],
    "max_tokens": ["x", -1, 2**31, HUGE, MAX_MODEL_LEN + 1, 10_000_000],
    "min_tokens": ["x", -1, HUGE, 3, MAX_MODEL_LEN],
    "stop": [7, [7], "", [""], ["x"] * 17, "x" * 2000, {"a": "b"}],
    "stop_token_ids": [7, ["x"], [-1], [VOCAB_SIZE], [2**31], [HUGE], [True]],
    "logit_bias": [
        7,
        [1],
        {"x": 1},
        {"-1": 1},
        {str(VOCAB_SIZE): 1},
        {"9" * 30: 1},
        {"5": "x"},
        {"5": 101},
        {"²": 1},
        {"05": 1, "5": 2},
    ],
    "allowed_token_ids": [[], ["x"], [-1], [VOCAB_SIZE], [HUGE], "x"],
    "prompt_logprobs": [-1, 21, "x", HUGE],
    "ignore_eos": ["yes", 1],
    "stream": ["yes", 1],
    "stream_options": ["x", {"include_usage": "x"}, {"other": 1}],
    "truncate_prompt_tokens": [0, -2, MAX_MODEL_LEN + 1, "x", HUGE],
    "model": ["other", 7, ["tiny"]],
    "response_format": [
        {"type": "xml"},
        {},
        "text",
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": {}, "name": 5}},
        {"type": "json_schema", "json_schema": {"schema": {}, "name": "x", "strict": "yes"}},
        {"type": "json_schema", "json_schema": {"schema": {}, "name": "x", "description": [1]}},
        {"type": "json_schema", "json_schema": {"schema": _nested(900)}},
        {"type": "text", "schema": {}},
    ],
    "structured_outputs": ["x", {}, {"json": {}, "regex": "a"}, {"xml": 1}, {"json": 7}, {"json_object": 1}],
    "guided_json": [7, "{", {"type": "strin"}, {"$ref": "#/none"}],
    "guided_regex": ["", 7, "(", "(?=a)", "(" * 3000],
    "guided_choice": [[], [1], "x", [""] * 0],
    "guided_grammar": ["", "start: nothing"],
}
WRONG_CHAT: dict[str, list[Any]] = {
    "messages": [
        [], None, "hi", {}, [7], [{}], [{"role": "user"}], [{"content": "hi"}], [{"role": "king", "content": "hi"}],
        [{"role": "user", "content": 7}], [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": "hi", "unknown": 1}], [{"role": "tool", "content": "hi"}],
        [{"role": "tool", "content": "hi", "tool_call_id": "x"}],
        [{"role": "user", "content": "", "tool_call_id": "y"}],
        [{"role": "assistant", "tool_calls": [{}]}], [{"role": "assistant", "tool_calls": [{"id": "x"}]}],
        [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": 7}}]}],
        [{"role": "user", "content": "x", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": ""}}]}],
        [{"role": "user", "content": "one two " * MAX_MODEL_LEN}],
        [{"role": "user", "content": "x" * 10_000_000}],
    ],
    "logprobs": ["x", 3],
    "top_logprobs": [21, -1, "x"],
    "tools": [
        "f", {}, [7], [{}], [{"type": "retrieval"}], [{"type": "function"}], [{"type": "function", "function": {}}],
        [{"type": "function", "function": {"name": 7}}], [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        [{"type": "function", "function": {"name": "f"}}],
        [{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)],
    ],
    "tool_choice": ["maybe", 7, {}, {"type": "function"}, {"type": "custom"}, "required"],
    "parallel_tool_calls": ["x", 1],
    "reasoning_effort": ["enormous", 3, "high"],
    "include_reasoning": ["x", 0],
    "chat_template_kwargs": [7, {"messages": []}, {"deep": _nested(900)}],
    "audio": [{}],
}  # fmt: skip
WRONG_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": [
        None, [], [[]], 7, {}, [7, "x"], [True], [None], [1.5], [-1], [VOCAB_SIZE], [2**64], [HUGE],
        [[5], [VOCAB_SIZE]], [[5], "x"], [[["x"]]], [5] * MAX_MODEL_LEN, [5] * 1_000_000, "x" * 10_000_000,
        ["one two " * MAX_MODEL_LEN], [[5]] * 2000,
    ],
    "logprobs": [True, 21, -1],
    "echo": ["x"],
    "best_of": [2, 0],
    "suffix": ["end"],
}  # fmt: skip
RAW: list[bytes] = [
    b"", b"{", b"nonsense", b"[]", b"null", b'"text"', b"7", b'{"prompt": "hi"', b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud800"}', b'{"temperature": NaN, "prompt": "hi"}',
    b'{"temperature": Infinity, "prompt": "hi"}', b'{"temperature": 1e999, "prompt": "hi"}',
    b'{"prompt": "hi",}', b"{'prompt': 'hi'}", b"[" * 100_000, b'{"a":' * 50_000,
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"seed": ' + b"9" * 5000 + b', "prompt": "hi"}', b"\x00" * 100, b"\xef\xbb\xbf{}",
]  # fmt: skip


def bad_cases() -> Iterator[Case]:
    for path, tables in ((CHAT, (WRONG, WRONG_CHAT)), (COMPLETIONS, (WRONG, WRONG_COMPLETIONS))):
        for name, values in itertools.chain.from_iterable(table.items() for table in tables):
            for value in values:
                status = 404 if (name, value) == ("model", "other") else 400
                yield Case(path, json.dumps(BASE[path] | {name: value}).encode(), name, status)
        for raw in RAW:
            yield Case(path, raw, None)
    for tokens in ("x", [-1], [VOCAB_SIZE], [HUGE], ["x"], None):
        yield Case("/detokenize", json.dumps({"tokens": tokens}).encode(), "tokens")
    for body in ({}, {"prompt": 7}, {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}):
        yield Case("/tokenize", json.dumps(body).encode(), "prompt")
    for option, value in (("add_generation_prompt", False), ("reasoning_effort", "low"), ("tools", [])):
        yield Case("/tokenize", json.dumps({"prompt": "hi", option: value}).encode(), option)
    endless = {"min_tokens": 1, "allowed_token_ids": [5, 6], "stop_token_ids": [5, 6]}
    yield Case(COMPLETIONS, json.dumps(BASE[COMPLETIONS] | endless).encode(), "min_tokens")
    yield Case(COMPLETIONS, b" " * 16_000_001, None, 413)


async def _send(http: httpx.AsyncClient, case: Case) -> str | None:
    """What is wrong with the answer to a bad request, or None."""
    response = await http.post(case.path, content=case.body)
    shown = f"{case.path} {case.body[:120]!r}: {response.status_code} {response.text[:300]}"
    if response.status_code != case.status:
        return f"expected {case.status}: {shown}"
    error = response.json()["error"]
    if set(error) != {"message", "type", "param", "code"} or not error["message"]:
        return f"not the form of an error: {shown}"
    if case.param is not None and (error["param"] or "").split("[")[0].split(".")[0] != case.param:
        return f"expected the error to name {case.param}: {shown}"
    if case.param is not None and case.param not in error["message"]:
        return f"expected the message to name {case.param}: {shown}"
    if len(error["message"]) > 1000:
        return f"the message is too long: {shown}"
    return None


async def _complete(http: httpx.AsyncClient, ids: list[int]) -> list[int]:
    body = {"prompt": ids, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    response = await http.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


async def _run(url: str) -> tuple[int, list[str], list[list[int]], list[list[int]]]:
    cases = list(bad_cases())
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=8)) as http:
        alone = [await _complete(http, ids) for ids in GOOD_PROMPTS]
        bad = [_send(http, case) for case in cases]
        good = [_complete(http, ids) for ids in GOOD_PROMPTS]
        every = len(bad) // len(good)
        mixed = [task for i, one in enumerate(good) for task in (one, *bad[i * every : (i + 1) * every])]
        results = await asyncio.gather(*mixed, *bad[len(good) * every :])
    wrong = [result for result in results if isinstance(result, str)]
    return len(cases), wrong, alone, [result for result in results if isinstance(result, list)]


def test_bad_requests_among_good_ones(server: ServerProcess) -> None:
    count, wrong, alone, among_bad_ones = asyncio.run(_run(server.url))
    assert count >= 200
    assert wrong == []
    assert among_bad_ones == alone
    with server.http() as http:
        wait_until_idle(http)
    assert not [line for line in server.log if "Traceback" in line]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x"}] * 65_537,
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * 40_000}] * 2,
    ],
    ids=["messages", "parts"],
)
def test_endless_conversations_are_refused_before_they_are_read(messages: list[Json]) -> None:
    """Validation and translation of a million of them would hold up everyone for seconds."""
    body = json.dumps({"messages": messages}).encode()
    with pytest.raises(
        InvalidRequest, match=r"messages has (65537|80002) messages and parts; at most 65536"
    ) as refused:
        asyncio.run(parse(body, ChatRequest, CHAT_FIELDS, strict=False))
    assert refused.value.param == "messages"
