"""Outputs held to grammars: every finished answer validates, whatever else the request asks for and the engine does."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from engine.watching import assert_idle, drain, engine, outputs, request
from server.tiny_model import write_tiny_model

from allotrope.engine.engine import Engine
from allotrope.errors import InvalidRequest
from allotrope.llm import LLM, Completion
from allotrope.request import NOTHING_ALLOWED, Grammar, SamplingParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 300},
        "b": {"enum": ["x", "yy", None]},
        "c": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
HELD = SamplingParams(temperature=1.0, max_tokens=400, grammar=JSON)
PROMPT = [9, 40, 41]
# Of the tiny tokenizer.
EOS = 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["off", "on", "drafts"])
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    """Steps that run one after the other, steps launched before the tokens of the one before are read, and steps that
    verify drafts."""
    options: dict[str, Any] = {"async_scheduling": request.param}
    if request.param == "drafts":
        lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 2, "adaptive": False}
        options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, **lookup}}
    loaded = LLM(str(model), load_format="dummy", dtype="float32", max_num_seqs=16, **options)
    yield loaded
    loaded.close()


def answers(llm: LLM, *params: SamplingParams, prompts: Sequence[Any] | None = None) -> list[Completion]:
    found = llm.generate(prompts or [PROMPT] * len(params), params)
    return [completion for output in found for completion in output.outputs]


def assert_valid(completion: Completion, schema: dict[str, Any] = SCHEMA) -> None:
    assert completion.finish_reason == "stop", completion
    jsonschema.validate(json.loads(completion.text), schema)


def test_every_finished_answer_validates(llm: LLM) -> None:
    found = answers(llm, *(replace(HELD, seed=seed, n=2) for seed in range(12)))
    assert len({one.text for one in found}) > 12, "answers differ"
    for one in found:
        assert_valid(one)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.0},
        {"n": 4},
        {"logprobs": 3},
        {"logprobs": 2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"min_tokens": 60},
        {"ignore_eos": True},
        {"ignore_eos": True, "min_tokens": 100},
        {"logit_bias": {EOS: 100.0, 40: -5.0}},
        {"logit_bias": {EOS: -100.0}},
        {"prompt_logprobs": 1},
        {"allowed_token_ids": tuple(range(2, 300))},
        {"stop": ("zzzz",), "include_stop_str_in_output": True},
    ],
    ids=str,
)
def test_with_every_other_parameter(llm: LLM, more: dict[str, Any]) -> None:
    params = replace(HELD, seed=5, **more)
    if more == {"temperature": 0.0}:
        # Greedily, random weights write white space in circles.
        params = replace(params, grammar=Grammar("regex", '\\{"a": [0-9]{1,3}\\}'))
    for one in answers(llm, params):
        if params.temperature:
            assert one.text.endswith("}")
            text = one.text
            jsonschema.validate(json.loads(text), SCHEMA)
        assert one.finish_reason == "stop"
        if params.logprobs is not None:
            assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)


def test_logprobs_are_those_of_the_raw_distribution(llm: LLM) -> None:
    """The mask takes nothing from them: the likeliest tokens are there, though the grammar forbids them."""
    params = SamplingParams(temperature=1.0, max_tokens=4, logprobs=5, grammar=Grammar("choice", '["yes"]'))
    free = answers(llm, replace(params, grammar=None))[0].logprobs
    held = answers(llm, params)[0].logprobs
    assert free is not None and held is not None
    assert held[0].top == free[0].top
    assert held[0].token_id not in {token for token, _ in held[0].top}


def test_a_complete_grammar_ends_the_answer(llm: LLM) -> None:
    """Whatever holds its end back: no other token can follow."""
    once = SamplingParams(temperature=1.0, max_tokens=50, grammar=Grammar("choice", '["yes", "no"]'))
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 40}, {"allowed_token_ids": tuple(range(4, 260))}):
        (one,) = answers(llm, replace(once, **more))
        assert one.text in ("yes", "no") and one.finish_reason == "stop"


def test_min_tokens_and_ignore_eos_hold_an_optional_end_back(llm: LLM) -> None:
    letters = SamplingParams(temperature=1.0, max_tokens=40, grammar=Grammar("regex", "[a-z]+"), seed=3)
    for more, finish in (({"min_tokens": 30}, ("stop", "length")), ({"ignore_eos": True}, ("length",))):
        (one,) = answers(llm, replace(letters, logit_bias={EOS: 20.0}, **more))
        assert len(one.token_ids) >= 30 and one.finish_reason in finish
        assert one.text.isalpha() and one.text.islower()


def test_a_length_may_leave_it_unfinished(llm: LLM) -> None:
    (one,) = answers(llm, replace(HELD, max_tokens=3))
    assert one.finish_reason == "length" and one.text.startswith("{")


def test_a_stop_string_ends_it_early(llm: LLM) -> None:
    (one,) = answers(llm, replace(HELD, stop=('"b"',)))
    assert one.stop_reason == '"b"' and one.text.startswith("{")


@pytest.mark.parametrize("after", ["</t>", " the", "aab"])
def test_it_begins_behind_a_text(llm: LLM, after: str) -> None:
    """However the text is cut into tokens; no end comes before it, and what follows it validates."""
    # The bytes of the text are likely, so that it comes soon.
    likely = {token: 8.0 for char in set(after) for token in llm.tokenizer.encode(char, add_special_tokens=False)}
    params = replace(HELD, grammar=replace(JSON, after=after), max_tokens=480, logit_bias={**likely, EOS: 5.0})
    found = answers(llm, *(replace(params, seed=seed) for seed in range(6)))
    finished = [one for one in found if one.finish_reason == "stop"]
    assert finished
    for one in finished:
        assert after in one.text
        answer = one.text.partition(after)[2]
        jsonschema.validate(json.loads(answer), SCHEMA)


def test_other_rows_of_the_step_are_as_alone(llm: LLM) -> None:
    """A grammar beside a free request changes nothing of it."""
    free = SamplingParams(temperature=1.0, seed=11, max_tokens=30, ignore_eos=True)
    alone = answers(llm, free)[0].token_ids
    held = answers(llm, replace(HELD, seed=1), free, replace(HELD, seed=2))
    assert held[1].token_ids == alone


def test_tokens_are_those_of_steps_one_after_the_other(model: Path, llm: LLM) -> None:
    params = [replace(HELD, seed=seed) for seed in range(4)] + [SamplingParams(seed=9, max_tokens=20)]
    plain = LLM(str(model), load_format="dummy", dtype="float32", async_scheduling="off")
    want = [one.token_ids for one in answers(plain, *params)]
    plain.close()
    assert [one.token_ids for one in answers(llm, *params)] == want


def small(model: Path, **options: Any) -> Engine:
    return engine(model, load_format="dummy", **options)


@pytest.mark.parametrize("schedule", ["off", "on"])
def test_preemption_keeps_the_state(model: Path, schedule: str) -> None:
    """Too few pages for all: sequences give theirs up and come back, and nothing else changes."""
    wanted = [request(f"r{i}", [9, 10 + i], replace(HELD, seed=i, max_tokens=150), (EOS,)) for i in range(6)]
    roomy = small(model, async_scheduling=schedule, enable_prefix_caching=False)
    tight = small(
        model, async_scheduling=schedule, enable_prefix_caching=False, max_model_len=192, kv_cache_memory_bytes=200_000
    )
    want, got = run_all(roomy, wanted), run_all(tight, wanted)
    assert tight.stats().preemptions > 0
    assert got == want
    assert_idle(tight)


def run_all(running: Engine, requests: Sequence[Any]) -> dict[str, list[int]]:
    for one in requests:
        running.add(one)
    return drain(running)


@pytest.mark.parametrize("schedule", ["off", "on"])
def test_an_abort_leaves_nothing(model: Path, schedule: str) -> None:
    running = small(model, async_scheduling=schedule)
    running.add(request("gone", PROMPT, replace(HELD, n=2), (EOS,)))
    running.add(request("stays", PROMPT, replace(HELD, seed=3), (EOS,)))
    for _ in range(5):
        running.step()
    kept = [weakref.ref(seq.sampling.constraint) for seq in running._requests.open["gone"]]
    running.abort(["gone"])
    found = drain(running)["stays"]
    running.step()
    assert_idle(running)
    running._loop._sampling = None
    gc.collect()
    assert found and all(one() is None for one in kept)


@pytest.mark.parametrize(
    ("grammar", "keyword"),
    [
        (Grammar("json_schema", '{"type": "object", "unevaluatedProperties": false}'), "unevaluatedProperties"),
        (Grammar("json_schema", '{"not": {}}'), "not"),
        (Grammar("json_schema", "[" * 100_000), "nested deeper"),
        (Grammar("json_schema", "{"), "no JSON"),
        (Grammar("json_schema", '{"$ref": "#"}'), "no output can follow it"),
        (Grammar("regex", "(" * 1000), "nested deeper"),
        (Grammar("regex", "a" * 100_000), "at most"),
        (Grammar("choice", "[]"), "at least one"),
        (Grammar("choice", json.dumps([str(i) for i in range(10_000)])), "at most"),
        (Grammar("lark", "start: none"), "none"),
        (Grammar("structural_tag", '{"type": "structural_tag", "format": {"type": "zork"}}'), "zork"),
        (Grammar("structural_tag", "{}"), "structures and triggers"),
        (Grammar("json_schema", "x" * 2_000_000), "at most"),
        (Grammar("json_object", after=""), "after"),
        (Grammar("zork", "x"), "zork"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_what_is_refused_says_why_and_harms_nobody(model: Path, grammar: Grammar, keyword: str) -> None:
    running = small(model)
    with pytest.raises(InvalidRequest, match=keyword) as caught:
        running.add(request("bad", PROMPT, replace(HELD, grammar=grammar), (EOS,)))
    assert caught.value.param == "grammar"
    assert_idle(running)
    running.add(request("good", PROMPT, replace(HELD, max_tokens=5), (EOS,)))
    assert len(drain(running)["good"]) == 5


def test_a_grammar_that_grows_too_complex_ends_its_request_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allotrope.grammars.llguidance_backend._MAX_LEXER_STATES", 80)
    bad = Grammar("regex", "[ab]*a[ab]{40}c")
    running = small(model)
    running.add(request("bad", PROMPT, replace(HELD, grammar=bad, ignore_eos=True, seed=1), (EOS,)))
    running.add(request("good", PROMPT, replace(HELD, max_tokens=5), (EOS,)))
    found = outputs(running, [])
    assert sum(len(one.token_ids) for one in found if one.request_id == "good") == 5
    (end,) = (one for one in found if one.request_id == "bad" and one.finish_reason)
    assert end.finish_reason == "error" and "its grammar cannot be followed further" in str(end.error)
    assert_idle(running)


@pytest.mark.parametrize("method", ["fill", "take"])
@pytest.mark.parametrize("schedule", ["off", "on"])
def test_what_the_library_raises_ends_its_request_alone(
    model: Path, schedule: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from allotrope.grammars.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher

    running = small(model, async_scheduling=schedule)
    for name in ("bad", "good"):
        running.add(request(name, PROMPT, replace(HELD, max_tokens=8, seed=1), (EOS,)))
    running.step()
    ((seq,), _) = running._requests.open.values()
    broken: Any = seq.sampling.constraint
    fill, take = LLGuidanceBackend.fill, LLGuidanceMatcher.take

    def raises_in_fill(backend: Any, matchers: Any, bits: Any) -> None:
        if any(matcher is broken.matcher for matcher, _ in matchers):
            raise RuntimeError("no such\nluck")
        fill(backend, matchers, bits)

    def raises_in_take(matcher: Any, token: int) -> bool:
        if matcher is broken.matcher:
            raise RuntimeError("no such\nluck")
        return take(matcher, token)

    if method == "fill":
        monkeypatch.setattr(LLGuidanceBackend, "fill", raises_in_fill)
    else:
        monkeypatch.setattr(LLGuidanceMatcher, "take", raises_in_take)
    found = outputs(running, [])
    (end,) = (one for one in found if one.request_id == "bad" and one.finish_reason)
    assert end.finish_reason == "error" and "no such luck" in str(end.error)
    assert [one.finish_reason for one in found if one.request_id == "good"][-1] == "length"
    assert_idle(running)


def test_allowed_ids_that_exclude_the_grammar_fail_alone(model: Path) -> None:
    running = small(model)
    found = outputs(running, [request("none", PROMPT, replace(HELD, allowed_token_ids=(5,)), (EOS,))])
    assert found[-1].finish_reason == "error" and found[-1].error == NOTHING_ALLOWED
    assert_idle(running)


def test_a_grammar_that_leaves_no_token_leaves_the_prefix_to_others(model: Path) -> None:
    running = small(model, enable_prefix_caching=True)
    shared = list(range(20, 60))
    plain = SamplingParams(temperature=0.0, max_tokens=2)
    outputs(running, [request("first", shared, plain)])
    outputs(running, [request("none", shared, replace(HELD, allowed_token_ids=(5,)), (EOS,))])
    again = outputs(running, [request("again", shared, plain)])
    assert max(one.cached_tokens for one in again) >= 32
    assert_idle(running)


def test_offline_the_client_hears_which_limit_left_no_token(llm: LLM) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.generate([PROMPT], replace(HELD, allowed_token_ids=(5,)))
    assert (str(refused.value), refused.value.param) == (NOTHING_ALLOWED, "allowed_token_ids")
    assert_idle(llm.engine)


def test_allowed_ids_that_end_behind_accepted_drafts_are_named(llm: LLM) -> None:
    only = llm.tokenizer.encode("z")[-1]
    for count in range(2, 6):
        grammar = Grammar("regex", "z" * count + "y")
        params = SamplingParams(temperature=0.0, max_tokens=9, grammar=grammar, allowed_token_ids=(only,))
        found = outputs(llm.engine, [request(f"z{count}", [only] * 9, params, (EOS,))])
        assert [one.error for one in found if one.finish_reason] == [NOTHING_ALLOWED]
        assert sum(len(one.token_ids) for one in found) == count


def test_a_missing_package_says_what_to_install(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allotrope.grammars.backend.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"pip install 'allotrope\[structured\]'"):
        small(model).add(request("x", PROMPT, HELD, (EOS,)))


def test_xgrammar_follows_the_same_grammars(model: Path) -> None:
    """Where it is installed, each kind ends as it must; what it would pass over is refused by name."""
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
    loaded = LLM(str(model), load_format="dummy", dtype="float32", structured_outputs_backend="xgrammar")
    try:
        for more in ({"seed": 1}, {"seed": 2, "n": 2}, {"seed": 3, "ignore_eos": True}, {"seed": 4, "min_tokens": 80}):
            for one in answers(loaded, replace(HELD, **more)):
                assert_valid(one)
        kinds = {
            Grammar("choice", '["yes", "n\\"o"]'): {"yes", 'n"o'},
            Grammar("regex", "a[bc]d"): {"abd", "acd"},
            Grammar("lark", 'start: "l" ("m" | "n")'): {"lm", "ln"},
            Grammar("lark", 'root ::= "p"'): {"p"},
        }
        for grammar, allowed in kinds.items():
            assert answers(loaded, replace(HELD, grammar=grammar))[0].text in allowed
        tagged = Grammar("structural_tag", json.dumps({"format": tag}))
        text = answers(loaded, replace(HELD, grammar=tagged))[0].text
        jsonschema.validate(json.loads(text.removeprefix("<f>").removesuffix("</f>")), SCHEMA)
        for source, keyword in (('{"not": {}}', "not"), ('{"allOf": [{}]}', "allOf"), ("{", "no JSON")):
            with pytest.raises(InvalidRequest, match=keyword):
                answers(loaded, replace(HELD, grammar=Grammar("json_schema", source)))
    finally:
        loaded.close()


def test_a_slow_compilation_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from allotrope.grammars import compiler
    from allotrope.grammars.llguidance_backend import LLGuidanceBackend

    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(LLGuidanceBackend, "compile", lambda self, grammar: time.sleep(0.5))
    running = small(model)
    with pytest.raises(InvalidRequest, match="takes longer than"):
        running.add(request("slow", PROMPT, HELD, (EOS,)))


def test_a_panic_of_the_library_is_a_refusal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Rust raises there is no Exception."""
    from allotrope.grammars.llguidance_backend import LLGuidanceBackend

    class Panic(BaseException):
        pass

    def panic(backend: Any, grammar: Grammar) -> Any:
        raise Panic("no such luck")

    monkeypatch.setattr(LLGuidanceBackend, "compile", panic)
    with pytest.raises(InvalidRequest, match="no such luck"):
        small(model).compile_grammar(JSON).result(timeout=10)
