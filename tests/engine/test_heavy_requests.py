"""Requests that ask for much: what they take of a step is bounded, and nothing of a broken one is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.watching import GREEDY, Watch, engine, outputs, request, run
from tiny_checkpoints import prompts, write_tiny

from allotrope import LLM, SamplingParams
from allotrope.architectures.llama import tiny_llama
from allotrope.architectures.qwen3_next import tiny_qwen3_next
from allotrope.engine.scheduler import PROMPT_LOGPROBS_CHUNK

SCORED = replace(GREEDY, prompt_logprobs=2, max_tokens=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny(tiny_llama(), tmp_path_factory.mktemp("tiny")).directory


def test_scored_prompts_share_a_bound(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of many prompts at once would not fit: steps score so many tokens of prompts, whoever asks for them."""
    options = {"max_num_batched_tokens": 2048, "max_num_seqs": 16, "enable_prefix_caching": False}
    asked = [request(str(i), ids, SCORED) for i, ids in enumerate(prompts((150,) * 6))]
    alone = [outputs(engine(model, **options), [one])[0].prompt_logprobs for one in asked]
    running = engine(model, **options)
    scored: list[int] = []
    inner = running._executor.run

    def counted(plan, prev_sampled=None):
        scored.append(sum(row.num_logits for row in plan.rows if len(row.ids) > 1))
        return inner(plan, prev_sampled)

    monkeypatch.setattr(running._executor, "run", counted)
    found = {one.request_id: one.prompt_logprobs for one in outputs(running, asked) if one.prompt_logprobs}
    assert max(scored) == PROMPT_LOGPROBS_CHUNK and sum(scored) >= 6 * 149
    for i, want in enumerate(alone):
        got = found[str(i)]
        assert want is not None and got is not None
        assert [one and one.token_id for one in got] == [one and one.token_id for one in want]


@pytest.mark.parametrize("caching", [False, True])
def test_the_first_of_several_tells_the_prompts_scores(model: Path, caching: bool) -> None:
    (ids,) = prompts((PROMPT_LOGPROBS_CHUNK + 40,))
    running = engine(model, enable_prefix_caching=caching)
    first = outputs(running, [request("r", ids, replace(SCORED, n=2))])[0]
    assert first.index == 0 and first.prompt_logprobs is not None and len(first.prompt_logprobs) == len(ids)


def test_many_ids_are_walked_once(model: Path) -> None:
    """Lists with every id many times over choose and stop as their sets do."""
    (ids,) = prompts((9,))
    every = tuple(range(320))
    plain = run(engine(model), [request("r", ids)])
    allowed = replace(GREEDY, allowed_token_ids=every * 50)
    assert run(engine(model), [request("r", ids, allowed)]) == plain
    stop = replace(GREEDY, stop_token_ids=(plain["r"][2],) * 50_000, ignore_eos=True)
    assert run(engine(model), [request("r", ids, stop)])["r"] == plain["r"][: plain["r"].index(plain["r"][2]) + 1]


def test_a_batch_larger_than_the_queue(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, n=2)
    llm = LLM(str(model), max_num_seqs=8, max_num_waiting=3, dtype="float32")
    found = llm.generate([list(ids) for ids in prompts((4,) * 12)], params)
    assert [len(one.outputs) for one in found] == [2] * 12


def test_nothing_of_a_sequence_without_numbers_is_kept(tmp_path: Path) -> None:
    """Nor the states that were kept of it on the way."""
    path = write_tiny(tiny_qwen3_next(), tmp_path).directory
    running = engine(path, Watch(), max_num_batched_tokens=16, max_num_seqs=2)
    (ids,) = prompts((70,))
    kept = [[pool.find(key) for key in _keys(running, ids)] for pool in running._requests.kv_cache_manager.pools]
    assert not any(page for pages in kept for page in pages)
    running.add(request("r", ids))
    while not running._requests.open["r"][0].output_len:
        running.step()
    (seq,) = running._requests.open["r"]
    assert any(pool.find(key) for pool in running._requests.kv_cache_manager.pools for key in seq.chain.keys)
    made = list(seq.chain.keys)
    running._requests.end(seq, evict=True)
    assert not any(pool.find(key) for pool in running._requests.kv_cache_manager.pools for key in made)
    assert not any(pool.used for pool in running._requests.kv_cache_manager.pools)


def _keys(running, ids):
    chain = running._requests.kv_cache_manager.prefix.chain()
    chain.key(list(ids), len(ids) // chain.step * chain.step)
    return chain.keys
