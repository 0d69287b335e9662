"""The step of a forward pass: an argument of every layer, never a global."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from allotrope.attention.batch import BatchLayout
from allotrope.attention.family import CacheViews, TokenInputs
from allotrope.layers.data_parallel import RankRows
from allotrope.ops.rope import RopeSpec, RopeTables, Rotation

Inputs = TypeVar("Inputs", bound=TokenInputs)


@dataclass
class Step:
    """One forward pass. `ids`: [T] token ids. `layers`: plan and caches of each layer, or where to find them. `tables`:
    rotation tables that outlive the step; None builds them for this step. `rows`: those of each data-parallel rank;
    None: there is one. `embeddings`: [T, hidden] in the place of those of `ids`, where a host has them.

    Results that later layers read, None until a layer sets them: `topk_indices`: [T, K] those of the last layer with an
    indexer, in the backend's form; `reuses_topk`: layers with an indexer reuse them as well. `per_layer_inputs`:
    [T, layers, width] input of each layer beside the hidden states. `features`: [T, F] hidden states for a draft model,
    where it reads others than those of the head.
    """

    ids: torch.Tensor
    batch: BatchLayout
    layers: Sequence[LayerStep]
    tables: RopeTables | None = None
    rows: RankRows | None = None
    embeddings: torch.Tensor | None = None
    topk_indices: Any = None
    reuses_topk: bool = False
    per_layer_inputs: torch.Tensor | None = None
    features: torch.Tensor | None = None
    _rotations: dict[tuple[RopeSpec, torch.dtype], Rotation] = field(default_factory=dict)
    _all_ids: torch.Tensor | None = None
    _counted: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for layer in self.layers:
            layer.belongs_to(self)

    @property
    def all_ids(self) -> torch.Tensor:
        """The token ids of all data-parallel ranks. Every rank asks for them, or none."""
        if self._all_ids is None:
            self._all_ids = self.ids if self.rows is None else self.rows.gather(self.ids)
        return self._all_ids

    @property
    def counted(self) -> torch.Tensor:
        """[rows of all data-parallel ranks] int64: 1 for each token, 0 for that of a padding row."""
        if self._counted is None:
            tensors = self.batch.tensors
            own = (tensors.seq_lens[tensors.request_of_token] > 0).long()
            if self.rows is not None:
                own = self.rows.gather(torch.zeros_like(own) if self.rows.padding else own)
            self._counted = own
        return self._counted

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

    def attend(self, run: Callable[[LayerStep, Inputs], torch.Tensor], inputs: Inputs) -> torch.Tensor:
        """What the layer's attention, `run`, makes of its `inputs` in this step."""
        return run(self, inputs)

    def shared(self, block: Callable[[torch.Tensor, LayerStep], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """What `block`, which all ranks of a stage share, makes of `x`: [T, hidden], the rows of this rank.

        It gets the rows of all data-parallel ranks, and returns its part of the sum over the stage. Returns
        [T, hidden], this rank's part of the sum over its tensor-parallel group.
        """
        rows = self.step.rows
        return block(x, self) if rows is None else rows.reduce_scatter(block(rows.gather(x), self))


Attend = Callable[[int, Callable[[LayerStep, Any], torch.Tensor], Any], torch.Tensor]
"""The index of a layer, its attention, and the inputs of that, of padded rows; returns as many rows."""


class PaddedLayerStep(LayerStep):
    """A layer of a step with padding rows. Its attention is that of another step, which has the true rows alone:
    `attend` runs it."""

    def __init__(self, index: int, attend: Attend) -> None:
        super().__init__(None, {})
        self._index, self._attend = index, attend

    def attend(self, run: Callable[[LayerStep, Inputs], torch.Tensor], inputs: Inputs) -> torch.Tensor:
        return self._attend(self._index, run, inputs)
