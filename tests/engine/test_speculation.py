"""Speculative decoding changes no token: every family, kind of draft, number of drafts and way to run."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.draft_steps import DraftSteps
from engine.speculating import (
    LOADED,
    RATES,
    directory,
    drafts,
    families,
    mixed_requests,
    models,
    several_at_once,
    speculating,
    speculative_config,
)
from engine.static_reference import static_steps
from engine.watching import assert_idle, assert_same, engine, request
from tiny_checkpoints import prompts

from allotrope.attention.registry import FAMILIES
from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.engine.inputs import StepPlan
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.errors import ConfigError
from allotrope.request import Request, SamplingParams, SequenceOutput
from allotrope.verify.execution_modes import tight_settings

pytestmark = pytest.mark.usefixtures("kept_workers")

# What a draft model makes, of whatever kind.
HEADS = ("mtp", "mtp-some", "eagle3", "eagle3-some", "draft_model", "draft_model-some")
ALONE = ("mtp", "eagle3", "draft_model")
KINDS = ("ngram", "suffix", *RATES, *HEADS)
COUNTS = (1, 3, 7)
MODES = ("cold", "chunked", "warm", "preempted", "among-others", "static", "async")
ASKED = mixed_requests()
# So many that pages run out.
MORE = [
    request(f"more{i}", ids, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    for i, ids in enumerate(prompts((40, 50, 20)))
]
Case = tuple[str, str, int, str]


def covering_cases() -> list[Case]:
    """Cases in which each value of a factor meets each value of every other one that it can meet.

    Heads whose drafts are right now and then, whose passes differ with the number of drafts, meet pairs of these. Each
    model has accepted drafts in every way to run.
    """
    possible = [case for case in itertools.product(models(), KINDS, COUNTS, MODES) if drafts(*case[:2])]
    pairs = {case: {*itertools.combinations(enumerate(case), 2)} for case in possible}
    for case in possible:
        if "-" in case[1]:
            pairs[case].add(case[1:])
        if case[1] not in ("none", *ALONE):
            pairs[case].add((case[0], "accepted drafts", case[3]))
    missing: set[Any] = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(possible, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen, key=lambda case: models().index(case[0]))


def told(running: Engine, asked: Sequence[Request]) -> list[SequenceOutput]:
    """All outputs; none is an error."""
    for one in asked:
        running.add(one)
    found: list[SequenceOutput] = []
    for _ in range(3000):
        if not running.has_work():
            return found
        found += running.step()
        assert not [one.error for one in found if one.error]
    raise AssertionError(f"still at work: {running.stats()}")


def tokens_of(found: Sequence[SequenceOutput]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for one in found:
        name = one.request_id if one.index == 0 else f"{one.request_id}#{one.index}"
        tokens.setdefault(name, []).extend(one.token_ids)
    return tokens


@dataclass(frozen=True)
class Plain:
    """Without speculation: tokens, number of outputs, and those of the next turn. `hits`: cached tokens once requests
    were repeated, and once the next turn has followed."""

    tokens: Mapping[str, list[int]]
    steps: int
    answers: Mapping[str, list[int]]
    hits: tuple[int, int]


@functools.cache
def plain(name: str) -> Plain:
    torch.set_num_threads(1)
    running = engine(directory(name), **LOADED)
    found = told(running, ASKED)
    tokens = tokens_of(found)
    assert tokens_of(told(running, ASKED)) == tokens
    hits = running.stats().prefix_hits
    answers = tokens_of(told(running, next_turn(tokens)))
    hits_of_answers = running.stats().prefix_hits - hits
    running.close()
    return Plain(tokens, len(found), answers, (hits, hits_of_answers))


def next_turn(tokens: Mapping[str, list[int]]) -> list[Request]:
    """A request behind each answer."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return [
        request(f"next {one.request_id}", (*one.prompt_ids, *tokens[one.request_id], 7, 8, 9), params) for one in ASKED
    ]


