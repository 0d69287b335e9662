"""Outputs of several tokens, some of them drafted: usage, /metrics, and what every reader of outputs makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from allotrope.engine.client import EngineClient
from allotrope.engine.messages import LENGTH, Stepped, pack, unpack_from_engine
from allotrope.engine.report import EngineStats, SpeculationStats
from allotrope.llm import Accumulator, RequestOutput
from allotrope.request import Request, SamplingParams, SequenceOutput, TokenLogprobs
from allotrope.server.answers import CompletionAnswer
from allotrope.server.chat_answer import ChatAnswer
from allotrope.server.generation import Generation
from allotrope.server.logprobs import Report
from allotrope.server.message_formats import MessageFormats
from allotrope.server.message_stream import (
    ContentDelta,
    MessageEvent,
    MessageStream,
    PlainParser,
    ToolCallBegin,
)
from allotrope.server.metrics import Metrics
from allotrope.text.tokenizer import Tokenizer, load_tokenizer

SPECULATION = SpeculationStats(drafts=5, draft_tokens=15, accepted_tokens=8, accepted_per_position=(4, 3, 1))


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_model))


def request(**params: Any) -> Request:
    return Request(request_id="r", prompt_ids=(5, 6), params=SamplingParams(**params))


def usages(tokenizer: Tokenizer, outputs: list[SequenceOutput]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The usage of a completion and of a chat answer made of `outputs`."""
    generation = Generation(request(max_tokens=None, n=2), tokenizer)
    stream = MessageStream(generation, PlainParser)
    for output in outputs:
        for delta in generation.take(output):
            stream.take(delta)
    return (
        CompletionAnswer("tiny", [generation], tokenizer, Report()).usage(),
        ChatAnswer("tiny", stream, tokenizer, Report(), MessageFormats()).usage(),
    )


def test_usage_tells_accepted_and_rejected_drafts(tokenizer: Tokenizer) -> None:
    outputs = [
        SequenceOutput("r", 0, (7,)),
        SequenceOutput("r", 0, (8, 9, 10), num_draft_tokens=3, num_accepted_tokens=2),
        SequenceOutput("r", 1, (8,), num_draft_tokens=3),
        SequenceOutput("r", 0, (8, 9), "length", num_draft_tokens=1, num_accepted_tokens=1),
    ]
    completion, chat = usages(tokenizer, outputs)
    counted = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 4}
    assert completion["completion_tokens"] == chat["completion_tokens"] == 7
    assert completion["completion_tokens_details"] == counted
    assert chat["completion_tokens_details"] == {"reasoning_tokens": 0} | counted


@pytest.mark.parametrize(("behind", "tokens", "accepted"), [(0, 5, 3), (1, 4, 3), (3, 2, 1)])
def test_usage_leaves_out_what_lies_behind_the_end(
    tokenizer: Tokenizer, behind: int, tokens: int, accepted: int
) -> None:
    generation = Generation(request(max_tokens=None), tokenizer, may_end=True)
    generation.take(SequenceOutput("r", 0, (7,)))
    generation.take(SequenceOutput("r", 0, (8, 9, 10, 11), num_draft_tokens=4, num_accepted_tokens=3))
    generation.end(0, behind)
    assert (generation.completion_tokens, generation.accepted_tokens) == (tokens, accepted)


def test_usage_without_speculation_has_no_such_fields(tokenizer: Tokenizer) -> None:
    completion, chat = usages(tokenizer, [SequenceOutput("r", 0, (7,))])
    assert "completion_tokens_details" not in completion
    assert chat["completion_tokens_details"] == {"reasoning_tokens": 0}


def samples(metrics: Metrics) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            found[f"{sample.name}[{sample.labels.get('position', '')}]"] = sample.value
    return found


def test_metrics_count_drafts_under_both_names() -> None:
    found = samples(Metrics("tiny", lambda: EngineStats(speculation=SPECULATION), "vllm"))
    for prefix in ("allotrope_", "vllm:"):
        assert found[f"{prefix}spec_decode_num_drafts_total[]"] == 5
        assert found[f"{prefix}spec_decode_num_draft_tokens_total[]"] == 15
        assert found[f"{prefix}spec_decode_num_accepted_tokens_total[]"] == 8
        by_position = [found[f"{prefix}spec_decode_num_accepted_tokens_per_pos_total[{i}]"] for i in range(3)]
        assert by_position == [4, 3, 1]


def test_metrics_without_speculation_have_no_such_names() -> None:
    assert not [name for name in samples(Metrics("tiny", EngineStats, "vllm")) if "spec_decode" in name]


def test_a_token_that_is_dropped_is_not_generated() -> None:
    """With max_tokens=0 the engine generates one for its prompt's sake."""
    metrics = Metrics("tiny", EngineStats)
    with metrics.track(request()) as timer:
        timer.tokens(0, 1)
    found = samples(metrics)
    assert found["allotrope_generation_tokens_total[]"] == found["allotrope_request_generation_tokens_sum[]"] == 0
    assert found["allotrope_time_to_first_token_seconds_count[]"] == 1


class CallsAtC:
    """A parser of messages in which every c begins a call."""

    def __init__(self) -> None:
        self._calls = 0

    def push(self, text: str) -> list[MessageEvent]:
        if text != "c":
            return [ContentDelta(text)]
        self._calls += 1
        return [ToolCallBegin(index=self._calls - 1, id="x", name="f")]

    def finish(self) -> list[MessageEvent]:
        return []


