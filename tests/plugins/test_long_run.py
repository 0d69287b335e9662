"""2,000 mixed requests inside vLLM, with aborts, reused prefixes and too few blocks: no wrong token, nothing kept."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plugins.hosting import hosted
from tiny_checkpoints import write_tiny

from allotrope import LLM, SamplingParams
from allotrope.architectures.llama import tiny_mistral
from allotrope.architectures.qwen3_next import tiny_qwen3_next

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(1800)]

REQUESTS, DIFFERENT, LONGEST, MOST = 2000, 200, 200, 24
# Between the middle of a run and its end.
GROWN_BYTES = 64 << 20


def draw(rng: random.Random) -> list[list[int]]:
    """Prompts of 1 to LONGEST tokens, short ones most often; every third begins like another one."""
    found: list[list[int]] = []
    for i in range(DIFFERENT):
        ids = [rng.randrange(300) for _ in range(1 + int((LONGEST - 1) * rng.random() ** 2))]
        if i % 3 == 2:
            other = rng.choice(found)[: len(ids) - 1]
            ids[: len(other)] = other
        found.append(ids)
    return found


@pytest.mark.parametrize("config", [tiny_mistral, tiny_qwen3_next], ids=["windows", "states"])
def test_many_requests(config: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    rng = random.Random(0)
    path = write_tiny(config(), tmp_path).directory
    drawn = draw(rng)
    greedy = SamplingParams(max_tokens=MOST, temperature=0.0, ignore_eos=True)
    alone = [list(one.outputs[0].token_ids) for one in LLM(str(path), dtype="float32").generate(drawn, greedy)]
    with hosted(path, max_num_seqs=24, max_num_batched_tokens=256, enable_prefix_caching=True) as probe:
        few = 4 * probe.blocks_for_one()
    options = {"max_num_seqs": 24, "max_num_batched_tokens": 256, "num_gpu_blocks_override": few}
    with hosted(path, enable_prefix_caching=True, **options) as running:
        pool = running.core.scheduler.kv_cache_manager.block_pool
        free, engine = pool.get_num_free_blocks(), running.llm.llm_engine
        waiting = [(f"r{i}", rng.randrange(DIFFERENT), rng.randint(1, MOST)) for i in range(REQUESTS)]
        asked = {name: (prompt, count) for name, prompt, count in waiting}
        doomed = {name: rng.randint(0, 12) for name in asked if rng.random() < 0.15}
        answers: dict[str, list[int]] = {}
        aborted: set[str] = set()
        middle = 0
        from vllm import SamplingParams as Theirs

        while waiting or engine.has_unfinished_requests():
            for _ in range(min(len(waiting), rng.randint(0, 6))):
                name, prompt, count = waiting.pop()
                params = Theirs(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
                engine.add_request(name, {"prompt_token_ids": drawn[prompt]}, params)
                answers[name] = []
            for output in engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
            for name in [name for name in doomed if name in answers]:
                doomed[name] -= 1
                if doomed[name] < 0:
                    del doomed[name]
                    engine.abort_request([name])
                    aborted.add(name)
            if not middle and len(waiting) < REQUESTS // 2:
                middle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - middle) * 1024
        preemptions, hits = (running.metric(f"vllm:{name}") for name in ("num_preemptions", "prefix_cache_hits"))
        running.assert_ours()
        assert pool.get_num_free_blocks() == free, "blocks are still held"
    wrong = []
    for name, (prompt, count) in asked.items():
        want = alone[prompt][:count]
        found = answers[name]
        if found != want[: len(found)] or (len(found) < count and name not in aborted):
            wrong.append((name, len(drawn[prompt]), found, want))
    assert not wrong, f"{len(wrong)} of {REQUESTS}, the first: {wrong[0]}"
    assert len(aborted) > REQUESTS // 20 and hits > 0 and preemptions > 0, (len(aborted), hits, preemptions)
    assert grown < GROWN_BYTES, f"memory grew by {grown} bytes"
