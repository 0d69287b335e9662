"""Models of released cache sizes, small in everything that is not cached: the plan's bytes are those that are taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from allotrope.cache.arena import Arena
from allotrope.config import EngineConfig
from allotrope.engine.cache_plan import plan_caches
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.planning.plan_report import report_model
from allotrope.llm import LLM
from allotrope.request import SamplingParams

TWINS = sorted(path.parent for path in (Path(__file__).parent / "released_caches").glob("*/config.json"))
# (tokens that the window keeps, or None; layers; bytes of a row of all of them), by hand from the released sizes.
KEPT = {
    "qwen3-next-80b-a3b": {("state", 3, 3 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)), ("paged", 1, 2 * 2 * 256 * 2)},
    "gpt-oss-120b": {("window", 1, 2 * 8 * 64 * 2), ("paged", 1, 2 * 8 * 64 * 2)},
    "gemma-4-31b": {("window", 5, 5 * 2 * 16 * 256 * 2), ("paged", 1, 2 * 4 * 512 * 2)},
    "deepseek-v3.2": {("paged", 2, 2 * (576 + 128) * 2)},
}


def config(twin: Path) -> EngineConfig:
    return EngineConfig(
        model=str(twin), load_format="dummy", device="cpu", max_num_seqs=2, kv_cache_memory_bytes=500_000_000
    )


@pytest.mark.parametrize("twin", TWINS, ids=[twin.name for twin in TWINS])
def test_plan_bytes_are_allocated_bytes(twin: Path) -> None:
    report = report_model(config(twin))
    load_plan = resolve_load_plan(config(twin))
    memory = plan_caches(load_plan, config(twin))
    arena = Arena(memory, len(load_plan.specs), load_plan.shares, load_plan.build.device)
    pools = [field for layer in arena.layers for cache in layer.values() for field in cache.values()]
    taken = {pool.untyped_storage().data_ptr(): pool.untyped_storage().nbytes() for pool in pools}
    shared = 0 if report.shared is None else report.shared.bytes
    assert bool(shared) == (twin.name in ("gpt-oss-120b", "gemma-4-31b"))
    planned = shared + sum(group.bytes or 0 for group in report.groups)
    assert report.cache_bytes == planned == sum(taken.values()) == arena.bytes
    if twin.name in KEPT:
        assert {(group.kind, group.layers, group.row_bytes) for group in report.groups} == KEPT[twin.name]
    for _, tokens, padded in report.density:
        assert tokens >= padded > 0


def test_a_twin_runs() -> None:
    (twin,) = (twin for twin in TWINS if twin.name == "gpt-oss-120b")
    llm = LLM(str(twin), load_format="dummy", device="cpu", kv_cache_memory_bytes=200_000_000)
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
    llm.close()


def test_a_shared_pool_is_reported_once() -> None:
    (twin,) = (twin for twin in TWINS if twin.name == "gemma-4-31b")
    report = report_model(config(twin))
    text = "\n".join(report.lines())
    assert report.shared is not None and [group.unit_pages for group in report.groups] == [1, 10]
    assert re.search(r"^window 1024 .* up to \d+ +shared$", text, re.MULTILINE)
    assert re.search(rf"^shared pool +1\.25 MiB +{report.shared.units} ", text, re.MULTILINE)
    assert "1 of window 1024 or 10 of paged" in text
    assert f"{report.sequences} sequences of 2048 tokens at a time" in text
    summary = report.model_summary()
    assert summary.shared_bytes + sum(group.bytes for group in summary.groups) == summary.cache_bytes
