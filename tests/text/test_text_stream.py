"""Incremental text against whole decoding, for every way of portioning the ids."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allotrope.request import SamplingParams
from allotrope.text.codec import FastCodec
from allotrope.text.detokenizer import WindowDetokenizer
from allotrope.text.stream import TextStream
from allotrope.text.tokenizer import Tokenizer

KINDS = ("byte_level", "sentencepiece", "wordpiece")
QUICK = settings(max_examples=150, deadline=None)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def cut_at_stop(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """By the definition: the stop string that ends first, of several with one end the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def stream_all(stream: TextStream, portions: Sequence[Sequence[int]], apart: bool) -> str:
    """Push all portions; the end comes with the last one, or `apart` by itself."""
    texts = [stream.push(ids, final=not apart and n == len(portions) - 1) for n, ids in enumerate(portions)]
    return "".join(texts) + (stream.push([], final=True) if apart or not portions else "")


@st.composite
def portions_of(draw: st.DrawFn, ids: Sequence[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [list(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@QUICK
@given(data=st.data())
def test_text_does_not_depend_on_portions_of_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    skip = data.draw(st.booleans())
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    inside = st.integers(0, max(0, len(text) - 1)).flatmap(
        lambda a: st.integers(1, 8).map(lambda n: text[a : a + n] or "x")
    )
    stops = data.draw(st.lists(inside | st.text("stop é\ufffd", min_size=1, max_size=5), max_size=3))
    include = data.draw(st.booleans())
    params = SamplingParams(
        stop=tuple(stops), include_stop_str_in_output=include, skip_special_tokens=skip, min_tokens=0
    )
    expected, stop = cut_at_stop(text, stops, include)
    one_by_one = TextStream(tokenizer, params)
    assert stream_all(one_by_one, [[i] for i in ids], apart=True) == expected
    stream = TextStream(tokenizer, params)
    assert stream_all(stream, data.draw(portions_of(ids)), data.draw(st.booleans())) == expected
    assert stream.stopped_by == one_by_one.stopped_by == stop
    assert stream.used_tokens == one_by_one.used_tokens <= len(ids)
    if stop is None:
        assert stream.used_tokens == len(ids)
    else:
        assert stop in tokenizer.decode(ids[: stream.used_tokens], skip_special_tokens=skip)


def test_nothing_is_held_but_a_possible_stop_string(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, SamplingParams(stop=("stopwatch",)))
    deltas = [stream.push(byte_level.encode(text)) for text in ("the ", "sto", "p", " the st", "and")]
    assert deltas == ["the ", "", "", "stop the ", "stand"]
    assert stream.push([], final=True) == "" and stream.stopped_by is None


def test_held_text_is_returned_at_the_end(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, SamplingParams(stop=("stopwatch",)))
    assert stream.push(byte_level.encode("a stop")) == "a "
    assert stream.push([], final=True) == "stop"


def test_a_stop_string_inside_one_token_counts_that_token(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("The capital of")
    assert byte_level.token_text(ids[1]) == " capital"
    stream = TextStream(byte_level, SamplingParams(stop=("pit",)))
    assert stream.push(ids) == "The ca"
    assert (stream.stopped_by, stream.used_tokens) == ("pit", 2)
    assert stream.push(ids, final=True) == "" and stream.used_tokens == 2


def test_included_stop_string_is_neither_held_nor_lost(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, SamplingParams(stop=("stop.",), include_stop_str_in_output=True))
    assert stream.push(byte_level.encode("then stop")) == "then stop"
    assert stream.push(byte_level.encode(". More")) == "."
    assert stream.stopped_by == "stop."


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, ""), (2, "a"), (3, "aa"), (9, "aaaa")])
def test_stop_strings_before_min_tokens_pass(byte_level: Tokenizer, min_tokens: int, text: str) -> None:
    a = byte_level.token_id("a")
    assert a is not None
    stream = TextStream(byte_level, SamplingParams(stop=("a",), min_tokens=min_tokens))
    assert stream.push([a] * 4, final=True) == text
    assert stream.used_tokens == min(4, max(1, min_tokens))


def test_incomplete_characters_are_held(byte_level: Tokenizer) -> None:
    bytes_of = [byte_level.token_id(spelling) for spelling in "ðŁĺĢ"]
    ids = [i for i in bytes_of if i is not None]
    assert byte_level.decode(ids) == "😀"
    stream = TextStream(byte_level, SamplingParams())
    assert [stream.push([i]) for i in ids] == ["", "", "", "😀"]
    stream = TextStream(byte_level, SamplingParams())
    assert [stream.push(ids[:3]), stream.push([], final=True)] == ["", "\ufffd"]
    stream = TextStream(byte_level, SamplingParams())
    assert [stream.push(ids[:3]), stream.push(byte_level.encode("a"))] == ["", "\ufffda"]


def test_sentencepiece_space_belongs_to_continued_text(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the cat", add_special_tokens=False)
    assert sentencepiece.decode(ids) == "the cat"
    assert TextStream(sentencepiece, SamplingParams()).push(ids) == "the cat"
    assert TextStream(sentencepiece, SamplingParams(), continues_text=True).push(ids) == " the cat"
    assert sentencepiece.token_text(ids[0]) == " the"


def test_special_tokens_leave_no_text_unless_asked_for(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_end|><think>b")
    assert TextStream(byte_level, SamplingParams()).push(ids) == "a<think>b"
    assert TextStream(byte_level, SamplingParams(skip_special_tokens=False)).push(ids) == "a<|im_end|><think>b"


def test_windows_do_not_grow_with_the_text() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_whole(ids)

    detokenizer = WindowDetokenizer(decode, frozenset())
    ids = [2, 0, 2, 1] * 200 + [0] * 500 + [1] * 500 + [2] * 500
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == decode_whole(ids)
    assert longest <= 16


def test_a_text_that_goes_on_keeps_its_space_by_windows_as_well() -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    library = Library(models.Unigram([("<unk>", 0.0), ("▁hello", -1.0), ("▁world", -1.0), ("!", -1.0)], 0, False))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    codec = FastCodec(library)
    for continues, wanted in ((False, "world!"), (True, " world!")):
        detokenizer = codec.detokenizer(skip_special_tokens=True, continues_text=continues)
        assert isinstance(detokenizer, WindowDetokenizer)
        assert detokenizer.push([2, 3]) + detokenizer.flush() == wanted


def decode_whole(ids: Sequence[int]) -> str:
    return "".join("\ufffd" if i == 0 else "" if i == 1 else " w" for i in ids).removeprefix(" ")
