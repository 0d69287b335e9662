"""States that are kept while decoding: a next prompt begins with the answer, and computes what a cold one does."""

from __future__ import annotations

from collections import abc
from pathlib import Path
from typing import Any

import pytest
from engine.static_reference import static_steps

from allotrope import LLM, SamplingParams
from allotrope.engine.kv_cache_manager import KVCacheManager
from allotrope.engine.sequence import Sequence

MODEL = Path(__file__).parents[2] / "train" / "models" / "qwen3_next"
PROMPT = list(b"for name in names: print(name)\n" * 5)
# As many drafts are accepted as the schedule says, so that positions lie on and behind the first token of a step.
FORCED = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5, "adaptive": False}
MTP = {"method": "mtp", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def loaded(**options: Any) -> LLM:
    small = {"threads": 1, "dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 26}
    return LLM(str(MODEL), device="cpu", max_model_len=512, **small, **options)


def top(llm: LLM, prompt: abc.Sequence[int]) -> tuple[dict[int, float], int]:
    """Logprobs of the best tokens behind a prompt, and its cached tokens."""
    output = llm.generate([list(prompt)], SamplingParams(temperature=0, max_tokens=1, logprobs=8))[0]
    (step,) = output.outputs[0].logprobs or ()
    return dict(step.top), output.cached_tokens


@pytest.mark.parametrize(
    ("speculation", "unread"),
    [(None, False), (NGRAM | FORCED, False), (MTP | FORCED, True)],
    ids=["plain", "drafts", "unread-drafts"],
)
def test_a_prompt_that_begins_with_an_answer(speculation: Any, unread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`unread`: a state may have to be kept before it is known whether its position is reached."""
    replays: list[int] = []
    allocate = KVCacheManager.allocate

    def recorded(self: KVCacheManager, seq: Any) -> bool:
        done = allocate(self, seq)
        replays.append(seq.replay)
        return done

    monkeypatch.setattr(KVCacheManager, "allocate", recorded)
    options = {"async_scheduling": "on"} if unread else {}
    warm, cold = loaded(speculative_config=speculation, **options), loaded(enable_prefix_caching=False)
    if unread:
        static_steps(warm.engine)
    tentative = settled(monkeypatch)
    try:
        for start in range(6):
            prompt = PROMPT[start:]
            params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
            answer = warm.generate([prompt], params)[0].outputs[0].token_ids
            longer = [*prompt, *answer, *b" and then\n"]
            found, cached = top(warm, longer)
            wanted, _ = top(cold, longer)
            assert cached == 192 > len(prompt)
            assert found == pytest.approx(wanted, abs=1e-4)
    finally:
        warm.close()
        cold.close()
    assert (max(replays) > 1) == (speculation is not None)
    # Some are of use, others are not.
    assert {*tentative} == ({True, False} if unread else set())


def settled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each checkpoint that was kept before it was known to be of use: whether it was."""
    found: list[bool] = []
    resolve = KVCacheManager._resolve_tentative

    def recorded(self: KVCacheManager, seq: Sequence) -> None:
        if seq.tentative is not None:
            found.append(seq.tentative.position <= seq.computed)
        resolve(self, seq)

    monkeypatch.setattr(KVCacheManager, "_resolve_tentative", recorded)
    return found


def test_a_running_sequence_keeps_one_checkpoint_of_its_output() -> None:
    llm = loaded()
    try:
        manager = llm.engine._requests.kv_cache_manager  # type: ignore[attr-defined]
        (index,) = manager._state_groups
        answer = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))[0].outputs[0]
        ids, chain = [*PROMPT, *answer.token_ids], manager.prefix.chain()
        kept = [n for n in range(16, len(ids), 16) if manager.pools[index].find(chain.key(ids, n)) is not None]
        # The end of the prompt, and the last multiple of 64 that was stored.
        assert kept == [144, 320] and len(ids) == 355
    finally:
        llm.close()
