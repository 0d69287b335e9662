"""What every attention family offers, and nothing more.

A family is a pure function of (tensors, cache views, plan). Its spec says what one layer needs; a backend's plan holds
everything about the step that all layers of equal `plan_key` share, and is built once per step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.cache_layout import CacheLayout, PagedRows, WindowRows
from allotrope.attention.cost import Lengths, StepCost

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


@dataclass(eq=False)
class Family:
    """One kind of attention: everything that the rest of the project asks about it. A row of `FAMILIES`.

    `backends`: best first; the last one is the reference, which runs anywhere. `naive(spec, **tensors)`: the
    definition, for one sequence without a cache. `ready_inputs(spec, **tensors)`: what `run` takes, made of tensors
    that are normed and rotated already, under the names of the definition.
    `cost(spec, lengths)`: the roofline cost of one layer's step, without parameters. `output_shapes(spec)`: of each
    output of `run`, the shape behind the tokens and the type, None for that of the activations.
    `with_cache(spec, cache)`: the spec with entries and states of a format. `scale_names`: the inputs that plain FP8
    entries were divided by; none where the family stores no FP8 entries. `block_scaled(spec)`: whether entries carry
    scales of their own. `cache_kinds`: what some layer caches beside keys and values of each token: "latent" entries of
    all heads, "compressed" entries of several tokens, a "state".
    """

    name: str
    backends: tuple[AttentionBackend, ...]
    naive: Callable[..., Any]
    ready_inputs: Callable[..., Any]
    cost: Callable[[Any, Lengths], StepCost]
    output_shapes: Callable[[Any], tuple[OutputShape, ...]]
    with_cache: Callable[[Any, CacheFormat], Any]
    scale_names: tuple[str, ...] = ()
    block_scaled: Callable[[Any], bool] = lambda spec: False
    cache_kinds: frozenset[str] = frozenset()


OutputShape = tuple[tuple[int, ...], torch.dtype | None]


@dataclass(frozen=True)
class CacheFormat:
    """`row_format`: "plain", or "scaled" for FP8 entries with scales of their own. `state_dtype`: recurrent states."""

    row_format: str = "plain"
    state_dtype: torch.dtype = torch.float32


def plain_entries(spec: Any, cache: CacheFormat) -> Any:
    """`Family.with_cache` of a family whose entries have one format. Raises ValueError for another one."""
    if cache.row_format != "plain":
        raise ValueError(f"{spec.family}: row_format={cache.row_format!r}; its rows are plain")
    return spec


def formatted_entries(spec: Any, cache: CacheFormat) -> Any:
    """`Family.with_cache` of a family whose spec has a `row_format`."""
    return spec if cache.row_format == "plain" else dataclasses.replace(spec, row_format=cache.row_format)
