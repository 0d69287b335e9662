"""A host's stream of weights as a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from allotrope.checkpoint.checkpoint import Checkpoint, CheckpointView, TensorHeader
from allotrope.errors import ModelError

# Loaders of hosts that fill parameters with what they saved of a model in memory, quantize, or go layer by layer.
FOREIGN_FORMATS = ("sharded_state", "runai_streamer_sharded", "presharded", "flash_rl", "layered")


def foreign_weights(load_format: str) -> str:
    """Why weights are refused that a host does not hand over one by one."""
    models = "Allotrope's models, which are loaded whole, from the checkpoint's own tensors"
    return f"load_format={load_format} is not supported by {models}"


def hub_revision(model: str, revision: str | None) -> str | None:
    """The revision of a hub id. Hosts keep it beside the directory that they have put in the place of the id."""
    return None if Path(model).expanduser().exists() else revision


class StreamedWeights(CheckpointView):
    """The weights that a host hands over one by one. CPU tensors of safetensors files stay mapped: they take no
    memory."""

    def __init__(self, checkpoint: Checkpoint, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__(checkpoint)
        self.has_weights = True
        self._weights = dict(weights)

    def headers(self) -> dict[str, TensorHeader]:
        """As `Checkpoint.headers`."""
        return {
            name: TensorHeader(name, tuple(tensor.shape), tensor.dtype, tensor.nbytes)
            for name, tensor in self._weights.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """As `Checkpoint.read`."""
        return self._weights[name]

    def blocks(self, name: str) -> torch.Tensor:
        """As `Checkpoint.blocks`."""
        raise ModelError(self.source, [f"{name} is not stored in blocks"])

    def of_text_model(self) -> StreamedWeights:
        """As of a model that answers: checkpoints of embeddings alone leave out `model.` and the head."""
        weights = self._weights
        if "embed_tokens.weight" in weights:
            weights = {f"model.{name}": tensor for name, tensor in weights.items()}
        if "model.embed_tokens.weight" in weights:
            # Nobody reads it there.
            weights = {"lm_head.weight": weights["model.embed_tokens.weight"]} | weights
        return StreamedWeights(self.inner, weights.items())
