"""Options of the engine are refused where their values can be of no use."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from tiny_checkpoints import write_tiny

from allotrope import LLM
from allotrope.architectures.llama import tiny_llama
from allotrope.config import BatchOptions, EngineConfig, ServerConfig
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
        ({"data_parallel_size": 4097}, "data_parallel_size=4097; at most 4096 is allowed"),
        (
            {"tensor_parallel_size": 8, "data_parallel_size": 1024},
            "tensor_parallel_size=8, data_parallel_size=1024 are 8192 ranks; at most 4096 are allowed",
        ),
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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model": None}, "model=None; a text is needed"),
        ({"quantization": "int3"}, "quantization='int3'; allowed: 'fp8', 'int8', 'int4', None"),
        ({"dtype": torch.float32}, "dtype=torch.float32; allowed: 'auto', 'float32'"),
        ({"kv_cache_dtype": ["auto"]}, "kv_cache_dtype=['auto']; allowed: 'auto'"),
        ({"max_model_len": 5.5}, "max_model_len=5.5; a whole number or None is needed"),
        ({"max_model_len": "32k"}, "max_model_len='32k'; a whole number or None is needed"),
        ({"page_size": "16"}, "page_size='16'; a whole number is needed"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size=True; a whole number is needed"),
        ({"seed": None}, "seed=None; a whole number is needed"),
        ({"memory_utilization": "0.9"}, "memory_utilization='0.9'; a number or None is needed"),
        ({"watchdog_seconds": True}, "watchdog_seconds=True; a number is needed"),
        ({"device": torch.device("cpu")}, "device=device(type='cpu'); a text is needed"),
        ({"op_backend": {"rms_norm": "reference"}}, "op_backend={'rms_norm': 'reference'}; a text or None is needed"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no'; True or False is needed"),
        ({"cuda_graphs": None}, "cuda_graphs=None; True or False is needed"),
        ({"cuda_graphs": 1}, "cuda_graphs=1; True or False is needed"),
    ],
)
def test_values_of_another_type_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(**{"model": "m", **options})
    assert reason in str(raised.value)


def test_each_value_of_another_type_is_named() -> None:
    with pytest.raises(ConfigError, match=r"page_size='16'; .*; threads=2\.0; "):
        EngineConfig(model="m", page_size="16", threads=2.0)  # type: ignore[arg-type]


def test_an_address_that_nobody_meets_at_is_refused() -> None:
    with pytest.raises(ConfigError, match="distributed_address needs several ranks"):
        EngineConfig(model="m", distributed_address="10.0.0.1")
    EngineConfig(model="m", distributed_address="10.0.0.1", data_parallel_size=2)


def test_whole_numbers_are_numbers() -> None:
    config = EngineConfig(model="m", memory_utilization=1, watchdog_seconds=0, quantization="int4", threads=None)
    assert (config.memory_utilization, config.quantization) == (1, "int4")
    assert ServerConfig(drain_timeout=5, api_key=("secret",)).drain_timeout == 5


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"port": "80"}, "port='80'; a whole number is needed"),
        ({"served_model_name": ["tiny"]}, "served_model_name=['tiny']; a tuple of texts is needed"),
        ({"allowed_origins": ("*", 5)}, "allowed_origins=('*', 5); a tuple of texts is needed"),
        ({"api_key": "secret"}, "api_key=***; a tuple of texts is needed"),
        ({"api_key": ("secret", "")}, "api_key=***; an empty text is not allowed"),
        ({"strict": "yes"}, "strict='yes'; True or False is needed"),
    ],
)
def test_values_of_another_type_are_refused_by_servers(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ServerConfig(**options)
    assert reason in str(raised.value)


def test_values_of_another_type_are_refused_by_batches() -> None:
    with pytest.raises(ConfigError, match="max_in_flight='4'; a whole number or None is needed"):
        BatchOptions(max_in_flight="4")  # type: ignore[arg-type]


def test_offline_use_takes_paths_and_overrides_as_a_mapping(tmp_path: Path) -> None:
    model = write_tiny(tiny_llama(), tmp_path).directory
    llm = LLM(model, load_format="dummy", device="cpu", hf_overrides={"rope_theta": 1e6})
    assert (llm.config.model, llm.engine.checkpoint.config["rope_theta"]) == (str(model), 1e6)
    llm.close()
    with pytest.raises(ConfigError, match=r"hf_overrides=.* is not JSON"):
        LLM("m", hf_overrides={"dtype": torch.float32})
    with pytest.raises(ConfigError, match=r"hf_overrides=\[\]; a text or None is needed"):
        LLM("m", hf_overrides=[])


def test_paths_and_mappings_become_text(tmp_path: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    config = EngineConfig(model=tmp_path, speculative_config=drafts)  # type: ignore[arg-type]
    assert config.model == str(tmp_path)
    assert config == EngineConfig(model=str(tmp_path), speculative_config=json.dumps(drafts))
