"""Options and values under their old names are refused with the names that they have now."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from allotrope import LLM
from allotrope.config import EngineConfig
from allotrope.engine.messages import Start, pack
from allotrope.errors import ConfigError


def test_an_old_option_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match="overlap is now async_scheduling"):
        EngineConfig(model="m", overlap="on")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="overlap is now async_scheduling"):
        LLM("m", overlap="on")


def test_an_old_value_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8_scaled'; it is now 'fp8_ds_mla'"):
        EngineConfig(model="m", kv_cache_dtype="fp8_scaled")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="quantized_weights='unpack'; it is now 'dequantize'"):
        EngineConfig(model="m", quantized_weights="unpack")  # type: ignore[arg-type]


def test_a_config_travels_between_processes() -> None:
    config = EngineConfig(model="m", async_scheduling="off")
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, seed=3).async_scheduling == "off"
    assert pack(Start(config))
