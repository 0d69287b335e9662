"""Pipeline stages: which layers a rank holds, and where a model may be cut.

Owns the cut. Must not know what passes from stage to stage, or how.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from allotrope.layers.model_spec import LayerSpec


@dataclass(frozen=True)
class Stage:
    """The layers from `first` to before `last`, of `count`. The first stage also has the embedding and the head."""

    first: int
    last: int
    count: int

    @staticmethod
    def whole(count: int) -> Stage:
        """All layers of a model."""
        return Stage(0, count, count)

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.count

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.first <= layer < self.last

    def __len__(self) -> int:
        return self.last - self.first


class StageLayers(nn.ModuleList):
    """The layers of a stage, under their numbers in the model: a stage has the names of the whole."""

    def __init__(self, layers: Sequence[nn.Module], first: int) -> None:
        super().__init__()
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())

    def __getitem__(self, index: int) -> nn.Module:  # type: ignore[override]
        return list(self)[index]


def border_reason(layers: Sequence[LayerSpec], border: int) -> str | None:
    """Why no stage may begin with layer `border`; None: it may."""
    for number in range(border, len(layers)):
        owner = layers[number].mixer.shares_cache_of
        if owner is not None and owner < border:
            return f"layer {number} reads the cache of layer {owner}"
    for number in range(border, len(layers)):
        reads = getattr(layers[number].mixer, "reads_topk_indices", None)
        if reads:
            return f"layer {number} reads the top-k indices of a layer before {border}"
        if reads is not None:
            break
    return None


def cut(layers: Sequence[LayerSpec], weights: Sequence[int], first_bytes: int, stages: int) -> tuple[Stage, ...]:
    """Runs of layers for `stages` stages, so that the largest holds the fewest bytes.

    `weights`: bytes of each layer. `first_bytes`: those of the embedding and the head, which the first stage holds.
    Raises ValueError with the reasons where there is no such cut.
    """
    count = len(layers)
    reasons = {border: border_reason(layers, border) for border in range(1, count)}
    free = [border for border, reason in reasons.items() if reason is None]
    if len(free) + 1 < stages:
        kept = [f"before layer {border}: {reason}" for border, reason in reasons.items() if reason is not None]
        shown = "; ".join(kept[:4] + ([f"and {len(kept) - 4} more"] if len(kept) > 4 else []))
        raise ValueError(
            f"pipeline_parallel_size={stages} (needs {len(free) + 1} or fewer: {count} layers"
            + (f", and no stage may begin {shown})" if shown else ")")
        )
    before = [0, *itertools.accumulate(weights)]

    @functools.cache
    def best(first: int, left: int) -> tuple[int, tuple[int, ...]]:
        """The bytes of the largest of `left` stages from layer `first` on, and where the later ones begin."""
        own = first_bytes if first == 0 else 0
        if left == 1:
            return own + before[count] - before[first], ()
        found = []
        for border in free:
            if border > first and sum(one > border for one in free) >= left - 2:
                rest, borders = best(border, left - 1)
                found.append((max(own + before[border] - before[first], rest), (border, *borders)))
        return min(found)

    _, borders = best(0, stages)
    return tuple(Stage(first, last, count) for first, last in itertools.pairwise((0, *borders, count)))
