"""The step of a forward pass: an argument of every layer, never a global."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from allotrope.attention.batch import BatchLayout
from allotrope.attention.family import CacheViews
from allotrope.ops.rope import RopeSpec, RopeTables, Rotation


@dataclass
class Step:
    """One forward pass. `ids`: [T] token ids. `layers`: plan and caches of each layer. `tables`: rotation tables that
    outlive the step; None builds them for this step.

    Results that later layers read, None until a layer sets them: `topk_indices`: [T, K] those of the last layer with an
    indexer, in the backend's form. `per_layer_inputs`: [T, layers, width] input of each layer beside the hidden states.
    `features`: [T, F] hidden states for a draft model, where it reads others than those of the head.
    """

    ids: torch.Tensor
    batch: BatchLayout
    layers: Sequence[LayerStep]
    tables: RopeTables | None = None
    topk_indices: Any = None
    per_layer_inputs: torch.Tensor | None = None
    features: torch.Tensor | None = None
    _rotations: dict[tuple[RopeSpec, torch.dtype], Rotation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer in self.layers:
            layer.belongs_to(self)

    @property
    def rotations(self) -> list[tuple[RopeSpec, torch.dtype]]:
        """Those that were asked for."""
        return list(self._rotations)

    def rotation(self, spec: RopeSpec, dtype: torch.dtype) -> Rotation:
        """cos and sin of the step's positions, computed once per step, spec and type."""
        key = (spec, dtype)
        if key not in self._rotations:
            if self.tables is None:
                self.tables = RopeTables(self.batch.device)
            self._rotations[key] = self.tables[spec].at(self.batch.positions, dtype)
        return self._rotations[key]


class LayerStep:
    """`plan`: the family's plan for this layer. `caches`: its views (or those of the layer whose cache it reads).

    `step` is a weak reference: a reference cycle would keep a step's tensors on the device until Python's garbage
    collector runs.
    """

    def __init__(self, plan: Any, caches: CacheViews) -> None:
        self.plan, self.caches = plan, caches
        self._step: weakref.ref[Step] | None = None

    def belongs_to(self, step: Step) -> None:
        self._step = weakref.ref(step)

    @property
    def step(self) -> Step:
        step = None if self._step is None else self._step()
        assert step is not None, "a layer's step is over, or has not begun"
        return step
