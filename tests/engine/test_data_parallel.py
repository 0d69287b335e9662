"""Ranks with requests and caches of their own give the tokens of one rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.rank_faults import FaultyEngine
from engine.speculating import LOADED, directory, mixed_requests, several_at_once, speculating
from engine.static_ranks import start_static_ranks
from engine.static_reference import static_steps
from engine.test_distributed_executor import QUICK, compare, write
from engine.test_expert_parallel import WITH_EXPERTS
from engine.test_rank_faults import assert_ended
from engine.test_structured_output import HELD, answers, assert_valid
from engine.watching import GREEDY, assert_idle, assert_same, drain, engine, outputs, request, run
from server.tiny_model import write_tiny_model
from tiny_checkpoints import prompts

from allotrope.architectures.registry import ARCHITECTURES
from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.errors import ConfigError
from allotrope.llm import LLM
from allotrope.request import Request, SamplingParams, SequenceOutput
from allotrope.verify.options import VerifyOptions
from allotrope.verify.run import verify

pytestmark = pytest.mark.usefixtures("kept_workers")

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {"tensor_parallel_size": 1, "data_parallel_size": 2},
    "DP2xEP2": {"tensor_parallel_size": 1, "data_parallel_size": 2, "enable_expert_parallel": True},
    "TP2xDP2": {"data_parallel_size": 2},
    "TP2xDP2xEP4": {"data_parallel_size": 2, "enable_expert_parallel": True},
}
WITHOUT_EXPERTS = ("LlamaForCausalLM",)
# Pairs of ranks that share attention, for one model in every run.
WITH_PAIRS = "DeepseekV32ForCausalLM"
CASES = [
    pytest.param(name, layout, marks=[pytest.mark.slow] if layout.startswith("TP2") and name != WITH_PAIRS else [])
    for name in QUICK
    for layout in LAYOUTS
    if name not in WITHOUT_EXPERTS or "EP" not in layout
]
OPTIONS: dict[str, Any] = {"load_format": "dummy", "max_model_len": 192, "max_num_seqs": 4, "page_size": 4}
OPTIONS |= {"max_num_batched_tokens": 32}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_ranks_with_requests_of_their_own_give_the_tokens_of_one(name: str, layout: str, tmp_path: Path) -> None:
    """Four requests, whose prompts run in chunks: in the end one rank has none."""
    compare(name, tmp_path, **LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(QUICK)))
def test_ranks_with_requests_of_their_own_give_the_tokens_of_one_everywhere(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, **LAYOUTS["DP2xEP2" if name in WITH_EXPERTS else "DP2"])


def asked() -> list[Request]:
    """Requests of all kinds, which end at different times."""
    params = [
        SamplingParams(max_tokens=9, ignore_eos=True, temperature=0, logprobs=3),
        SamplingParams(max_tokens=7, ignore_eos=True, temperature=0.8, seed=3),
        SamplingParams(max_tokens=5, ignore_eos=True, temperature=1.0, top_p=0.9, seed=4, frequency_penalty=0.5),
        SamplingParams(max_tokens=14, ignore_eos=True, temperature=1.0, top_k=5, seed=5, n=3),
        SamplingParams(max_tokens=3, ignore_eos=True, temperature=0, prompt_logprobs=2),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0, min_tokens=4, repetition_penalty=1.3),
        SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.5, seed=6),
        SamplingParams(max_tokens=4, ignore_eos=True, temperature=0),
    ]
    # The last is long enough for what caches an entry for every 128 tokens.
    lengths = (3, 30, 9, 50, 33, 21, 40, 140)
    return [request(f"r{i}", ids, one) for i, (ids, one) in enumerate(zip(prompts(lengths), params, strict=True))]


def told(running: Engine, requests: Sequence[Request]) -> dict[tuple[str, int], list[SequenceOutput]]:
    found: dict[tuple[str, int], list[SequenceOutput]] = {}
    for output in outputs(running, requests):
        found.setdefault((output.request_id, output.index), []).append(output)
    return found


def tokens_of(found: Mapping[tuple[str, int], Sequence[SequenceOutput]]) -> dict[str, list[int]]:
    return {f"{name}#{i}": [token for one in parts for token in one.token_ids] for (name, i), parts in found.items()}


def logprobs_of(found: Mapping[tuple[str, int], Sequence[SequenceOutput]]) -> Iterator[tuple[Any, ...]]:
    for key in sorted(found):
        for one in itertools.chain(*((*(o.logprobs or ()), *(o.prompt_logprobs or ())) for o in found[key])):
            if one is not None:
                yield (key, one.token_id, one.rank, [token for token, _ in one.top]), one.logprob


def preempt(running: Engine) -> None:
    """Send the last sequence of every rank back, as if its pages had run out."""
    for scheduler in running._requests.schedulers:
        if scheduler.running:
            last = scheduler.running.pop()
            scheduler.kv_cache_manager.free(last)
            scheduler.waiting.appendleft(last)


@pytest.mark.parametrize("scheduling", ["off", "on"])
@pytest.mark.parametrize("name", QUICK)
def test_whatever_requests_ask_for(name: str, scheduling: str, tmp_path: Path) -> None:
    """Draws, penalties, several sequences, log-probabilities; then from cached pages, preempted, and with others that
    are aborted. With async scheduling a step is launched before the tokens of the one before it are read."""
    torch.set_num_threads(1)
    model = write(name, tmp_path)
    alone = engine(model, **OPTIONS)
    want = told(alone, asked())
    own = told(alone, asked())
    assert tokens_of(own) == tokens_of(want)
    two = engine(model, data_parallel_size=2, threads=1, async_scheduling=scheduling, **OPTIONS)
    try:
        found = told(two, asked())
        assert_same(tokens_of(found), tokens_of(want))
        for got, expected in zip(logprobs_of(found), logprobs_of(want), strict=True):
            assert got[0] == expected[0] and abs(got[1] - expected[1]) < 1e-4
        stats = two.stats()
        assert [one.requests > 0 for one in stats.ranks] == [True, True]
        assert_idle(two)
        # The rank that has the prompt takes the request: as many hits as on one rank, where states have more room.
        assert_same(tokens_of(told(two, asked())), tokens_of(want))
        assert two.stats().prefix_hits >= alone.stats().prefix_hits > 0
        assert sum(one.requests_by_prefix for one in two.stats().ranks) > 0
        assert_idle(two)
        if scheduling == "off":
            check_disturbed(two, tokens_of(want))
    finally:
        two.close()


def check_disturbed(two: Engine, want: dict[str, list[int]]) -> None:
    two.reset_prefix_cache()
    found: dict[tuple[str, int], list[SequenceOutput]] = {}
    for one in asked():
        two.add(one)
    two.add(request("stranger", range(9, 49), replace(GREEDY, max_tokens=60, n=2)))
    for step in itertools.count():
        if step == 6:
            two.abort_sequence("stranger", 1)
        if step == 9:
            two.abort(["stranger"])
        if not two.has_work():
            break
        if step % 4 == 3:
            preempt(two)
        for output in two.step():
            found.setdefault((output.request_id, output.index), []).append(output)
    assert_same(tokens_of(found), want)
    assert_idle(two)


def test_pages_that_run_out_on_one_rank(tmp_path: Path) -> None:
    """Each rank has pages of its own: requests that do not fit beside each other on one rank run on two."""
    torch.set_num_threads(1)
    model = write("LlamaForCausalLM", tmp_path)
    few = {**OPTIONS, "kv_cache_memory_bytes": 120_000, "scheduler_reserve_full_isl": False}
    long = replace(GREEDY, max_tokens=40)
    some = [request(f"r{i}", ids, long) for i, ids in enumerate(prompts((50, 41, 33, 60)))]
    alone = engine(model, **few)
    want = run(alone, some)
    two = engine(model, data_parallel_size=2, threads=1, **few)
    try:
        assert_same(run(two, some), want)
        assert {key: 2 * pages for key, pages in alone.stats().pages_total.items()} == two.stats().pages_total
        assert two.stats().preemptions < alone.stats().preemptions
        assert_idle(two)
    finally:
        two.close()


def test_requests_go_to_the_cached_prefix_then_to_the_least_load(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    two = engine(write("LlamaForCausalLM", tmp_path), data_parallel_size=2, threads=1, **OPTIONS)
    try:
        first, second, other = prompts((40, 48, 35))
        two.add(request("a", first))
        two.add(request("b", second))
        assert [one.waiting for one in two.stats().ranks] == [1, 1]
        drain(two)
        two.add(request("c", [*second, 9, 10]))
        two.add(request("d", [*second, 11]))
        assert [one.waiting for one in two.stats().ranks] == [0, 2]
        two.add(request("e", other))
        assert [one.waiting for one in two.stats().ranks] == [1, 2]
        drain(two)
        assert [(one.requests, one.requests_by_prefix) for one in two.stats().ranks] == [(2, 0), (3, 2)]
    finally:
        two.close()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LlamaForCausalLM", "ngram"),
        ("Qwen3NextForCausalLM", "some"),
        ("Qwen3NextForCausalLM", "mtp-some"),
        ("DeepseekV3ForCausalLM", "mtp"),
        ("DeepseekV32ForCausalLM", "mtp-some"),
        ("DeepseekV4ForCausalLM", "mtp-some"),
        ("LlamaForCausalLM", "eagle3-some"),
        ("LlamaForCausalLM", "draft_model-some"),
    ],
)
def test_drafts(name: str, kind: str) -> None:
    """From text and of models, whose passes all ranks run together, some of them without sequences."""
    compare_drafts(name, kind)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LlamaForCausalLM", "ngram"),
        ("DeepseekV3ForCausalLM", "mtp-some"),
        ("LlamaForCausalLM", "eagle3-some"),
        ("LlamaForCausalLM", "draft_model-some"),
    ],
)
def test_drafts_of_pairs_of_ranks(name: str, kind: str) -> None:
    """A draft model shares its attention among the ranks that share the target's."""
    compare_drafts(name, kind, tensor_parallel_size=2)


