"""Recorded calls of C: what is replayed, with which memory, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.watching import GREEDY, Watch, assert_same_logits, engine, request, run
from tiny_checkpoints import prompts, write_tiny

from allotrope.architectures.llama import tiny_llama
from allotrope.architectures.qwen3 import tiny_qwen3
from allotrope.architectures.qwen3_moe import tiny_qwen3_moe
from allotrope.engine.model_runner import ModelRunner
from allotrope.engine.recorded_steps import RecordedSteps
from allotrope.kernels.c.recording import Arena, reasons, record
from allotrope.ops.rms_norm.cpu import add_rms_norm, rms_norm

pytestmark = pytest.mark.skipif(bool(reasons()), reason="; ".join(reasons()))
FLOOR = 1e-3


def inputs() -> list[torch.Tensor]:
    return [torch.randn(3, 32), torch.randn(3, 32)]


def computed(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x, y = add_rms_norm(rms_norm(y, weight, FLOOR).flatten(1), x, weight, FLOOR)
    return y


def test_a_replay_reads_other_inputs_and_writes_the_same_bits() -> None:
    weight, arena = torch.rand(32), Arena()
    first, second, third = inputs(), inputs(), inputs()
    with torch.inference_mode(), record(arena, first) as recorder:
        out = computed(*first, weight)
    assert not recorder.reason and torch.equal(out, computed(*first, weight))
    replayed = recorder.recording(out)
    for given in (second, third, first):
        assert torch.equal(replayed.replay(given), computed(*given, weight))


def test_memory_of_what_is_gone_is_used_again_and_of_what_lives_is_not() -> None:
    arena = Arena()
    kept = arena.empty((1000,), torch.float32)
    views = [arena.empty((1000,), torch.float32).view(10, 100)[2:3]]
    places = {kept.data_ptr(), views[0].untyped_storage().data_ptr()}
    for _ in range(50):
        gone = arena.empty((1000,), torch.float32)
        assert gone.untyped_storage().data_ptr() not in places
        del gone
    assert arena.nbytes <= 1 << 20
    views.clear()
    again = arena.empty((1000,), torch.float32)
    assert again.untyped_storage().data_ptr() in places


def test_an_operation_of_pytorch_ends_the_recording_with_its_name() -> None:
    x, y = inputs()
    with record(Arena(), [x, y]) as recorder:
        out = rms_norm(x + y, torch.ones(32), FLOOR)
    assert recorder.reason == "it runs add of PyTorch"
    assert torch.equal(out, rms_norm(x + y, torch.ones(32), FLOOR))


@pytest.mark.parametrize("product", [torch.nn.functional.linear, torch.matmul])
def test_a_product_of_pytorch_is_not_taken_apart(product: Callable[..., torch.Tensor]) -> None:
    """That would import PyTorch's symbolic shapes, for which the first decode step of a server would wait."""
    x, weight = torch.randn(3, 32), torch.randn(32, 32)
    with torch.inference_mode(), record(Arena(), [x]) as recorder:
        out = product(x, weight)
    assert recorder.reason == f"it runs {product.__name__} of PyTorch"
    assert torch.equal(out, product(x, weight))


@pytest.mark.parametrize("tiny", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_steps_have_the_bits_of_steps_that_python_calls(
    tiny: Callable[[], dict[str, Any]], dtype: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    write_tiny(tiny(), tmp_path)
    seen, replays, params = {}, 0, replace(GREEDY, max_tokens=90)
    for cuda_graphs in (True, False):
        watch = Watch()
        options = {"dtype": dtype, "quantization": "int8", "max_model_len": 512, "max_num_seqs": 4}
        running = engine(tmp_path, watch, cuda_graphs=cuda_graphs, **options)
        # Long enough for tables and chunks of other sizes than those of the first recording.
        run(running, [request(f"p{len(one)}", one, params) for one in prompts((1, 3, 40, 200))])
        seen[cuda_graphs] = watch
        runner = running._executor.worker.model_runner  # type: ignore[attr-defined]
        assert isinstance(runner, ModelRunner) and (runner.recorded is not None) == cuda_graphs
        if isinstance(runner.recorded, RecordedSteps):
            assert not runner.recorded.reason
            replays = runner.recorded.replays
    assert replays > 50
    assert_same_logits(seen[True], seen[False])


def test_a_model_whose_layers_run_pytorch_says_so_and_goes_on(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_tiny(tiny_qwen3_moe(), tmp_path)
    running = engine(tmp_path, Watch(), max_model_len=64, max_num_seqs=4)
    run(running, [request("p", prompts((5,))[0])])
    recorded = running._executor.worker.model_runner.recorded  # type: ignore[attr-defined]
    assert recorded is not None
    assert recorded.replays > 0 or recorded.reason
