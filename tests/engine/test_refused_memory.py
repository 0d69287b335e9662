"""Memory that does not do is refused for the reason that holds: the weights, or what may be used beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allotrope.architectures.llama import tiny_llama
from allotrope.config import EngineConfig
from allotrope.engine.cache_plan import plan_within
from allotrope.engine.load_plan import LoadPlan, resolve_load_plan
from allotrope.errors import ConfigError


@pytest.fixture
def planned(tmp_path: Path) -> tuple[LoadPlan, EngineConfig]:
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama()))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", memory_utilization=0.5)
    return resolve_load_plan(config), config


def test_weights_that_do_not_fit(planned: tuple[LoadPlan, EngineConfig]) -> None:
    weights = planned[0].weight_bytes
    with pytest.raises(ConfigError, match=f"weights do not fit: they take {weights} bytes, and {weights - 1} are free"):
        plan_within(*planned, -1, weights - 1)


def test_weights_that_fit_are_not_blamed(planned: tuple[LoadPlan, EngineConfig]) -> None:
    """The share that may be used is full, though more is free than the weights take."""
    free = 2 * planned[0].weight_bytes
    with pytest.raises(ConfigError) as found:
        plan_within(*planned, -1, free)
    assert "do not fit" not in str(found.value)
    for fact in (f"memory_utilization=0.5 of {free} free bytes is {free // 2}", "--max-num-batched-tokens below 2048"):
        assert fact in str(found.value)
