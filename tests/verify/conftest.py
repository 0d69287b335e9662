"""Tiny checkpoints, copies of them with one tensor spoiled, and outputs stored beside them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TinyCheckpoint, prompts, write_tiny
from verify_fixtures import Spoil, Tiny

from allotrope.architectures.llama import tiny_llama, tiny_mistral
from allotrope.architectures.qwen3 import tiny_qwen3
from allotrope.architectures.qwen3_moe import tiny_qwen3_moe

CONFIGS = {"llama": tiny_llama, "mistral": tiny_mistral, "qwen3": tiny_qwen3, "moe": tiny_qwen3_moe}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny checkpoint of 3 layers by the name of its config; written once."""
    made: dict[str, TinyCheckpoint] = {}

    def make(name: str) -> TinyCheckpoint:
        if name not in made:
            made[name] = write_tiny(CONFIGS[name]() | {"num_hidden_layers": 3}, tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture
def spoil(tmp_path: Path) -> Spoil:
    """Copies a checkpoint with one tensor changed: `spoil(directory, tensor, change)`."""

    def copy(directory: Path, tensor: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
        target = tmp_path / "spoiled"
        shutil.copytree(directory, target)
        weights = load_file(target / "model.safetensors")
        weights[tensor] = change(weights[tensor]).contiguous()
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        return target

    return copy


@pytest.fixture(scope="session")
def stored(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with outputs beside it: what Transformers says, written down."""
    source = tiny("mistral")
    directory = tmp_path_factory.mktemp("stored") / "tiny"
    shutil.copytree(source.directory, directory)
    tensors = {}
    for i, prompt in enumerate(prompts((1, 9, 31, 33, 70))):
        greedy = source.greedy(prompt, 6)
        logits = source.logits([*prompt, *greedy[:-1]])
        ours, decode = logits[: len(prompt)], logits[len(prompt) - 1 :]
        tensors |= {
            f"p{i:02d}.input_ids": torch.tensor(prompt),
            f"p{i:02d}.logits_last8": ours[-8:].clone(),
            f"p{i:02d}.top1_all": ours.argmax(-1).int(),
            f"p{i:02d}.top1_logit_all": ours.amax(-1),
            f"p{i:02d}.logsumexp_all": ours.logsumexp(-1),
            f"p{i:02d}.margin_all": -ours.topk(2).values.diff()[:, 0],
            f"p{i:02d}.greedy": torch.tensor(greedy),
            f"p{i:02d}.greedy_logits": decode.clone(),
        }
    save_file(tensors, directory / "expected.safetensors")
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    manifest = {
        "reference_class": "MistralForCausalLM",
        "tolerance": {"fp32_max_abs": 5e-4, "bf16_median_abs": 0.6, "bf16_top1": 0.85},
        "sha256": {"model.safetensors": digest},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory
