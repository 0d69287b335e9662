"""What every attention family offers, and nothing more.

A family is a pure function of (tensors, cache views, plan). Its spec says what one layer needs; a backend's plan holds
everything about the step that all layers of equal `plan_key` share, and is built once per step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from allotrope.attention.cache_layout import CacheLayout, PagedRows, WindowRows

CacheViews = Mapping[str, Mapping[str, torch.Tensor]]
"""Of one layer: cache name -> field name -> tensor."""


class Spec(Protocol):
    """One layer's attention, in numbers. Frozen and hashable; per-rank head counts."""

    @property
    def family(self) -> str:
        """Name of the family that runs it (a key of `FAMILIES`)."""
        ...

    @property
    def plan_key(self) -> Hashable:
        """Layers with equal keys and equal cache groups share one plan a step."""
        ...

    def caches(self) -> dict[str, CacheLayout]:
        """The caches the layer owns, by name; empty if it reads another layer's."""
        ...


@runtime_checkable
class HasBoundaries(Protocol):
    """A spec that knows more context lengths than its caches tell; see `boundaries`."""

    def boundaries(self) -> tuple[int, ...]:
        """Context lengths, in tokens, at which the layer starts to compute in another way."""
        ...


def boundaries(spec: Spec) -> tuple[int, ...]:
    """Context lengths at which a layer starts to compute in another way, ascending.

    They are the windows and strides of its caches, and what the spec adds (a top-k, a chunk size). Whoever tests a
    layer runs lengths just below, at and above each.
    """
    found = set(spec.boundaries()) if isinstance(spec, HasBoundaries) else set()
    for layout in spec.caches().values():
        if isinstance(layout, WindowRows):
            found.add(layout.window)
        elif isinstance(layout, PagedRows):
            found.add(layout.stride)
    return tuple(sorted(length for length in found if length > 1))


class Family(Protocol):
    """A module-like object per family; see `allotrope.attention.registry.FAMILIES`."""

    name: str

    @property
    def backends(self) -> tuple[Any, ...]:
        """The `Backend`s that can run it, best first; the last one is the reference, which runs anywhere."""
        ...
