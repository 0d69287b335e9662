"""Worker processes that outlive an engine run a rank of the next one, as a new process would."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_under_test import device_of_ranks
from engine.watching import assert_same, engine, request, run
from safetensors.torch import load_file, save_file
from tiny_checkpoints import prompts

from allotrope.architectures.registry import find_architecture
from allotrope.engine.engine import Engine
from allotrope.engine.ranks.worker_process import WorkerProcess, keep_worker_processes
from allotrope.env import thread_count
from allotrope.errors import EngineDead, ModelError
from allotrope.verify.random_checkpoint import write_random

ASKED = [request(f"r{i}", ids) for i, ids in enumerate(prompts((3, 17, 40, 1)))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in ("LlamaForCausalLM", "Qwen3NextForCausalLM"):
        found[name] = tmp_path_factory.mktemp(name)
        write_random(find_architecture({"architectures": [name]}, "").tiny(), found[name], None, 0)
    return found


@pytest.fixture
def kept() -> Iterator[None]:
    with keep_worker_processes():
        yield


def of_ranks(model: Path, size: int = 2, **options: Any) -> Engine:
    plain = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24, "threads": 1}
    return engine(model, device=device_of_ranks(size), tensor_parallel_size=size, **(plain | options))


def lives(process: int) -> bool:
    """Whether there is such a process, or its parent has not heard of its end."""
    return Path(f"/proc/{process}").exists()


def assert_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 5
    while any(map(lives, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(lives, processes))


def test_the_next_engine_takes_the_process_over(models: dict[str, Path]) -> None:
    """Another model, other settings, more ranks: what the process ran before leaves nothing behind."""
    torch.set_num_threads(1)
    plan: list[tuple[str, int, dict[str, Any]]] = [
        ("LlamaForCausalLM", 2, {}),
        ("Qwen3NextForCausalLM", 2, {"max_num_batched_tokens": 7}),
        ("LlamaForCausalLM", 4, {"enable_prefix_caching": False}),
        ("LlamaForCausalLM", 2, {"page_size": 8}),
    ]
    wanted = {name: run(engine(models[name], max_model_len=128), ASKED) for name in models}
    seen: list[list[int]] = []
    with keep_worker_processes():
        for name, size, options in plan:
            several = of_ranks(models[name], size, **options)
            seen.append(several.process_ids())
            try:
                assert_same(run(several, ASKED), wanted[name])
            finally:
                several.close()
            assert lives(seen[-1][0])
    first = seen[0]
    assert seen[1] == first and seen[2][:1] == first and len(seen[2]) == 3 and seen[3] == first
    assert_gone(seen[2])


@pytest.mark.usefixtures("kept")
def test_blocks_inside_others_share_their_processes(models: dict[str, Path]) -> None:
    seen = []
    for _ in range(2):
        with keep_worker_processes():
            several = of_ranks(models["LlamaForCausalLM"])
            seen.append(several.process_ids())
            several.close()
        assert lives(seen[-1][0])
    assert seen[0] == seen[1]


def test_processes_end_with_their_engine_elsewhere(models: dict[str, Path]) -> None:
    several = of_ranks(models["LlamaForCausalLM"])
    ids = several.process_ids()
    several.close()
    assert_gone(ids)


@pytest.mark.usefixtures("kept")
def test_a_process_that_was_killed_is_replaced(models: dict[str, Path]) -> None:
    """In an engine, whose end it is, and while it waits for one."""
    model = models["LlamaForCausalLM"]
    several = of_ranks(model)
    killed = several.process_ids()
    os.kill(killed[0], signal.SIGKILL)
    with pytest.raises(EngineDead, match=rf"rank 1 \(process {killed[0]}\) was killed by SIGKILL"):
        run(several, ASKED)
    several.close()
    second = of_ranks(model)
    waits = second.process_ids()
    second.close()
    assert waits != killed and lives(waits[0])
    os.kill(waits[0], signal.SIGKILL)
    assert_gone(waits)
    third = of_ranks(model)
    assert third.process_ids() != waits
    assert len(run(third, ASKED)) == len(ASKED)
    third.close()


@pytest.mark.usefixtures("kept")
def test_a_process_that_is_stopped_is_not_kept(models: dict[str, Path]) -> None:
    several = of_ranks(models["LlamaForCausalLM"])
    ids = several.process_ids()
    os.kill(ids[0], signal.SIGSTOP)
    started = time.monotonic()
    several.close()
    assert time.monotonic() - started < 10
    assert_gone(ids)


@pytest.mark.usefixtures("kept")
def test_an_engine_that_cannot_load_keeps_none(models: dict[str, Path], tmp_path: Path) -> None:
    """Its ranks are in the middle of loading."""
    model = models["LlamaForCausalLM"]
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape("norm.weight is in no checkpoint tensor")):
        of_ranks(tmp_path)
    several = of_ranks(model)
    assert len(run(several, ASKED)) == len(ASKED)
    several.close()


def test_an_end_before_anybody_watches_is_told() -> None:
    process = WorkerProcess()
    process.kill()
    process.wait(10)
    told: list[int] = []
    process.watch(told.append)
    deadline = time.monotonic() + 5
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert told == [-signal.SIGKILL] and process.ended
    process.let_go()


def test_engines_one_after_the_other_have_as_many_threads(models: dict[str, Path]) -> None:
    """Each rank's part is of what the process had before, not of what the engine before left it."""
    before = torch.get_num_threads()
    found = []
    try:
        torch.set_num_threads(6)
        for threads in (None, 1, None):
            several = of_ranks(models["LlamaForCausalLM"], threads=threads)
            found.append(torch.get_num_threads())
            several.close()
        torch.set_num_threads(4)
        several = of_ranks(models["LlamaForCausalLM"], threads=None)
        found.append(torch.get_num_threads())
        several.close()
    finally:
        torch.set_num_threads(before)
    assert found == [max(1, thread_count(6) // 2), 1, max(1, thread_count(6) // 2), max(1, thread_count(4) // 2)]
