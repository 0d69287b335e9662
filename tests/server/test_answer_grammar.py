"""The grammar of an answer: what it holds, by reasoning, tools and content, without a server."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from allotrope.errors import InvalidRequest
from allotrope.grammars.limits import MAX_CHOICES, MAX_REGEX_LENGTH
from allotrope.request import Grammar, GrammarKind
from allotrope.server.answer_grammar import answer_grammar, called_format
from allotrope.server.conversation import Conversation
from allotrope.server.tools import NamedTool, Tool
from allotrope.text.formats import by_name

MESSAGES = [{"role": "user", "content": "hi"}]
F = Tool("f", parameters={"type": "object", "properties": {"a": {"type": "string"}}})
STRICT = Tool("f", parameters=F.parameters, strict=True)
CONTENT = Grammar("json_schema", '{"type": "object"}', param="response_format")


def grammar(
    prompt: str = "x",
    content: Grammar | None = None,
    tools: str = "hermes",
    reasoning: str | None = "think",
    **more: Any,
) -> Grammar | None:
    return answer_grammar(
        Conversation(messages=MESSAGES, **more),
        content,
        tools=by_name(tools),
        reasoning=None if reasoning is None else by_name(reasoning),
        prompt_text=prompt,
    )


def test_an_answer_that_may_be_anything_has_none() -> None:
    assert grammar() is None
    assert grammar(tools="hermes", reasoning=None) is None
    assert grammar(**{"tool_choice": "none"}) is None


def test_content_alone() -> None:
    assert grammar(content=CONTENT, reasoning=None) == CONTENT
    closed = grammar("<think>\n\n</think>\n\n", CONTENT)
    assert closed == CONTENT and closed.after is None
    is_open = grammar("<think>\n", CONTENT)
    assert is_open is not None and (is_open.kind, is_open.after) == ("json_schema", "</think>")
    undecided = grammar("<|im_start|>assistant\n", CONTENT)
    assert undecided is not None and (undecided.kind, undecided.after) == ("structural_tag", None)
    assert undecided.param == "response_format" and '"<think>"' in undecided.source
    channels = grammar(content=CONTENT, reasoning="harmony")
    assert channels is not None and (channels.kind, channels.after) == ("structural_tag", None)
    begun = grammar("<|start|>assistant<|channel|>analysis<|message|>", CONTENT, reasoning="harmony")
    lark = grammar(content=Grammar("lark", 'start: "x"'), reasoning="harmony")
    for one in (begun, lark):
        assert one is not None and one.after == "<|channel|>final<|message|>"


def test_the_header_of_an_answer_on_a_channel_is_held() -> None:
    pytest.importorskip("llguidance", reason="grammars need llguidance")
    from allotrope.grammars.backend import load_backend
    from allotrope.grammars.vocabulary import Vocabulary

    tags = by_name("harmony").channels
    found = grammar(content=CONTENT, reasoning="harmony")
    assert tags is not None and found is not None
    special = [tags.start, tags.channel, tags.message, *tags.ends, *tags.others]
    tokens = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in special)]
    end = tokens.index(b"<|return|>")
    compiled = load_backend(
        "llguidance", Vocabulary(tuple(tokens), frozenset(range(256, len(tokens))), (end,))
    ).compile(found)

    def taken(text: str) -> str:
        """The beginning of `text` that the grammar allows."""
        matcher = compiled.matcher()
        pieces = [piece for piece in re.split("(" + "|".join(map(re.escape, special)) + ")", text) if piece]
        read = b""
        for piece in pieces:
            for token in [piece.encode()] if piece in special else [bytes([byte]) for byte in piece.encode()]:
                if not matcher.take(tokens.index(token)):
                    return read.decode()
                read += token
        return read.decode()

    for before in ("", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"):
        whole = before + "<|channel|>final<|message|>{}<|return|>"
        assert taken(whole) == whole
        assert taken(before + "<|channel|>final <|constrain|>json<|message|>x") == before + "<|channel|>final"
        assert taken(before + "<|channel|>final<|message|>x") == before + "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("kind", "source"), [("choice", json.dumps(["a"] * (MAX_CHOICES + 1))), ("regex", "a" * (MAX_REGEX_LENGTH + 1))]
)
def test_content_behind_reasoning_has_the_limits_of_content_alone(kind: GrammarKind, source: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"response_format \({kind}\).*at most") as refused:
        grammar(content=Grammar(kind, source, param="response_format"))
    assert refused.value.param == "response_format"


def test_calls() -> None:
    for choice in ("required", NamedTool("f")):
        forced = answer_grammar(
            Conversation(messages=MESSAGES, tools=[F], tool_choice=choice),
            None,
            tools=by_name("hermes"),
            reasoning=None,
            prompt_text="x",
        )
        assert forced is not None and forced.param == "tools"
        assert json.loads(forced.source)["format"]["type"] == "tags_with_separator"


def _auto(tool: Tool, tools: str, content: Grammar | None = None) -> Grammar | None:
    conversation = Conversation(messages=MESSAGES, tools=[tool])
    return answer_grammar(conversation, content, tools=by_name(tools), reasoning=None, prompt_text="x")


def test_strict_tools() -> None:
    assert _auto(F, "hermes") is None
    held = _auto(STRICT, "hermes")
    assert held is not None and json.loads(held.source)["format"]["type"] == "triggered_tags"
    for name in ("gemma4", "pythonic", "llama3_json"):
        with pytest.raises(InvalidRequest, match="strict tools are not supported here"):
            _auto(STRICT, name)
    with pytest.raises(InvalidRequest, match="tools with response_format are not supported here"):
        _auto(F, "gemma4", CONTENT)
    with pytest.raises(InvalidRequest, match="cannot be used together"):
        _auto(F, "hermes", Grammar("lark", 'start: "a"', param="guided_grammar"))


def test_forced_calls_of_formats_that_cannot_be_held_have_another() -> None:
    forced = Conversation(messages=MESSAGES, tools=[F], tool_choice="required")
    free = Conversation(messages=MESSAGES, tools=[F])
    assert called_format(forced, by_name("gemma4")) == by_name("hermes")
    assert called_format(free, by_name("gemma4")) == by_name("gemma4")
    assert called_format(forced, by_name("kimi_k2")) == by_name("kimi_k2")
