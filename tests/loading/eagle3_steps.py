"""Runs a decoder, and a draft model behind it, without an engine: each over pages of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from allotrope.architectures.registry import read_spec
from allotrope.attention.batch import BatchLayout, CacheIndex, index_pages
from allotrope.attention.cache_layout import pool_bytes, views
from allotrope.checkpoint.checkpoint import Checkpoint, open_checkpoint
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.layers.step import LayerStep, Step
from allotrope.loading.decoder import load_decoder, make_decoder
from allotrope.loading.eagle3 import eagle3_build, load_eagle3, resolve_eagle3

PAGE, PAGES = 4, 5
CPU = torch.device("cpu")


def quiet(line: str) -> None:
    """Takes a line of the log."""


class ExpectedHeads:
    """The file of `make_eagle3_expected.py`. `features`, `ids`: of its pass. `heads`: name -> config, tensor names."""

    def __init__(self) -> None:
        self._file = safe_open(str(Path(__file__).with_name("eagle3_expected.safetensors")), "pt")
        self.heads: dict[str, dict[str, Any]] = json.loads(self._file.metadata()["heads"])
        self.features, self.ids = self._file.get_tensor("features"), self._file.get_tensor("ids")

    def logits(self, head: str) -> torch.Tensor:
        """[steps, tokens, draft vocabulary]."""
        return self._file.get_tensor(f"logits:{head}")

    def state(self, head: str) -> dict[str, torch.Tensor]:
        """The tensors of a head as its checkpoint has them, in fp32."""
        size = self.heads[head]["config"]["draft_vocab_size"]
        stored = {name: f"{name}:{size}" if name == "lm_head.weight" else name for name in self.heads[head]["names"]}
        state = {name: self._file.get_tensor(f"weight:{key}") for name, key in stored.items()}
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def write(directory: Path, config: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> Checkpoint:
    """A checkpoint with these contents."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
    return open_checkpoint(str(directory))


def load_target(checkpoint: Checkpoint | None, config: dict[str, Any], build: Build) -> Decoder:
    """The decoder of a config, from a checkpoint or with random weights."""
    architecture, spec = read_spec(config, "target")
    decoder = make_decoder(architecture, spec, build)
    return load_decoder(decoder, architecture, build, checkpoint, seed=0, quantized_weights="dequantize", log=quiet)


def load_head(checkpoint: Checkpoint, target: Decoder, build: Build) -> DraftModel:
    """The head of a checkpoint, or with random weights if it has none."""
    spec = resolve_eagle3(checkpoint, target.spec, type(target))
    build = eagle3_build(checkpoint, spec, target, build)
    weights = checkpoint if checkpoint.has_weights else None
    return load_eagle3(spec, target, build, weights, seed=0, quantized_weights="keep", log=quiet)


class Pools:
    """The caches of a model's layers for `sequences` sequences of up to PAGE * PAGES tokens. `model`: with
    `attention`."""

    def __init__(self, model: Decoder | DraftModel, sequences: int) -> None:
        self.model = model
        self.pages = [[1 + PAGES * i + page for page in range(PAGES)] for i in range(sequences)]
        self.pools = []
        for spec, _ in model.attention:
            pools = {}
            for name, layout in spec.caches().items():
                memory = torch.zeros(pool_bytes(layout, PAGE, 1 + PAGES * sequences), dtype=torch.uint8)
                pools[name] = views(layout, PAGE, 1 + PAGES * sequences, memory)
            self.pools.append(pools)

    def step(self, ids: torch.Tensor, batch: BatchLayout) -> tuple[Step, list[LayerStep]]:
        """One step of all sequences. The layers live as long as the caller keeps the step."""
        layers = []
        for (spec, backend), pools in zip(self.model.attention, self.pools, strict=True):
            index: dict[str, CacheIndex] = {name: index_pages(batch, PAGE, self.pages) for name in pools}
            layers.append(LayerStep(backend.plan(spec, batch, index), pools))
        return Step(ids, batch, layers), layers


def prefill(lengths: Sequence[int]) -> BatchLayout:
    """A step that holds whole sequences."""
    return BatchLayout(tuple(lengths), tuple(lengths), CPU)


def decode(lengths: Sequence[int]) -> BatchLayout:
    """A step with one new token for each sequence, of these lengths after it."""
    return BatchLayout((1,) * len(lengths), tuple(lengths), CPU)
