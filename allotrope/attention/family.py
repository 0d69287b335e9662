"""The interface of an attention family.

A family is a pure function of (tensors, cache views, plan). Its spec describes one layer. A backend's plan describes
the step, is built once per step, and is shared by all layers of equal `plan_key`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.cache_layout import CacheLayout, PagedRows, WindowRows
from allotrope.attention.cost import Lengths, StepCost

CacheViews = Mapping[str, Mapping[str, torch.Tensor]]
"""The caches of one layer: cache name -> field name -> tensor."""


class TokenInputs(Protocol):
    """The inputs of a family's `run`."""

    def map_tokens(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same inputs with `change` of every tensor that has a row for each token."""
        ...


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
    """A spec with context lengths of its own in `boundaries`."""

    def boundaries(self) -> tuple[int, ...]:
        """Context lengths, in tokens, at which the layer starts to compute in another way."""
        ...


def boundaries(spec: Spec) -> tuple[int, ...]:
    """Context lengths at which a layer starts to compute in another way, ascending.

    They are the windows and strides of its caches, and those that the spec adds (a top-k, a chunk size). Tests run
    lengths just below, at and above each.
    """
    lengths = set(spec.boundaries()) if isinstance(spec, HasBoundaries) else set()
    for layout in spec.caches().values():
        if isinstance(layout, WindowRows):
            lengths.add(layout.window)
        elif isinstance(layout, PagedRows):
            lengths.add(layout.stride)
    return tuple(sorted(length for length in lengths if length > 1))


@dataclass(eq=False)
class Family:
    """One kind of attention, as the rest of the project reads it. A row of `FAMILIES`.

    `backends`: best first; the last one is the reference, which runs anywhere. `naive(spec, **tensors)`: the
    definition, for one sequence without a cache. `ready_inputs(spec, **tensors)`: the inputs of `run` from tensors that
    are normed and rotated already, under the names of the definition. `cost(spec, lengths)`: the roofline cost of one
    layer's step, without parameters. `output_shapes(spec)`: for each output of `run`, its dimensions after the tokens
    and its type, None for the type of the activations. `with_cache(spec, cache)`: the spec with a format of cache
    entries and states. `scale_names`: the inputs that plain FP8 entries were divided by; none where the family stores
    no FP8 entries. `block_scaled(spec)`: whether entries hold the scales of their blocks. `cache_kinds`: the kinds of
    cache beside keys and values of each token: "latent" entries of all heads, "compressed" entries of several tokens,
    a "state". `matmul_share`: of the rate of a large matrix product, what prompts reach. `gathered(spec, lengths)`:
    bytes that the ranks which share a layer gather in a step.
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
    matmul_share: float = 1.0
    gathered: Callable[[Any, Lengths], int] = lambda spec, lengths: 0


OutputShape = tuple[tuple[int, ...], torch.dtype | None]


@dataclass(frozen=True)
class CacheFormat:
    """`row_format`: "plain", or "scaled" for block-scaled FP8 entries. `state_dtype`: type of recurrent states.
    `max_drafts`: drafts of a sequence in one step whose inputs are kept beside a recurrent state.
    """

    row_format: str = "plain"
    state_dtype: torch.dtype = torch.float32
    max_drafts: int = 0


def plain_entries(spec: Any, cache: CacheFormat) -> Any:
    """`Family.with_cache` of a family whose entries have one format. Raises ValueError for another one."""
    if cache.row_format != "plain":
        raise ValueError(f"{spec.family}: kv_cache_dtype=fp8_ds_mla is for latents, and it has none; try fp8")
    return spec


def formatted_entries(spec: Any, cache: CacheFormat) -> Any:
    """`Family.with_cache` of a family whose spec has a `row_format`."""
    return spec if cache.row_format == "plain" else dataclasses.replace(spec, row_format=cache.row_format)