def settings(name: str, kind: str, k: int, mode: str) -> dict[str, Any]:
    """The options of a mode."""
    if mode == "chunked":
        return {"max_num_batched_tokens": 12}
    if mode == "async":
        return {"async_scheduling": "on"}
    if mode != "preempted":
        return {}
    speculation = speculative_config(directory(name), kind.partition("-")[0] if kind in HEADS else "ngram", k)
    config = EngineConfig(model=str(directory(name)), dtype="float32", speculative_config=speculation, **LOADED)
    tight = tight_settings(config, 96, 8, reuse=True)
    return {
        key: tight[key] for key in ("max_model_len", "page_size", "kv_cache_memory_bytes", "scheduler_reserve_full_isl")
    }


def poison(running: Engine) -> None:
    """What nobody has stored must not be read; page 0 stays zero."""
    layers = running._executor.worker.model_runner.arena.layers  # type: ignore[attr-defined]
    views = [view for caches in layers for fields in caches.values() for view in fields.values()]
    for view in views:
        if view.is_floating_point():
            view[1:] = torch.nan
    # Where groups share a pool, the null page of a field lies among pages of others.
    for view in views:
        view[0] = 0


def unread_drafts(running: Engine) -> list[int]:
    """Of each step from now on, its rows behind drafts that the host had not read of when it launched the step."""
    counts: list[int] = []
    executor: Any = running._executor
    run = executor.run

    def counted(plan: StepPlan, prev_sampled: torch.Tensor | None = None) -> torch.Tensor:
        counts.append(sum(row.prev_sequence >= 0 for row in plan.rows))
        found: torch.Tensor = run(plan, prev_sampled)
        return found

    executor.run = counted
    return counts


def among_others(running: Engine) -> list[SequenceOutput]:
    """The requests arrive one after the other, among others that share their beginnings, end early or are aborted."""
    found: list[SequenceOutput] = []
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=9, ignore_eos=True)
    for i, one in enumerate(ASKED):
        running.add(request(f"before{i}", (*one.prompt_ids[:40], 7), params))
        running.add(one)
        running.add(request(f"gone{i}", one.prompt_ids, params))
        for _ in range(2 + i % 2):
            found += running.step()
        running.abort([f"gone{i}"])
    return found + told(running, [])


DRAFTED: dict[tuple[str, str], dict[tuple[str, int], list[int]]] = {}
"""By model and kind: the drafts of its head behind each number of output tokens, of the case with most of them."""


def assert_drafts_agree(name: str, kind: str, drafted: Mapping[tuple[str, int], list[int]]) -> None:
    """What a head drafts follows from the tokens before, however they were computed."""
    known = DRAFTED.setdefault((name, kind), {})
    assert any(drafted.values())
    for key, found in drafted.items():
        others = known.get(key, [])
        shared = min(len(others), len(found))
        assert found[:shared] == others[:shared], (key, found, others)
        known[key] = max(others, found, key=len)


@pytest.mark.parametrize(("name", "kind", "k", "mode"), covering_cases())
def test_tokens_are_those_of_plain_decoding(name: str, kind: str, k: int, mode: str) -> None:
    known = plain(name)
    want = known.tokens
    running = speculating(directory(name), kind, k, {**want, **known.answers}, **settings(name, kind, k, mode))
    runner = static_steps(running) if mode in ("static", "async") else None
    poison(running)
    asked = ASKED + MORE * (mode == "preempted")
    if mode == "async":
        # Penalties need the tokens of the step before.
        asked = [one for one in ASKED if one.params.repetition_penalty == 1.0]
        want = {name: tokens for name, tokens in want.items() if any(name.startswith(one.request_id) for one in asked)}
        ahead = unread_drafts(running)
    found = among_others(running) if mode == "among-others" else told(running, asked)
    assert_same(tokens_of(found), want)
    if mode == "async":
        assert any(ahead) == (kind in HEADS)
    assert_idle(running)
    own = [one for one in found if one.request_id.startswith("r")]
    if kind == "none":
        assert not several_at_once(own) and len(own) == (known.steps if mode != "async" else len(found))
    elif kind not in ALONE:
        assert several_at_once(own), "no draft was accepted"
    counted = running.stats().speculation
    assert counted is not None and counted.accepted_tokens == sum(len(one.token_ids) - 1 for one in found)
    if runner is not None:
        drafts = () if runner.drafts is None else runner.drafts.graphs
        ran = [graphs.eager for graphs in (runner.graphs, *drafts) if graphs is not None]
        assert min(ran[:2]) >= 2 and (kind not in HEADS or sum(ran[2:]) >= 3), ran
    if mode == "preempted" and "paged" in running.stats().pages_total:
        assert running.stats().preemptions
    if mode == "warm":
        assert_same(tokens_of(told(running, ASKED)), want)
        assert running.stats().prefix_hits == known.hits[0]
        assert_same(tokens_of(told(running, next_turn(want))), known.answers)
        assert running.stats().prefix_hits == sum(known.hits)
        assert_idle(running)
    if kind in HEADS and mode != "among-others":
        assert_drafts_agree(name, kind, running.head.drafted)  # type: ignore[attr-defined]
    running.close()


