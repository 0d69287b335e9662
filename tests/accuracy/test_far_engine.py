"""A whole model answers the same from the highest pages of large pools as from their lowest: every position's bits.

On a GPU at 131,072 tokens in pools of 100 GB, prompts in chunks and decodes in graphs; on a CPU with its own backends.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from device_under_test import DEVICE
from engine.watching import Watch, assert_same, engine, request, run
from far_ends import make_pool
from tiny_checkpoints import prompts

from allotrope.architectures.registry import find_architecture
from allotrope.cache.groups import CacheGroup
from allotrope.cache.memory import Demand, GroupPlan, MemoryPlan, SharedPlan, group_bytes
from allotrope.cache.pages import PagePool
from allotrope.cache.units import unit_layout
from allotrope.engine.engine import Engine
from allotrope.kernels.chip import free_memory

GPU = DEVICE == "cuda"
BYTES = 2**32
# Of a CPU only the pages in use take memory.
POOL_BYTES = 100 * 10**9
CONTEXT, CHUNK = (131_072, 16_384) if GPU else (256, 64)
LENGTHS = (CONTEXT - 64, 300, 77) if GPU else (150, 30, 7)
# The allocator lists them.
MAX_PAGES = 2_000_000
# Pages of one batch, of each pool.
NEEDED = 3 * (CONTEXT // 64 + 8)
# Each family. A GPU compiles a model's kernels for many seconds.
SLOW = ("LlamaForCausalLM", "GptOssForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM")
NAMES = [
    "Qwen3NextForCausalLM",
    "DeepseekV3ForCausalLM",
    *(pytest.param(name, marks=[pytest.mark.slow] if GPU else []) for name in SLOW),
]


class Chunks(Watch):
    """Keeps the logits of a step together: request -> first position -> [tokens, vocabulary]."""

    def logits(self, request_id: str, index: int, start: int, logits: torch.Tensor) -> None:
        self.seen[request_id][start] = logits.clone()


@pytest.fixture
def engines() -> Iterator[tuple[int, list[Engine]]]:
    """Bytes for the pools of one engine, and a list of those whose pools are given back."""
    size = POOL_BYTES
    made: list[Engine] = []
    if GPU:
        gc.collect()
        torch.cuda.empty_cache()
        free = free_memory(torch.device(DEVICE))
        size = min(size, free - 24 * 10**9)
        if size < 4 * BYTES:
            pytest.skip(f"{free} bytes of the GPU are free; {4 * BYTES + 24 * 10**9} are needed")
    yield size, made
    if GPU:
        # A failed test still holds its engine.
        for running in made:
            for view in planes(running):
                view.untyped_storage().resize_(0)
        gc.collect()
        torch.cuda.empty_cache()


def equal_shares(groups: Sequence[CacheGroup], demand: Demand, budget: int) -> MemoryPlan:
    """As `plan_memory`, all of the budget: as many windows and states as well, though no batch fills them."""
    plans = []
    if (layout := unit_layout(groups)) is not None:
        shared = SharedPlan(layout, min(MAX_PAGES, budget // layout.bytes))
        plans = [GroupPlan(groups[one.group], 1 + (shared.units - 1) * one.count, 0) for one in layout.groups]
        return MemoryPlan(tuple(plans), demand.context * demand.sequences, demand.sequences, shared)
    for group in groups:
        pages = min(MAX_PAGES, budget // len(groups) // group.page_bytes)
        plans.append(GroupPlan(group, pages, group_bytes(group, pages)))
    return MemoryPlan(tuple(plans), demand.context * demand.sequences, demand.sequences)


def take_highest_pages(running: Engine) -> None:
    """Leave the allocator the highest pages of each pool: those of one batch."""
    manager = running._requests.scheduler.kv_cache_manager
    if manager._shared is not None:
        manager._shared.free = sorted(manager._shared.free)[-NEEDED:]
    for pool in manager.pools:
        if isinstance(pool, PagePool):
            pool._free = sorted(pool._free)[-NEEDED:]


def zeros(size: int, device: torch.device) -> torch.Tensor:
    """[size] uint8 zeros of a CPU, which may be more than it has memory."""
    try:
        return make_pool(size, device)
    except OSError as error:
        pytest.skip(f"{size} bytes of addresses are refused: {error}")


def planes(running: Engine) -> list[torch.Tensor]:
    """Every field of every cache."""
    layers = running._executor.worker.model_runner.arena.layers  # type: ignore[attr-defined]
    return [view for caches in layers for fields in caches.values() for view in fields.values()]


@pytest.mark.parametrize("name", NAMES)
def test_the_highest_pages_give_the_lowest_ones_bits(
    name: str, tmp_path: Path, engines: tuple[int, list[Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allotrope.engine.cache_plan.plan_memory", equal_shares)
    if not GPU:
        monkeypatch.setattr("allotrope.cache.arena._zeros", zeros)
    config = find_architecture({"architectures": [name]}, "").tiny()
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    options = {"device": DEVICE, "dtype": "bfloat16" if GPU else "float32", "load_format": "dummy"}
    watch = Chunks()
    size, made = engines
    running = engine(
        tmp_path, watch, **options, max_model_len=CONTEXT, max_num_seqs=4, max_num_batched_tokens=CHUNK, page_size=64,
        kv_cache_memory_bytes=size, enable_prefix_caching=False,
    )  # fmt: skip
    made.append(running)
    assert max(view.nbytes for view in planes(running)) > BYTES
    asked = {f"r{i}": ids for i, ids in enumerate(prompts(LENGTHS))}
    near = run(running, [request(name, ids) for name, ids in asked.items()])
    lowest = {name: dict(steps) for name, steps in watch.seen.items()}
    watch.seen.clear()
    assert not any(bool(view[-NEEDED:].any()) for view in planes(running))
    take_highest_pages(running)
    far = run(running, [request(name, ids) for name, ids in asked.items()])
    assert all(bool(view[-NEEDED:].any()) for view in planes(running))
    assert_same(far, near)
    for name, steps in lowest.items():
        for start, logits in steps.items():
            found = watch.seen[name][start]
            assert torch.equal(found, logits), (name, start, float((found - logits).abs().max()))
