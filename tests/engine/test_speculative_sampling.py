"""What sampling, limits, grammars and observers see is the same with speculative decoding as without it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.speculating import LOADED, directory, drafts, models, several_at_once, speculating
from engine.watching import Watch, assert_idle, assert_same, assert_same_logits, engine, outputs, request, run
from server.tiny_model import write_tiny_model
from tiny_checkpoints import prompts

from allotrope.llm import LLM
from allotrope.request import Grammar, Request, SamplingParams, SequenceOutput, TokenLogprobs

HEAD = next(name for name in models() if drafts(name, "mtp"))
WINDOW = "GptOssForCausalLM"
DRAWN = SamplingParams(temperature=0.9, max_tokens=24, seed=3, ignore_eos=True)
GREEDY = replace(DRAWN, temperature=0.0)
FEW = tuple(range(9, 15))
# Ids that end a sequence now and then.
ENDS = tuple(range(0, 320, 9))
PARAMS: dict[str, SamplingParams] = {
    "penalties": replace(DRAWN, presence_penalty=0.7, frequency_penalty=0.5, repetition_penalty=1.3),
    "greedy penalties": replace(GREEDY, frequency_penalty=1.5, repetition_penalty=1.1),
    "bias": replace(DRAWN, logit_bias={7: 9.0, 8: 8.0, 9: -100.0}),
    "logprobs": replace(DRAWN, logprobs=3),
    "greedy logprobs": replace(GREEDY, logprobs=0, allowed_token_ids=FEW),
    "prompt logprobs": replace(GREEDY, prompt_logprobs=2, logprobs=1),
    "truncated": replace(DRAWN, top_k=8, top_p=0.8, min_p=0.02),
    "several": replace(DRAWN, n=2, top_p=0.7, allowed_token_ids=FEW, logprobs=1),
    "held back": replace(DRAWN, min_tokens=9, stop_token_ids=ENDS),
    "held back from an end": replace(DRAWN, ignore_eos=False, min_tokens=5, seed=8),
    "stopped": replace(DRAWN, stop_token_ids=ENDS, seed=5, logprobs=1),
    "ended": replace(DRAWN, ignore_eos=False, seed=6),
    "ended greedily": replace(GREEDY, ignore_eos=False),
    **{f"length {count}": replace(DRAWN, max_tokens=count, logprobs=0) for count in (1, 2, 3, 6)},
}
ASKED = [
    request(name, ids, params, ENDS)
    for (name, params), ids in zip(PARAMS.items(), prompts(range(2, 2 + 3 * len(PARAMS), 3)), strict=True)
]


@dataclass(frozen=True)
class Story:
    """All that one sequence was told. `scores`: its log-probabilities, as ids with ranks, and the numbers apart."""

    tokens: tuple[int, ...]
    end: tuple[Any, ...]
    scores: tuple[Any, ...]
    numbers: tuple[float, ...]


def story_of(found: Sequence[SequenceOutput], name: str, index: int) -> Story:
    own = [one for one in found if (one.request_id, one.index) == (name, index)]
    records: list[TokenLogprobs] = []
    for one in own:
        records += [record for record in one.prompt_logprobs or () if record is not None]
        assert one.logprobs is None or len(one.logprobs) == len(one.token_ids)
        records += one.logprobs or ()
    assert [one.finish_reason is None for one in own[:-1]] == [True] * (len(own) - 1)
    return Story(
        tuple(token for one in own for token in one.token_ids),
        (own[-1].finish_reason, own[-1].stop_reason, own[-1].error),
        tuple((record.token_id, record.rank, tuple(token for token, _ in record.top)) for record in records),
        tuple(number for record in records for number in (record.logprob, *(number for _, number in record.top))),
    )


def assert_same_stories(got: Sequence[SequenceOutput], want: Sequence[SequenceOutput]) -> None:
    for name, index in dict.fromkeys((one.request_id, one.index) for one in want):
        found, expected = (story_of(told, name, index) for told in (got, want))
        assert replace(found, numbers=()) == replace(expected, numbers=()), name
        assert found.numbers == pytest.approx(expected.numbers, abs=1e-4)


def passing_ends(model: object, asked: Sequence[Request], **options: Any) -> dict[str, list[int]]:
    """The tokens of the requests, and behind their ends those that would have followed."""
    running = engine(model, **LOADED, **options)
    known = run(running, asked)
    endless = [
        request(one.request_id, one.prompt_ids, replace(one.params, stop_token_ids=(), min_tokens=0, ignore_eos=True))
        for one in asked
    ]
    for name, tokens in run(running, endless).items():
        if tokens[: len(known[name])] == known[name]:
            known[name] = tokens
    running.close()
    return known


@pytest.mark.parametrize(
    ("name", "kind", "k"),
    [(WINDOW, "some", 3), (WINDOW, "all", 7), (WINDOW, "ngram", 2), (HEAD, "mtp-some", 4), (WINDOW, "eagle3-some", 3)],
)
def test_every_parameter_sees_what_it_sees_without_drafts(name: str, kind: str, k: int) -> None:
    torch.set_num_threads(1)
    model = directory(name)
    want = outputs(engine(model, **LOADED), ASKED)
    ends = {one.request_id: one.finish_reason for one in want if one.finish_reason}
    assert [ends[name] for name in ("stopped", "ended", "held back")].count("stop") >= 2
    running = speculating(model, kind, k, passing_ends(model, ASKED))
    for _ in range(2):
        # From the prefix cache, too.
        found = outputs(running, ASKED)
        assert_same_stories(found, want)
        assert several_at_once(found)
        assert_idle(running)
    if kind == "all":
        last = [one for one in found if one.finish_reason == "stop"]
        assert any(len(one.token_ids) > 1 for one in last), "no sequence ended among its drafts"
    running.close()


@pytest.mark.parametrize("k", [1, 7])
def test_a_sequence_ends_among_accepted_drafts(k: int) -> None:
    """At each place among them: nothing behind the end is told, cached or kept."""
    model = directory(WINDOW)
    asked = [request(f"r{i}", ids, replace(DRAWN, seed=i)) for i, ids in enumerate(prompts((5,) * 10))]
    endless = run(engine(model, **LOADED), asked)
    asked = [
        replace(one, params=replace(one.params, ignore_eos=False), eos_ids=(endless[one.request_id][i],))
        for i, one in enumerate(asked)
    ]
    want = outputs(engine(model, **LOADED), asked)
    assert len({len(one) for one in tokens_of(want).values()}) > 6, "they end at different places"
    running = speculating(model, "all", k, endless)
    assert_same_stories(outputs(running, asked), want)
    assert_idle(running)
    again = [replace(one, params=replace(one.params, ignore_eos=True)) for one in asked]
    assert_same(run(running, again), endless)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_stop_strings_end_the_same_text(method: str, tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path))
    letters = SamplingParams(temperature=0.8, max_tokens=60, allowed_token_ids=tuple(range(66, 72)), ignore_eos=True)
    params = [
        replace(letters, seed=seed, stop=stops, include_stop_str_in_output=bool(seed % 2))
        for seed, stops in enumerate([("ab", "cc"), ("ba",), ("abc", "cab"), ("zz",), ("aaa", "bcb", "d")])
    ]
    found = []
    for config in (None, {"method": method, "num_speculative_tokens": 4}):
        llm = LLM(model, load_format="dummy", dtype="float32", speculative_config=config)
        answers = llm.generate([[66, 67, 68, 66, 67]] * len(params), params)
        found.append(
            [(one.text, one.token_ids, one.finish_reason, one.stop_reason) for a in answers for one in a.outputs]
        )
        assert_idle(llm.engine)
        llm.close()
    assert found[0] == found[1]
    assert {reason for _, _, reason, _ in found[0]} == {"stop", "length"}


SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer"}}})
GRAMMARS = {
    "schema": replace(DRAWN, grammar=Grammar("json_schema", SCHEMA), max_tokens=60, ignore_eos=False),
    "letters": replace(DRAWN, grammar=Grammar("regex", "[a-z]{4,40}"), ignore_eos=False, min_tokens=20, logprobs=1),
    "choice": replace(GREEDY, grammar=Grammar("choice", '["yes", "no", "nobody"]'), ignore_eos=False, n=2),
    "penalised": replace(DRAWN, grammar=Grammar("regex", "[ab]+"), frequency_penalty=1.0, max_tokens=30),
    "free": replace(DRAWN, allowed_token_ids=FEW),
}


@pytest.mark.parametrize(("kind", "k"), [("none", 3), ("some", 3), ("all", 5), ("ngram", 4), ("suffix", 4)])
def test_grammars_hold_behind_drafts(kind: str, k: int, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path)
    asked = [request(name, [9, 40 + i], params, (1,)) for i, (name, params) in enumerate(GRAMMARS.items())]
    want = outputs(engine(model, **LOADED), asked)
    assert all(one.error is None for one in want)
    expected = tokens_of(want)
    running = speculating(model, kind, k, {name: [*tokens, 9, 9, 9] for name, tokens in expected.items()})
    found = outputs(running, asked)
    assert_same_stories(found, want)
    if kind in ("some", "all"):
        assert several_at_once([one for one in found if one.request_id == "schema"])
    assert_idle(running)


def tokens_of(found: Sequence[SequenceOutput]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for one in found:
        name = one.request_id if one.index == 0 else f"{one.request_id}#{one.index}"
        tokens.setdefault(name, []).extend(one.token_ids)
    return tokens


@pytest.mark.parametrize(("name", "kind"), [(WINDOW, "all"), (WINDOW, "ngram"), (HEAD, "mtp-some"), (HEAD, "mtp")])
def test_an_abort_between_drafts_leaves_nothing(name: str, kind: str) -> None:
    model, long = directory(name), replace(DRAWN, allowed_token_ids=FEW)
    asked = [request(f"r{i}", ids, replace(long, seed=i, n=1 + i % 2)) for i, ids in enumerate(prompts((5, 20, 7, 40)))]
    want = run(engine(model, **LOADED), asked)
    running = speculating(model, kind, 3, want)
    for one in asked:
        running.add(one)
    found: list[SequenceOutput] = []
    while running.has_work():
        found += running.step()
        open_ones = [seq for name in ("r1", "r3") for seq in running._requests.open.get(name, ())]
        if len(found) > 8 and open_ones:
            assert any(seq.drafts for seq in open_ones)
            running.abort(["r1"])
            running.abort_sequence("r3", 1)
            running.abort(["r3"])
    got = tokens_of(found)
    assert_same({name: got[name] for name in got if name[:2] in ("r0", "r2")}, {k: want[k] for k in ("r0", "r2")})
    assert_idle(running)
    assert_same(run(running, asked), want)
    assert_idle(running)


class Forcing(Watch):
    """An observer that replaces what is sampled by the tokens of a course."""

    def __init__(self, courses: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.courses = courses
        self.count: dict[str, int] = dict.fromkeys(courses, 0)

    def token(self, request_id: str, index: int, chosen: int) -> int:
        self.count[request_id] += 1
        return self.courses[request_id][self.count[request_id] - 1]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (WINDOW, "none"),
        (WINDOW, "some"),
        (WINDOW, "all"),
        (WINDOW, "ngram"),
        (HEAD, "mtp-some"),
        (WINDOW, "eagle3-all"),
    ],
)
def test_an_observer_sees_the_same_and_forces_the_same(name: str, kind: str) -> None:
    model, params = directory(name), replace(GREEDY, max_tokens=15)
    asked = [request(f"r{i}", ids, params) for i, ids in enumerate(prompts((3, 18, 40)))]
    courses = {one.request_id: tuple(9 + (i * j) % 4 for j in range(15)) for i, one in enumerate(asked, 1)}
    plain, seen = Forcing(courses), Forcing(courses)
    want = run(engine(model, plain, **LOADED), asked)
    assert {name: tuple(tokens) for name, tokens in want.items()} == courses
    running = speculating(model, kind, 3, want, watch=seen)
    found = outputs(running, asked)
    assert tokens_of(found) == want
    assert several_at_once(found) or kind == "none"
    assert {name: len(rows) for name, rows in seen.seen.items()} == {
        name: len(rows) for name, rows in plain.seen.items()
    }
    assert_same_logits(seen, plain, 1e-4)
    assert_idle(running)


@pytest.mark.parametrize(("name", "kind"), [(WINDOW, "all"), (HEAD, "mtp-all"), (HEAD, "mtp")])
def test_a_row_without_numbers_behind_drafts_ends_its_request_alone(name: str, kind: str) -> None:
    """Its tokens before are told; a neighbour does not notice."""
    model = directory(name)
    plain = engine(model, **LOADED)
    asked = [request(f"r{i}", ids, replace(DRAWN, seed=i)) for i, ids in enumerate(prompts((5, 9)))]
    want = run(plain, asked)
    others = {*want["r1"], *asked[0].prompt_ids, *asked[1].prompt_ids}
    broken = next(token for token in want["r0"][2:] if token not in others)
    running = speculating(model, kind, 7, want)
    for one in (plain, running):
        one.model.embedding.weight.data[broken] = torch.nan
        one.reset_prefix_cache()
    expected, found = outputs(plain, asked), outputs(running, asked)
    assert_same_stories(found, expected)
    assert story_of(found, "r0", 0).end[0] == "error" and story_of(found, "r1", 0).end[0] == "length"
    assert several_at_once(found) or kind == "mtp"
    assert_idle(running)
