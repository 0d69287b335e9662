"""The draft head that a model's own checkpoint brings: which tensors are its, and how it is made and filled.

Must not know how drafts are made or verified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.checkpoint import Checkpoint, CheckpointView, TensorHeader
from allotrope.errors import ModelError
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.layers.draft_spec import DraftSpec
from allotrope.loading.decoder import fill_draft, quantized_draft_build


class DraftTensors(CheckpointView):
    """A checkpoint with the tensors of its draft head alone: those whose names begin with `prefix`."""

    def __init__(self, inner: Checkpoint, prefix: str) -> None:
        super().__init__(inner)
        self._kept = {name: header for name, header in inner.headers().items() if name.startswith(prefix)}

    def headers(self) -> dict[str, TensorHeader]:
        """As `Checkpoint.headers`."""
        return self._kept


def draft_tensors(checkpoint: Checkpoint, draft: DraftSpec) -> DraftTensors:
    """The tensors of the draft head. Raises ModelError where the checkpoint has weights, and none of the head."""
    tensors = DraftTensors(checkpoint, draft.prefix)
    if checkpoint.has_weights and not tensors.headers():
        raise ModelError(checkpoint.source, [f"config.json names a draft head, and no tensor is named {draft.prefix}*"])
    return tensors


def draft_build(
    checkpoint: Checkpoint, architecture: Architecture, target: Decoder, draft: DraftSpec, build: Build
) -> Build:
    """`build` of the model `target` for its draft head: with the formats of the head's weights that stay quantized."""

    def make(build: Build) -> DraftModel:
        return make_meta_draft(draft, target, build)

    rules = architecture.draft_rules(target.spec, draft)
    return quantized_draft_build(draft_tensors(checkpoint, draft), rules, build, make)


def make_meta_draft(draft: DraftSpec, target: Decoder, build: Build) -> DraftModel:
    """The draft model with parameters that take no memory. Those that it shares with `target` are not among them."""
    return draft.build(target, target.spec, dataclasses.replace(build, device=torch.device("meta")))


def load_draft(
    draft: DraftSpec,
    target: Decoder,
    architecture: Architecture,
    build: Build,
    weights: Checkpoint | None,
    *,
    seed: int,
    quantized_weights: str,
    log: Callable[[str], None],
) -> DraftModel:
    """Make the draft model of `target` and fill it.

    `target`: loaded. `build`: of `draft_build`, or the model's where no weight stays quantized. `weights`: the model's
    checkpoint; None draws random weights. The rest as in `load_decoder`. Raises ModelError for a checkpoint without
    the draft head, or with other tensors than it has.
    """
    model = draft.build(target, target.spec, build)
    source = None if weights is None else draft_tensors(weights, draft)
    rules = architecture.draft_rules(target.spec, draft)
    return fill_draft(model, rules, build, source, seed=seed, quantized_weights=quantized_weights, log=log)
