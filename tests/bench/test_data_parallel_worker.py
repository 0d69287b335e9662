"""vLLM's data-parallel ranks as one worker: prompts are dealt and put back, and none outlives one that fails."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bench.engine.data_parallel import DataParallelWorker, joined
from bench.engine.worker_process import EngineFailed, Worker

# A rank says by its tokens which one it is, what it was asked, and with how many other prompts.
VLLM = """
import os, pathlib, time, types
__version__ = "0.0"
SamplingParams = lambda **params: types.SimpleNamespace(**params)
RANK = int(os.environ["VLLM_DP_RANK"])
assert (os.environ["VLLM_DP_RANK_LOCAL"], os.environ["VLLM_DP_SIZE"]) == (str(RANK), "3")
pathlib.Path(__file__).with_name(f"{os.getpid()}.pid").touch()


class LLM:
    def __init__(self, directory, end=None):
        self.end = end
        cache = types.SimpleNamespace(num_gpu_blocks=4 + RANK, block_size=16)
        self.llm_engine = types.SimpleNamespace(vllm_config=types.SimpleNamespace(cache_config=cache))

    def generate(self, prompts, params, use_tqdm):
        if self.end is not None and RANK == 1:
            exec(self.end)
        if self.end is not None:
            time.sleep(600)
        found = []
        for prompt, one in zip(prompts, params, strict=True):
            first = prompt["prompt_token_ids"][0]
            step = {first: types.SimpleNamespace(logprob=-float(RANK))}
            output = types.SimpleNamespace(token_ids=[RANK, first, len(prompts)], logprobs=[step] * one.max_tokens)
            found.append(types.SimpleNamespace(outputs=[output]))
        return found
"""
# Three processes that import PyTorch would take as long as all the rest.
TORCH = """
import types
__version__ = "0.0"
cuda = types.SimpleNamespace(is_available=lambda: False)
"""
Start = Callable[[float], DataParallelWorker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Three ranks that may take so many seconds. In the end no process of theirs is left."""
    (tmp_path / "vllm.py").write_text(VLLM)
    (tmp_path / "torch.py").write_text(TORCH)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

    def started(limit: float) -> DataParallelWorker:
        return DataParallelWorker(lambda more: Worker("vllm", sys.executable, environment | more, limit, False), 3)

    yield started
    left = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert len(left) == 3 and not [pid for pid in left if Path(f"/proc/{pid}").exists()]


def test_prompts_are_dealt_and_answers_come_in_their_order(start: Start) -> None:
    with closing(start(60)) as worker:
        loaded = worker.ask(load={"directory": "model", "options": {"data_parallel_size": 3}})
        assert loaded["kv_tokens"] == (4 + 5 + 6) * 16 and loaded["environment"]["version"] == "0.0"
        # A rank without prompts generates something that nobody sees.
        for count, shares in ((1, [1]), (2, [1, 1]), (3, [1, 1, 1]), (5, [2, 2, 1]), (6, [2, 2, 2])):
            prompts = [[100 + index] * 4 for index in range(count)]
            answer = worker.run(prompts, 3)
            assert answer["ids"] == [[index % 3, 100 + index, shares[index % 3]] for index in range(count)]
            assert 0 < answer["seconds"] < 60
            steps = worker.ask(forced={"prompts": prompts, "tokens": 2})["logprobs"]
            assert steps == [[{str(100 + index): -float(index % 3)}] * 2 for index in range(count)]
        assert worker.ask(memory={}) == {}


@pytest.mark.parametrize(
    ("end", "limit", "message"),
    [
        ("raise MemoryError('no room')", 60, "^data-parallel rank 1: MemoryError: no room$"),
        ("os._exit(3)", 60, "^data-parallel rank 1: ended with code 3; it said nothing$"),
        ("time.sleep(600)", 4, "^killed after --limit 4 s$"),
    ],
    ids=["fails", "dies", "takes too long"],
)
def test_one_that_fails_ends_all(end: str, limit: float, message: str, start: Start) -> None:
    began = time.perf_counter()
    with closing(start(limit)) as worker:
        worker.ask(load={"directory": "model", "options": {"data_parallel_size": 3, "end": end}})
        with pytest.raises(EngineFailed, match=message):
            worker.run([[1], [2], [3]], 3)
    assert time.perf_counter() - began < 50


def test_time_is_from_when_the_last_began_to_when_the_last_ended() -> None:
    answers = [
        {"began": 10.0, "seconds": 4.0, "ids": [[1], [3]], "drafts": {"verified": 4, "accepted": 3}},
        {"began": 11.0, "seconds": 2.0, "ids": [[2]], "drafts": {"verified": 2, "accepted": 0}},
    ]
    assert joined(answers, {"run": {"prompts": [[0], [0], [0]], "tokens": 1}}) == {
        "began": 11.0,
        "seconds": 3.0,
        "ids": [[1], [2], [3]],
        "drafts": {"verified": 6, "accepted": 3},
    }
