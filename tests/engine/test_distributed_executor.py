"""Two ranks on a CPU give the tokens of one; a rank that ends takes the engine with it, in one line.

Weights are the reproducible random ones, which are the same numbers at every parallel size.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from device_under_test import device_of_ranks
from engine.watching import assert_idle, assert_same, engine, request, run
from safetensors.torch import load_file, save_file
from tiny_checkpoints import prompts

from allotrope.architectures.registry import ARCHITECTURES, find_architecture
from allotrope.engine.ranks import rank_group
from allotrope.engine.ranks.rank_group import RankGroup
from allotrope.errors import ConfigError, EngineDead, ModelError
from allotrope.request import SamplingParams
from allotrope.verify.random_checkpoint import write_random

pytestmark = pytest.mark.usefixtures("kept_workers")

# One of each family here, all others when slow; wrappers have the decoder of what they wrap.
QUICK = (
    "LlamaForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Qwen3NextForCausalLM",
)
ASKED = [request(f"r{i}", ids) for i, ids in enumerate(prompts((3, 17, 40, 1)))]


def write(name: str, directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(find_architecture({"architectures": [name]}, "").tiny()))
    return directory


def compare(name: str, directory: Path, size: int = 2, **layout: Any) -> None:
    torch.set_num_threads(1)
    options = {"load_format": "dummy", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    options["device"] = device_of_ranks(size)
    model = write(name, directory)
    want = run(engine(model, **options), ASKED)
    several = engine(model, threads=1, **options, **({"tensor_parallel_size": size} | layout))
    if options["device"] == "cuda":
        # In the first engine of a process and in every other one.
        assert several._executor.worker.load_plan.build.parallel.workspace is not None
    try:
        assert_same(run(several, ASKED), want)
    finally:
        several.close()


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", pytest.param("MiniMaxM2ForCausalLM", marks=pytest.mark.slow)])
def test_more_ranks_than_kv_heads_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    """Pairs of ranks hold copies of a head; the second pair those of the second head."""
    compare(name, tmp_path, size=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(QUICK)))
def test_two_ranks_give_the_tokens_of_one_everywhere(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3NextForCausalLM"])
def test_ranks_that_are_steps_behind_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    """With async scheduling, rank 0 plans a step before its own tokens are known; the other ranks never know them on
    their hosts. Draws and penalties, for which rank 0 waits, are mixed with greedy requests.
    """
    torch.set_num_threads(1)
    params = [
        SamplingParams(max_tokens=9, ignore_eos=True, temperature=0),
        SamplingParams(max_tokens=7, ignore_eos=True, temperature=0.8, seed=3),
        SamplingParams(max_tokens=5, ignore_eos=True, temperature=1.0, top_p=0.9, seed=4, frequency_penalty=0.5),
        SamplingParams(max_tokens=11, ignore_eos=True, temperature=1.0, top_k=5, seed=5, n=2),
    ]
    asked = [
        request(f"r{i}", ids, one) for i, (ids, one) in enumerate(zip(prompts((3, 30, 9, 1)), params, strict=True))
    ]
    options = {"load_format": "dummy", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    options["device"] = device_of_ranks(2)
    model = write(name, tmp_path)
    want = run(engine(model, **options), asked)
    two = engine(model, tensor_parallel_size=2, threads=1, async_scheduling="on", **options)
    try:
        assert two._loop._async
        assert_same(run(two, asked), want)
        assert_idle(two)
    finally:
        two.close()


@pytest.mark.parametrize("tied", ["indexer.weights_proj", "indexer.wk"])
def test_ties_of_index_scores_break_equally_on_every_rank(tied: str, tmp_path: Path) -> None:
    """Without weights, or without keys, all scores are 0: which cache entries attention sees is the order of ties."""
    torch.set_num_threads(1)
    config = find_architecture({"architectures": ["DeepseekV32ForCausalLM"]}, "").tiny()
    write_random(config, tmp_path, None, 0)
    for file in tmp_path.glob("*.safetensors"):
        weights = {name: tensor * (f"{tied}." not in name) for name, tensor in load_file(file).items()}
        save_file(weights, file)
    options = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_dtype": "fp8"}
    options["device"] = device_of_ranks(2)
    asked = [request(f"r{i}", ids) for i, ids in enumerate(prompts((3, 90, 40, 130)))]
    want = run(engine(tmp_path, **options), asked)
    two = engine(tmp_path, tensor_parallel_size=2, threads=1, **options)
    try:
        assert_same(run(two, asked), want)
    finally:
        two.close()


def test_a_process_group_that_is_being_left_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may still be letting go of one engine's group when the next engine starts."""
    inside, leave = threading.Event(), threading.Event()
    monkeypatch.setattr(rank_group.dist, "is_initialized", lambda: not leave.is_set())

    def abort() -> None:
        with rank_group._ABORTING:
            inside.set()
            leave.wait(10)

    leaving = threading.Thread(target=abort)
    leaving.start()
    assert inside.wait(10)
    assert not RankGroup.settled(0.05)
    threading.Timer(0.2, leave.set).start()
    assert RankGroup.settled()
    leaving.join()


def test_one_gpu_for_several_ranks_is_refused(tmp_path: Path) -> None:
    model = write("LlamaForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match=r"device='cuda:1' names one GPU, but tensor_parallel_size=2"):
        engine(model, load_format="dummy", tensor_parallel_size=2, device="cuda:1")


def test_heads_that_cannot_be_shared_are_refused_with_the_numbers(tmp_path: Path) -> None:
    model = write("LlamaForCausalLM", tmp_path)
    with pytest.raises(ModelError, match=r"num_attention_heads=4 is not a multiple of tensor_parallel_size=3"):
        engine(model, load_format="dummy", tensor_parallel_size=3, device="cpu")


def test_a_dead_rank_is_named_at_the_next_step(tmp_path: Path) -> None:
    options = {"load_format": "dummy", "max_model_len": 128, "device": device_of_ranks(2)}
    two = engine(write("LlamaForCausalLM", tmp_path), tensor_parallel_size=2, threads=1, **options)
    try:
        run(two, ASKED)
        os.kill(two.process_ids()[0], signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
            run(two, [request("again", [9, 10])])
    finally:
        two.close()


@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel_size": 2}], ids=["alone", "stages"])
def test_an_engine_that_was_closed_with_open_requests_says_so(layout: dict[str, Any], tmp_path: Path) -> None:
    options = {"load_format": "dummy", "max_model_len": 128, "device": "cpu", "threads": 1}
    closed = engine(write("LlamaForCausalLM", tmp_path), **options, **layout)
    closed.add(ASKED[1])
    closed.step()
    closed.close()
    for call in (closed.step, lambda: closed.add(ASKED[0])):
        with pytest.raises(EngineDead, match="the engine is closed; make a new one"):
            call()
