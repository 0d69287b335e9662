"""A real instruct model from a GGUF file: the engine's greedy tokens are those of Transformers, in every regime (fp32).

Both sides get the same token ids, from our tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from engine.watching import assert_idle, assert_same, engine, outputs, request, run
from tiny_checkpoints import prompts

from allotrope.engine.engine import Engine
from allotrope.request import SamplingParams
from allotrope.text.tokenizer import load_tokenizer

# Transformers takes most of the time, to unpack the file and to generate.
pytestmark = pytest.mark.timeout(900)

LENGTH = 32
TEXTS = {
    "capital": "What is the capital of France?",
    "haiku": "Write a haiku about the sea.",
    "sum": "If I have three apples and buy two more, how many apples do I have? Explain step by step.",
    "python": "Write a Python function that returns the n-th Fibonacci number.",
    "story": "Tell me the beginning of a story about a robot who learns to paint, in the style of a fairy tale.",
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def ids(smollm2_path: str) -> dict[str, list[int]]:
    tokenizer = load_tokenizer(smollm2_path)
    return {
        name: list(tokenizer.apply_chat_template([{"role": "user", "content": text}])) for name, text in TEXTS.items()
    }


@pytest.fixture(scope="module")
def want(smollm2_path: str, ids: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The greedy tokens of Transformers, reading the same file."""
    from transformers import AutoModelForCausalLM

    path = Path(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    # The engine is told to go on after an end of text; so is this.
    model.generation_config.eos_token_id = None
    found = {}
    for name, prompt in ids.items():
        with torch.inference_mode():
            tokens = torch.tensor([prompt])
            # Without a mask, generate() would take the end-of-turn tokens inside the prompt for padding.
            mask = torch.ones_like(tokens)
            made = model.generate(tokens, attention_mask=mask, max_new_tokens=LENGTH, do_sample=False)
        found[name] = made[0, len(prompt) :].tolist()
    return found


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", before)))
    yield
    torch.set_num_threads(before)


def start(path: str, **options: object) -> Engine:
    return engine(path, max_model_len=512, **{"max_num_seqs": 16, **options})


def background(count: int) -> dict[str, list[int]]:
    return {f"background{i}": p for i, p in enumerate(prompts([5 + 37 * i for i in range(count)], 40000, seed=3))}


def asked(ids: Mapping[str, Sequence[int]], length: int = LENGTH) -> list:
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    return [request(name, prompt, params) for name, prompt in ids.items()]


def test_alone(smollm2_path: str, ids: Mapping[str, list[int]], want: Mapping[str, list[int]]) -> None:
    running = start(smollm2_path)
    for name, prompt in ids.items():
        assert_same(run(running, asked({name: prompt})), {name: want[name]})
    assert_idle(running)


@pytest.mark.parametrize("chunk", [7, 64, 2048])
def test_batched_with_background_requests_and_chunked(
    smollm2_path: str, ids: Mapping[str, list[int]], want: Mapping[str, list[int]], chunk: int
) -> None:
    running = start(smollm2_path, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 16))
    mixed = [*asked(background(3), 20), *asked(ids)]
    assert_same(run(running, mixed), want)
    assert_idle(running)


def test_forced_preemption(smollm2_path: str, ids: Mapping[str, list[int]], want: Mapping[str, list[int]]) -> None:
    row = 2 * 30 * 3 * 64 * 4
    few = {"kv_cache_memory_bytes": 300 * row, "scheduler_reserve_full_isl": False}
    running = engine(smollm2_path, max_model_len=144, max_num_seqs=5, **few)
    assert_same(run(running, asked(ids)), want)
    assert running.stats().preemptions > 0
    assert_idle(running)


def test_warm_prefix_at_every_cut(
    smollm2_path: str, ids: Mapping[str, list[int]], want: Mapping[str, list[int]]
) -> None:
    """Each prompt after each of its own beginnings, aligned to pages or not; few tokens here, all 64 when slow."""
    _warm_cuts(smollm2_path, ids, want, cuts_step=5, length=8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_warm_prefix_at_every_cut_in_full(
    smollm2_path: str, ids: Mapping[str, list[int]], want: Mapping[str, list[int]]
) -> None:
    _warm_cuts(smollm2_path, ids, want, cuts_step=1, length=LENGTH)


def _warm_cuts(
    path: str, ids: Mapping[str, list[int]], want: Mapping[str, list[int]], cuts_step: int, length: int
) -> None:
    """All prompts are cut at the same place, so that their warm runs share steps."""
    longest = max(map(len, ids.values()))
    running = start(path, kv_cache_memory_bytes=1 << 30)
    for cut in sorted({*range(1, longest, cuts_step), *range(16, longest, 16)}):
        # What earlier cuts left behind would hide a fault of this one.
        running.reset_prefix_cache()
        beginnings = {name: prompt[:cut] for name, prompt in ids.items() if cut < len(prompt)}
        run(running, asked(beginnings, 1))
        found = outputs(running, asked({name: ids[name] for name in beginnings}, length))
        tokens = {name: [t for o in found if o.request_id == name for t in o.token_ids] for name in beginnings}
        assert_same(tokens, {name: want[name][:length] for name in beginnings})
        for name in beginnings:
            cached = max(o.cached_tokens for o in found if o.request_id == name)
            assert cached >= cut // 16 * 16, f"{name} cut at {cut}: {cached} cached tokens"
    assert_idle(running)
