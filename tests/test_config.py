"""Options of the engine are refused where their values can be of no use."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

import pytest

from allotrope.config import EngineConfig
from allotrope.engine.messages import Start, pack
from allotrope.errors import ConfigError

HINTS = get_type_hints(EngineConfig)
WHOLE_NUMBERS = [name for name, hint in HINTS.items() if hint is int or int in get_args(hint)]


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
@pytest.mark.parametrize("value", [10**20, 2**63, -(2**63) - 1])
def test_whole_numbers_have_bounds(name: str, value: int) -> None:
    """A message to the engine's process holds 64 bits."""
    with pytest.raises(ConfigError, match=rf"{name}={value}; at (most|least) -?\d+ is (allowed|needed)"):
        EngineConfig(**{"model": "m", name: value})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"threads": 1025}, "threads=1025; at most 1024 is allowed"),
        ({"max_num_seqs": 65537}, "max_num_seqs=65537; at most 65536 is allowed"),
        ({"max_model_len": 1}, "max_model_len=1; at least 2 is needed"),
    ],
)
def test_numbers_that_no_engine_runs_with(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(model="m", **options)


@pytest.mark.parametrize("device", ["cpu:1", "cuda:", "cuda:-1", "cuda:01", "cuda:300", "cuda:0\n", "meta", "mps", ""])
def test_devices_are_those_that_the_help_names(device: str) -> None:
    for known in ("auto", "cpu", "cuda", "cuda:0", "cuda:15"):
        assert EngineConfig(model="m", device=known).device == known
    with pytest.raises(ConfigError, match=r"device='.*'; allowed: auto, cpu, cuda, cuda:N"):
        EngineConfig(model="m", device=device)


@pytest.mark.parametrize(
    "options", [{"seed": 2**63 - 1}, {"seed": 1 - 2**63}, {"max_model_len": 2**31 - 1, "max_num_waiting": 2**31 - 1}]
)
def test_the_largest_numbers_travel_between_processes(options: dict[str, Any]) -> None:
    config = EngineConfig(model="m", **options)
    assert pack(Start(config)) and dataclasses.replace(config) == config
