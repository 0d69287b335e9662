"""What a CPU gets where no option says otherwise: the type, and the memory of caches."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from allotrope.architectures.llama import tiny_llama
from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.config import EngineConfig
from allotrope.engine import cache_plan as cache_plans
from allotrope.engine import load_plan as load_plans
from allotrope.engine.cache_plan import CPU_TOKENS, plan_caches
from allotrope.engine.load_plan import resolve_dtype, resolve_load_plan
from allotrope.engine.planning.plan_report import report_model
from allotrope.layers.parallel import Parallel

MEMORY = 64 << 30


def directory(tmp_path: Path, **changes: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama() | changes))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("own", "has_bf16", "want", "said"),
    [
        ("bfloat16", True, torch.bfloat16, ""),
        ("bfloat16", False, torch.float32, "this CPU has no instructions for bfloat16"),
        (None, True, torch.bfloat16, "this CPU has instructions for bfloat16"),
        (None, False, torch.float32, "this CPU has no instructions for bfloat16"),
        ("float32", True, torch.float32, ""),
        ("float16", True, torch.bfloat16, "this CPU has instructions for bfloat16"),
    ],
)
def test_the_type_is_the_fastest_that_loses_nothing_of_the_checkpoint(
    own: str | None, has_bf16: bool, want: torch.dtype, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_plans, "cpu_has_bf16", lambda: has_bf16)
    checkpoint = open_checkpoint(directory(tmp_path, torch_dtype=own), load_format="dummy")
    found, why = resolve_dtype("auto", checkpoint, on_gpu=False)
    assert found == want and why.startswith(said) and bool(why) == bool(said)
    assert resolve_dtype("float16", checkpoint, on_gpu=False) == (torch.float16, "")
    on_gpu, _ = resolve_dtype("auto", checkpoint, on_gpu=True)
    assert on_gpu == {"float32": torch.float32, "float16": torch.float16}.get(str(own), torch.bfloat16)


def test_caches_hold_one_long_sequence_and_a_few_requests(tmp_path: Path) -> None:
    model = directory(tmp_path, max_position_embeddings=100_000)
    config = EngineConfig(model=model, load_format="dummy", device="cpu", max_num_seqs=64)
    plan = resolve_load_plan(config, Parallel())
    memory = plan_caches(plan, config, MEMORY)
    assert memory.tokens == 100_000 + CPU_TOKENS
    report = report_model(config, MEMORY)
    assert any(f"one sequence of full length and {CPU_TOKENS} tokens of others" in line for line in report.lines())
    # An option gives them as much as it says, and short sequences never need more than a full batch of them.
    half = dataclasses.replace(config, memory_utilization=0.5)
    assert plan_caches(plan, half, MEMORY).tokens == 64 * 100_000
    short = dataclasses.replace(config, max_model_len=160)
    assert plan_caches(resolve_load_plan(short, Parallel()), short, MEMORY).tokens == 64 * 160


def test_ranks_share_the_memory_of_their_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks hold the weights once between them, so they fit no better than in one."""
    config = EngineConfig(model=directory(tmp_path), load_format="dummy", device="cpu", memory_utilization=0.5)
    plan = resolve_load_plan(config, Parallel())
    monkeypatch.setattr(cache_plans, "free_memory", lambda device: plan.weight_bytes - 1)
    refusal = report_model(config).refusal
    assert refusal is not None and "the weights do not fit" in refusal and "--tensor-parallel-size" not in refusal
    monkeypatch.setattr(cache_plans, "free_memory", lambda device: MEMORY)
    two = dataclasses.replace(config, tensor_parallel_size=2)
    report = report_model(two)
    assert report.memory_bytes == MEMORY // 2
    assert plan_caches(resolve_load_plan(two, Parallel.of(two.layout)), two).bytes <= MEMORY // 4
