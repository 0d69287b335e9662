"""A family of attention is added by a row of the registry and a mixer: every other part of the engine asks the row."""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine.watching import Watch, assert_same_logits, engine, request, run

from allotrope.architectures import llama
from allotrope.attention.mha import MHA, MhaSpec
from allotrope.attention.registry import FAMILIES
from allotrope.checkpoint.read_config import ConfigReader
from allotrope.config import EngineConfig
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.planning.step_cost import step_cost
from allotrope.errors import ConfigError
from allotrope.layers.mixers.mha import MhaMixerSpec
from allotrope.layers.model_spec import ModelSpec
from allotrope.layers.parallel import Parallel


@dataclass(frozen=True, kw_only=True)
class ToySpec(MhaSpec):
    @property
    def family(self) -> str:
        return "toy"


@dataclass(frozen=True, kw_only=True)
class ToyMixerSpec(MhaMixerSpec):
    def attention(self, parallel: Parallel, dtype: torch.dtype, kv_dtype: torch.dtype) -> ToySpec:
        return ToySpec(**_fields(super().attention(parallel, dtype, kv_dtype)))


def _fields(value: object) -> dict[str, object]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}  # type: ignore[arg-type]


_read_llama = llama.LLAMA.read


def _read(reader: ConfigReader) -> ModelSpec:
    spec = _read_llama(reader)
    layers = [dataclasses.replace(layer, mixer=ToyMixerSpec(**_fields(layer.mixer))) for layer in spec.layers]
    return dataclasses.replace(spec, layers=tuple(layers))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    (tmp_path / "config.json").write_text(json.dumps(llama.tiny_llama()))
    return tmp_path


@pytest.fixture
def with_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", dataclasses.replace(MHA, name="toy"))
    monkeypatch.setattr(llama, "LLAMA", dataclasses.replace(llama.LLAMA, read=_read))


OPTIONS = {"load_format": "dummy", "device": "cpu", "max_model_len": 128, "max_num_seqs": 4}
PROMPTS = [request(str(n), range(5, 5 + n)) for n in (1, 7, 40)]


def test_a_new_family_answers_and_counts(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = Watch()
    run(engine(path, want, **OPTIONS), PROMPTS)
    plain = step_cost(resolve_load_plan(EngineConfig(model=str(path), dtype="float32", **OPTIONS)), (1, 9), (30, 20))

    monkeypatch.setitem(FAMILIES, "toy", dataclasses.replace(MHA, name="toy"))
    monkeypatch.setattr(llama, "LLAMA", dataclasses.replace(llama.LLAMA, read=_read))
    got = Watch()
    with caplog.at_level(logging.INFO, "allotrope"):
        run(engine(path, got, **OPTIONS), PROMPTS)
    assert_same_logits(got, want)
    assert "toy/" in caplog.text and "mha/" not in caplog.text
    load_plan = resolve_load_plan(EngineConfig(model=str(path), dtype="float32", **OPTIONS))
    counted = step_cost(load_plan, (1, 9), (30, 20))
    assert counted["toy"] == plain["mha"] and "mha" not in counted


def test_a_new_family_has_backends_to_ask_for(path: Path, with_toy: None) -> None:
    running = engine(path, attention_backend="toy=reference", **OPTIONS)
    assert {backend.name for _, backend in running.model.attention} == {"reference"}


def test_a_new_family_has_scales_and_formats(path: Path, with_toy: None) -> None:
    running = engine(path, kv_cache_dtype="fp8", **OPTIONS)
    assert all(layer.mixer.kv_scales == {"k_scale": 1.0, "v_scale": 1.0} for layer in running.model.layers)
    with pytest.raises(ConfigError, match="state_dtype: toy keeps no recurrent state"):
        engine(path, state_dtype="bfloat16", **OPTIONS)
