"""A message does not depend on the pieces in which its text comes, for texts of models and for any others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from messages import Message, parse
from tokenizers import decoders, models, pre_tokenizers
from writers import BEGINNINGS, TAGS, Written, free_text, written

from allotrope.text.formats import FORMATS, MessageParser
from allotrope.text.formats.reader import Reader
from allotrope.text.tokenizer import Tokenizer, load_tokenizer

QUICK = settings(max_examples=20, deadline=None)
SPECIAL = ("<|im_end|>", "<unused1>", "<unused12>")


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    """`text`, cut anywhere: into few pieces, or into characters."""
    if draw(st.booleans()):
        return list(text)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def parser_of(name: str, message: Written) -> MessageParser:
    return FORMATS[name].parser(tools=message.tools or True, reasoning=True, special_tokens=SPECIAL)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes, and every tag of every format as a special token."""
    directory = tmp_path_factory.mktemp("tags")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    merges = [("t", "o"), ("o", "l"), ("<", "/"), ("Ġ", "a"), ("Ã", "©")]
    words = [*sorted(alphabet), *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(sorted({tag for tags in TAGS.values() for tag in tags} | set(SPECIAL)))
    backend.save(str(Path(directory) / "tokenizer.json"))
    return load_tokenizer(str(directory))


@pytest.mark.parametrize("name", FORMATS)
@QUICK
@given(data=st.data())
def test_messages_of_models(name: str, data: st.DataObject) -> None:
    message = data.draw(written(name))
    whole = parse(parser_of(name, message), [message.text])
    assert message.is_message(whole)
    assert parse(parser_of(name, message), data.draw(pieces(message.text))) == whole


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_messages_by_tokens(name: str, tokenizer: Tokenizer, data: st.DataObject) -> None:
    message = data.draw(written(name))
    ids = tokenizer.encode(message.text, add_special_tokens=False)
    size = data.draw(st.integers(1, 5))
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)

    def texts() -> Iterator[str]:
        for at in range(0, len(ids), size):
            yield detokenizer.push(ids[at : at + size])
        yield detokenizer.flush()

    assert message.is_message(parse(parser_of(name, message), texts()))


@pytest.mark.parametrize("name", FORMATS)
@QUICK
@given(data=st.data())
def test_truncated_messages(name: str, data: st.DataObject) -> None:
    """Truncated anywhere, a message begins as the whole does."""
    message = data.draw(written(name))
    whole = parse(parser_of(name, message), [message.text])
    text = message.text[: data.draw(st.integers(0, len(message.text)))]
    parts = parse(parser_of(name, message), data.draw(pieces(text)))
    assert parse(parser_of(name, message), [text]) == parts
    assert len(parts.calls) <= len(whole.calls)
    for (one, _, arguments), (other, _, all_arguments) in zip(parts.calls[:-1], whole.calls, strict=False):
        assert (one, arguments) == (other, all_arguments)


@pytest.mark.parametrize("name", FORMATS)
@QUICK
@given(data=st.data())
def test_any_text(name: str, data: st.DataObject) -> None:
    """Tags in any order: no error, and the same for any pieces."""
    words = ["f", "{", "}", '"name"', ":", '{"name": "f", "arguments": {', "[", "(", "a=", '">', " ", "\n", ">", ","]
    words += ["functions.f:0", "call:f{", "```json\n", " to=functions.f", "analysis", "key", "<", "\\", "'", '"']
    tokens = st.sampled_from([*TAGS[name] * 2, *words, *SPECIAL]) | free_text(name)
    text = "".join(data.draw(st.lists(tokens, max_size=25)))
    opens = data.draw(st.booleans())

    def parser() -> MessageParser:
        return FORMATS[name].parser(tools=True, reasoning=True, prompt_opens_reasoning=opens, special_tokens=SPECIAL)

    parse(parser(), [text])
    assert parse(parser(), data.draw(pieces(text))) == parse(parser(), [text])


@pytest.mark.parametrize("name", FORMATS)
@QUICK
@given(data=st.data())
def test_text_without_tags_is_content(name: str, data: st.DataObject) -> None:
    text = data.draw(free_text(name))
    parser = FORMATS[name].parser(tools=True, reasoning=True)
    assert parse(parser, data.draw(pieces(text))) == Message("", text)


@QUICK
@given(data=st.data())
@example(data=None)
def test_text_of_a_failed_call_is_content(data: st.DataObject | None) -> None:
    """Nothing of what looked like a call is lost."""
    text = '<tool_call>\n\n{"name": "f", "x": [1, "a"], "arguments": 3}' if data is None else ""
    if data is not None:
        body = data.draw(st.text(st.sampled_from('{}[]":, \nname1<>/\\'), max_size=30))
        text = f"a<tool_call>{body}".rstrip()
    message = parse(FORMATS["hermes"].parser(tools=True, reasoning=True), text)
    assert message.calls or message.content == text


HOSTILE = {
    "hermes": ["<", "<tool_call", "<tool_call>", '<tool_call>{"name": "', '<tool_call>{"a": [', "\n", " <tool_call>{"],
    "qwen3_coder": ["<tool_call><function=", "<tool_call>\n", "<function=f><parameter=", "<function=f>\n</parameter"],
    "glm45": ["<tool_call>f", "<tool_call>f<arg_key>a", "<tool_call>f</tool_call>\n"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_calls_section_begin|> <|tool_call_begin|>a"],
    "harmony": ["<|channel|>", "<|start|>assistant", "<|channel|>analysis to=", "<|message|>"],
    "gemma4": ["<|tool_call>call:", "<|tool_call>call:f{a:[", '<|tool_call>call:f{a:<|"|>', "<|channel>"],
    "llama3_json": ["{", '{"', '{"name":', '{"name":"a","x":{'],
    "pythonic": ["[f(", "[f(a=[", '[f(a="\\', "[[f"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][{", "[TOOL_CALLS]f[ARGS]{"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in HOSTILE.items() for text in texts])
def test_what_is_read_is_not_read_again(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is linear in the text: what waits unread stays small, however much has come."""
    longest = 0
    feed = Reader.feed

    def measured(self: Reader, more: str) -> None:
        nonlocal longest
        feed(self, more)
        longest = max(longest, len(self._text))

    monkeypatch.setattr(Reader, "feed", measured)
    for once in (text, text[: len(text) // 2 + 1]):
        parser = FORMATS[name].parser(tools=True, reasoning=True)
        parse(parser, once + text * (5000 // len(text)) + "x" * 2000)
    assert 0 < longest < 400


def test_beginnings_are_marks() -> None:
    """The characters that tests leave out of text are those that begin calls."""
    found = {name: form.tools.call[0] for name, form in FORMATS.items() if form.tools and len(form.tools.call[0]) == 1}
    assert found == BEGINNINGS