class Scripted:
    """An engine with these outputs."""

    def __init__(self, outputs: list[SequenceOutput]) -> None:
        self._outputs = outputs

    async def generate(self, asked: Request, join: bool) -> AsyncGenerator[SequenceOutput]:
        for one in self._outputs:
            yield one

    def abort(self, *which: object) -> None:
        pass


@pytest.mark.parametrize("steps", [(1, 1, 1, 1, 1, 1), (1, 4, 1), (1, 5)])
def test_tokens_behind_the_only_call_are_not_generated(steps: tuple[int, ...], tokenizer: Tokenizer) -> None:
    """The second call ends the answer, in whatever step it begins."""
    letters = {letter: tokenizer.encode(letter)[-1] for letter in "ca"}
    ids, outputs = tuple(letters[letter] for letter in "cacaaa"), []
    for i, (start, count) in enumerate(zip(accumulate(steps, initial=0), steps, strict=False)):
        reason = "length" if i == len(steps) - 1 else None
        drafts = {"num_draft_tokens": count - 1, "num_accepted_tokens": count - 1}
        outputs.append(SequenceOutput("r", 0, ids[start : start + count], reason, **drafts))
    metrics = Metrics("tiny", EngineStats)
    stream = MessageStream(Generation(request(max_tokens=6), tokenizer, may_end=True), CallsAtC, single_call=True)

    async def read() -> None:
        async for _ in stream.deltas(cast(EngineClient, Scripted(outputs)), metrics):
            pass

    asyncio.run(read())
    found = samples(metrics)
    assert stream.generation.completion_tokens == found["allotrope_generation_tokens_total[]"] == 3
    assert found["allotrope_request_generation_tokens_sum[]"] == 3
    ended = {line for line in metrics.exposition().decode().splitlines() if "request_success_total{" in line}
    assert {line.rpartition(" ")[2] for line in ended if '"stop"' in line} == {"1.0"}
    assert {line.rpartition(" ")[2] for line in ended if '"length"' in line} <= {"0.0"}


def test_tokens_of_one_step_share_its_time() -> None:
    metrics = Metrics("tiny", EngineStats)
    with metrics.track(request()) as timer:
        timer.tokens(0, 1)
        timer.tokens(0, 4)
        timer.tokens(0, 2)
        timer.generated(7)
    found = samples(metrics)
    assert found["allotrope_inter_token_latency_seconds_count[]"] == 6
    assert found["allotrope_generation_tokens_total[]"] == 7
    assert found["allotrope_time_to_first_token_seconds_count[]"] == 1


def test_counts_cross_the_process_border() -> None:
    output = SequenceOutput("r", 0, (1, 2), num_draft_tokens=3, num_accepted_tokens=1)
    sent = Stepped(outputs=[output], stats=EngineStats(speculation=SPECULATION))
    received = unpack_from_engine(pack(sent)[LENGTH.size :])
    assert isinstance(received, Stepped)
    assert received.outputs == [output]
    assert received.stats.speculation == SPECULATION


def accumulated(tokenizer: Tokenizer, params: SamplingParams, portions: list[list[int]], reason: str) -> RequestOutput:
    accumulator = Accumulator(Request(request_id="r", prompt_ids=(5,), params=params), tokenizer, continues_text=False)
    for place, portion in enumerate(portions):
        scores = tuple(TokenLogprobs(token, -1.0, 1) for token in portion)
        last = place == len(portions) - 1
        accumulator.take(
            SequenceOutput(
                "r", 0, tuple(portion), reason if last else None, logprobs=scores,  # type: ignore[arg-type]
                num_draft_tokens=len(portion), num_accepted_tokens=len(portion) - 1,
            )
        )  # fmt: skip
    return accumulator.output


@settings(deadline=None, max_examples=150)
@given(
    ids=st.lists(st.integers(0, 319), min_size=1, max_size=24),
    cuts=st.sets(st.integers(1, 23)),
    stop=st.sampled_from([(), ("a",), ("the", "at")]),
    include=st.booleans(),
    min_tokens=st.sampled_from([0, 5]),
    reason=st.sampled_from(["length", "stop"]),
)
def test_offline_outputs_do_not_depend_on_tokens_per_step(
    tokenizer: Tokenizer,
    ids: list[int],
    cuts: set[int],
    stop: tuple[str, ...],
    include: bool,
    min_tokens: int,
    reason: str,
) -> None:
    params = SamplingParams(
        stop=stop, include_stop_str_in_output=include, logprobs=1, max_tokens=None, min_tokens=min_tokens
    )
    edges = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    splits = ([ids], [ids[start:end] for start, end in pairwise(edges)], [[token] for token in ids])
    outputs = []
    for split in splits:
        (completion,) = accumulated(tokenizer, params, split, reason).outputs
        assert completion.logprobs is not None
        assert [score.token_id for score in completion.logprobs] == completion.token_ids
        outputs.append((completion.text, completion.token_ids, completion.finish_reason, completion.stop_reason))
    assert outputs[0] == outputs[1] == outputs[2]


def test_offline_outputs_count_drafts(tokenizer: Tokenizer) -> None:
    (completion,) = accumulated(tokenizer, SamplingParams(logprobs=1), [[1, 2, 3], [4, 5]], "length").outputs
    assert (completion.num_draft_tokens, completion.num_accepted_tokens) == (5, 3)
