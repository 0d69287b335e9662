"""A draft model in numbers, before any weight is read."""

from __future__ import annotations

from typing import Protocol

from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.layers.model_spec import LayerSpec, ModelSpec


class DraftSpec(Protocol):
    """`layers`: its decoder layers. `prefix`: beginning of the names of its tensors in a checkpoint."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...

    @property
    def prefix(self) -> str: ...

    def build(self, target: Decoder, spec: ModelSpec, build: Build) -> DraftModel:
        """The module, with parameters on the build's device and no values in them.

        `target`: the model that it drafts for, whose embedding and head it may share. `spec`: the target's. `build`:
        its `formats` are those of the draft model's own weights.
        """
        ...
