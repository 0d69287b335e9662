"""Dense models through the whole engine, against Transformers, in every way that tokens can be cut into steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from engine.watching import GREEDY, Watch, assert_idle, assert_same, drain, engine, outputs, request, run
from tiny_checkpoints import TinyCheckpoint, prompts, write_tiny

from allotrope.architectures.llama import tiny_llama, tiny_mistral
from allotrope.architectures.qwen3 import tiny_qwen3

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 100)
TINY = {
    "llama": tiny_llama,
    "llama tied": lambda: tiny_llama() | {"tie_word_embeddings": True, "rope_scaling": None},
    "mistral": tiny_mistral,
    "mistral without window": lambda: tiny_mistral() | {"sliding_window": None},
    "qwen3": tiny_qwen3,
}


@pytest.fixture(scope="module", params=list(TINY))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyCheckpoint]:
    torch.set_num_threads(1)
    yield write_tiny(TINY[request.param](), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def ids(tiny: TinyCheckpoint) -> dict[str, list[int]]:
    return {f"p{len(ids)}": ids for ids in prompts(LENGTHS)}


@pytest.fixture(scope="module")
def want(tiny: TinyCheckpoint, ids: dict[str, list[int]]) -> dict[str, list[int]]:
    """Transformers' greedy tokens."""
    return {name: tiny.greedy(prompt, 8) for name, prompt in ids.items()}


@pytest.mark.parametrize("chunk", [16, 64, 2048])
def test_logits_at_all_positions(tiny: TinyCheckpoint, ids: dict[str, list[int]], chunk: int) -> None:
    watch = Watch()
    running = engine(tiny.directory, watch, max_num_batched_tokens=chunk, max_num_seqs=16)
    tokens = run(running, [request(name, prompt) for name, prompt in ids.items()])
    for name, prompt in ids.items():
        full = [*prompt, *tokens[name][:-1]]
        got = torch.stack([watch.seen[name][i] for i in range(len(full))])
        torch.testing.assert_close(got, tiny.logits(full), atol=5e-4, rtol=0.0)
    assert_idle(running)


@pytest.mark.parametrize("chunk", [1, 3, 64, 2048])
def test_chunked_alone_and_batched(
    tiny: TinyCheckpoint, ids: dict[str, list[int]], want: dict[str, list[int]], chunk: int
) -> None:
    sequences = min(chunk, 16)
    running = engine(tiny.directory, max_num_batched_tokens=chunk, max_num_seqs=sequences, enable_prefix_caching=False)
    if chunk != 1:
        assert_same(run(running, [request(name, prompt) for name, prompt in ids.items()]), want)
        names = list(ids)[::-1]
        assert_same(run(running, [request(name, ids[name]) for name in names]), want)
    for name in ("p1", "p17", "p64"):
        assert_same(run(running, [request(name, ids[name])]), {name: want[name]})
    assert_idle(running)


@pytest.mark.parametrize("page_size", [4, 16])
def test_warm_equals_cold_at_every_cut(
    tiny: TinyCheckpoint, ids: dict[str, list[int]], want: dict[str, list[int]], page_size: int
) -> None:
    prompt = ids["p64"]
    background = prompts((40, 3), seed=7)
    for cut in (*range(1, 64, 5), 16, 32, 48, 63, 64):
        running = engine(tiny.directory, page_size=page_size, max_num_seqs=8, max_model_len=256)
        run(running, [request("warm", [*prompt[:cut], *background[0]])])
        for output in outputs(running, [request("p64", prompt), request("other", background[1])]):
            if output.request_id == "p64" and output.finish_reason is None:
                assert output.cached_tokens <= min(cut, 63) // page_size * page_size
        tokens = run(running, [request("again", prompt)])
        assert_same({"p64": tokens["again"]}, {"p64": want["p64"]})
        assert_idle(running)


def test_cached_tokens_are_counted(tiny: TinyCheckpoint, ids: dict[str, list[int]], want: dict[str, list[int]]) -> None:
    running = engine(tiny.directory, page_size=8, max_model_len=256)
    first, second = (outputs(running, [request(name, ids["p100"])]) for name in ("a", "b"))
    assert first[-1].cached_tokens == 0
    assert second[-1].cached_tokens == 96
    assert running.stats().prefix_hits == 96
    assert (second[0].cache_lost, second[1].cache_lost) == ({"partial page": 3}, {})
    assert running.stats().prefix_lost == {"partial page": 3}
    assert [token for output in second for token in output.token_ids] == want["p100"]


def test_preemption_changes_nothing(
    tiny: TinyCheckpoint, ids: dict[str, list[int]], want: dict[str, list[int]]
) -> None:
    room = engine(tiny.directory, max_model_len=112, max_num_seqs=8, page_size=4)
    needed = room.memory.bytes * 112 // max(room.memory.tokens, 1)
    for caching in (True, False):
        running = engine(
            tiny.directory,
            max_model_len=112,
            max_num_seqs=8,
            page_size=4,
            kv_cache_memory_bytes=max(needed, 1) * 5 // 4 + 4096,
            scheduler_reserve_full_isl=False,
            enable_prefix_caching=caching,
        )
        for _ in range(2):
            assert_same(run(running, [request(name, prompt) for name, prompt in ids.items()]), want)
            assert_idle(running)
        if not any(entry.group.kind == "window" for entry in running.memory.groups):
            assert running.stats().preemptions > 0


def test_sequences_of_one_request_share_their_prompt(tiny: TinyCheckpoint, ids: dict[str, list[int]]) -> None:
    running = engine(tiny.directory, page_size=8, max_num_seqs=8, max_model_len=256)
    params = replace(GREEDY, n=3)
    found = outputs(running, [request("n", ids["p100"], params)])
    assert {output.cached_tokens for output in found if output.index} == {96}
    by_index = [[t for o in found if o.index == i for t in o.token_ids] for i in range(3)]
    assert by_index[0] == by_index[1] == by_index[2]
    assert len(by_index[0]) == 8


def test_abort_at_every_step(tiny: TinyCheckpoint, ids: dict[str, list[int]], want: dict[str, list[int]]) -> None:
    for steps in range(12):
        running = engine(tiny.directory, max_num_batched_tokens=24, max_num_seqs=4, max_model_len=256)
        for name in ("p100", "p33", "p64", "p17", "p2"):
            running.add(request(name, ids[name]))
        kept: dict[str, list[int]] = {"p33": []}
        for _ in range(steps):
            for output in running.step():
                if output.request_id == "p33":
                    kept["p33"].extend(output.token_ids)
        running.abort(["p100", "p64", "p17", "p2", "never heard of"])
        rest = drain(running)
        assert set(rest) <= {"p33"}
        assert kept["p33"] + rest.get("p33", []) == want["p33"]
        assert_idle(running)