def compare_drafts(name: str, kind: str, **layout: Any) -> None:
    torch.set_num_threads(1)
    alone = engine(directory(name), **LOADED)
    want = run(alone, mixed_requests())
    two = speculating(directory(name), kind, 3, want, data_parallel_size=2, threads=1, **layout)
    try:
        found = outputs(two, mixed_requests())
        tokens: dict[str, list[int]] = {}
        for one in found:
            key = one.request_id if one.index == 0 else f"{one.request_id}#{one.index}"
            tokens.setdefault(key, []).extend(one.token_ids)
        assert_same(tokens, want)
        assert several_at_once(found) or kind == "mtp"
        assert_idle(two)
    finally:
        two.close()


def test_answers_held_to_a_grammar(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    options = {"load_format": "dummy", "dtype": "float32", "max_num_seqs": 16}
    asks = [replace(HELD, seed=seed) for seed in range(6)]
    alone = LLM(str(write_tiny_model(tmp_path)), **options)
    want = [one.text for one in answers(alone, *asks)]
    alone.close()
    two = LLM(str(tmp_path), data_parallel_size=2, threads=1, **options)
    try:
        found = answers(two, *asks)
        for one in found:
            assert_valid(one)
        assert [one.text for one in found] == want
    finally:
        two.close()


@pytest.mark.parametrize(
    ("phase", "fault"),
    [("decode", "SIGKILL"), ("prefill", "raise"), pytest.param("decode", "hang", marks=pytest.mark.slow)],
)
def test_a_fault_of_a_rank_ends_the_engine(phase: str, fault: str, tmp_path: Path) -> None:
    ended = FaultyEngine(tmp_path, phase, fault, tensor_parallel_size=1, data_parallel_size=2).wait()
    assert_ended(ended, fault)


@pytest.mark.parametrize("scheduling", ["off", "on"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("DeepseekV32ForCausalLM", None),
        ("DeepseekV4ForCausalLM", None),
        ("DeepseekV3ForCausalLM", "mtp-some"),
        ("Qwen3NextForCausalLM", "mtp-some"),
        ("LlamaForCausalLM", "draft_model-some"),
    ],
)
def test_steps_on_static_buffers(
    name: str, kind: str | None, scheduling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: all ranks run decode steps of one padded size, some of them with padding rows alone, and so they run
    the passes of a draft model."""
    torch.set_num_threads(1)
    asked = [one for one in mixed_requests() if scheduling == "off" or one.params.repetition_penalty == 1.0]
    want = run(engine(directory(name), **LOADED), asked)
    start_static_ranks(tmp_path / "site", monkeypatch)
    shared: dict[str, Any] = {"data_parallel_size": 2, "threads": 1, "async_scheduling": scheduling}
    if kind is None:
        two = engine(directory(name), **LOADED, **shared)
    else:
        two = speculating(directory(name), kind, 3, want, **shared)
    try:
        runner = static_steps(two)
        assert_same(run(two, asked), want)
        assert_idle(two)
        assert runner.graphs is not None and runner.graphs.eager >= 10
    finally:
        two.close()


def test_verify_refuses_requests_that_are_not_all_on_one_rank() -> None:
    config = EngineConfig(model="LlamaForCausalLM", data_parallel_size=2)
    with pytest.raises(ConfigError, match="data_parallel_size=2; layers are looked into on one rank"):
        verify(config, VerifyOptions(random=True))
