"""What a model's layer says about its mixer, and what the engine may ask of it."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import nn

from allotrope.attention.cache_layout import StateSlots
from allotrope.attention.dsa import DsaSpec
from allotrope.attention.family import Spec
from allotrope.attention.gdn import GdnSpec
from allotrope.layers.build import Build
from allotrope.layers.parallel import Parallel


class MixerSpec(Protocol):
    """The numbers of one layer's token mixing, whole (not one rank's)."""

    @property
    def shares_cache_of(self) -> int | None:
        """Index of the earlier layer whose cache this one reads; None if it owns one."""
        ...

    def attention(self, parallel: Parallel, dtype: torch.dtype, kv_dtype: torch.dtype) -> Spec:
        """The family's spec as one rank sees it. Raises ValueError where heads cannot be shared out."""
        ...

    def build(self, build: Build) -> nn.Module:
        """The module: `forward(x [T, hidden], here: LayerStep) -> [T, hidden]`."""
        ...


def attention_of(spec: MixerSpec, build: Build) -> Any:
    """The family's spec of a layer as `build` wants its rows or states. Raises ValueError where it cannot be."""
    found = with_row_format(spec.attention(build.parallel, build.dtype, build.kv_dtype), build.row_format)
    return dataclasses.replace(found, state_dtype=build.state_dtype) if isinstance(found, GdnSpec) else found


def with_row_format(spec: Any, row_format: str) -> Any:
    """`spec` with rows of a format. Raises ValueError if its family has no such rows; states have no format."""
    if isinstance(spec, DsaSpec):
        return dataclasses.replace(spec, mla=with_row_format(spec.mla, row_format))
    if row_format == "plain" or all(isinstance(layout, StateSlots) for layout in spec.caches().values()):
        return spec
    if not hasattr(spec, "row_format"):
        raise ValueError(f"{spec.family}: row_format={row_format!r}; its rows are plain")
    return dataclasses.replace(spec, row_format=row_format)