HEADED = [(name, head) for name in models() for head in ("mtp", "eagle3") if drafts(name, head)]


@pytest.mark.parametrize(("name", "head"), HEADED)
def test_drafts_are_those_of_a_head_that_reads_the_whole_sequence(name: str, head: str) -> None:
    """Without caches: all tokens through the model and its head at once, then draft after draft."""
    torch.set_num_threads(1)
    running = speculating(directory(name), head, 4, {}, max_num_batched_tokens=16)
    one = request("r", prompts((37,))[0], SamplingParams(temperature=0.9, seed=1, max_tokens=9, ignore_eos=True))
    (tokens,) = tokens_of(told(running, [one])).values()
    worker: Any = running._executor.worker  # type: ignore[attr-defined]
    steps = DraftSteps.of(worker.model, worker.draft_model)
    drafted = {key: [*found] for key, found in running.head.drafted.items()}  # type: ignore[attr-defined]
    assert max(len(found) for found in drafted.values()) == 4
    for (_, count), found in drafted.items():
        steps.clear()
        ids, drafts_of_step = [*one.prompt_ids, *tokens[:count]], []
        _, features = steps.target_pass(ids[:-1], 0)
        hidden = steps.draft_pass(features, ids[1:], 0)[-1:]
        for position in range(len(ids) - 1, len(ids) - 1 + len(found)):
            drafts_of_step += steps.draft.greedy(hidden).tolist()
            hidden = steps.draft_pass(hidden, drafts_of_step[-1:], position)
        assert found == drafts_of_step
    running.close()


def test_every_family_and_every_pair_is_covered() -> None:
    cases = covering_cases()
    assert {family for name in models() for family in families(name)} == set(FAMILIES)
    assert {name for name, *_ in cases} == set(models())
    met = {(kind, mode) for _, kind, _, mode in cases}
    assert met == set(itertools.product(KINDS, MODES))
    for head in HEADS:
        assert {name for name, kind, *_ in cases if kind == head} == {name for name in models() if drafts(name, head)}


@pytest.mark.parametrize("kind", ["ngram", "suffix", "some", "mtp-some", "eagle3-some", "draft_model-some"])
def test_two_ranks_give_the_tokens_of_one(kind: str) -> None:
    name = next(name for name in models() if drafts(name, kind))
    want = plain(name).tokens
    running = speculating(directory(name), kind, 3, want, tensor_parallel_size=2, threads=1)
    try:
        found = told(running, ASKED)
        assert_same(tokens_of(found), want)
        assert several_at_once(found)
        assert_idle(running)
    finally:
        running.close()


@pytest.mark.parametrize("drafts", [0, 17])
def test_a_number_of_drafts_that_a_head_cannot_mean_is_refused(drafts: int, tmp_path: Path) -> None:
    shutil.copytree(directory("MistralForCausalLM"), tmp_path, dirs_exist_ok=True)
    config = tmp_path / "eagle3" / "config.json"
    flat = json.loads(config.read_text())
    outside = ("architectures", "draft_vocab_size", "eagle_config")
    layer = {key: value for key, value in flat.items() if key not in outside}
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafts}
    head = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer | {"model_type": "llama"},
        "draft_vocab_size": flat["draft_vocab_size"],
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "verifier": {}, "proposal_methods": [proposal],
        },
    }  # fmt: skip
    config.write_text(json.dumps(head))
    options = json.dumps({"method": "eagle3", "model": str(tmp_path / "eagle3")})
    with pytest.raises(ConfigError, match=f"names {drafts} drafts. Give 1 to 16"):
        resolve_load_plan(EngineConfig(model=str(tmp_path), speculative_config=options, **LOADED))
