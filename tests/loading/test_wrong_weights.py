"""Tensors that are there, of the right name, and still no weights: refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from allotrope.architectures.llama import tiny_llama
from allotrope.architectures.qwen3_moe import tiny_qwen3_moe
from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.errors import EngineDead, ModelError
from allotrope.request import Request, SamplingParams
from allotrope.verify.random_checkpoint import write_random


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_numbers_of_another_kind_are_no_weights(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write_random(tiny_llama(), tmp_path, None, 0)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {name: weights[name].to(dtype)}, file)
    with pytest.raises(ModelError, match=rf"{name} is {str(dtype).removeprefix('torch.')} \(needs floating-point"):
        Engine(EngineConfig(model=str(tmp_path), device="cpu"))


def test_a_single_number_is_refused_by_name(tmp_path: Path) -> None:
    write_random(tiny_qwen3_moe(), tmp_path, None, 0)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    scalars = ("model.norm.weight", next(name for name in weights if "experts" in name))
    save_file(weights | {name: torch.ones(()) for name in scalars}, file)
    with pytest.raises(ModelError) as refused:
        Engine(EngineConfig(model=str(tmp_path), device="cpu"))
    assert all(f"{name} has " in str(refused.value) for name in scalars)


def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama()))
    engine = Engine(EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu"))
    engine.close()
    with pytest.raises(EngineDead, match="closed"):
        engine.add(Request(request_id="late", prompt_ids=(5,), params=SamplingParams()))
