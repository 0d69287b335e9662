"""The interface of a mixer, for models and for the engine."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from allotrope.attention import csa, dsa
from allotrope.attention.backend import AttentionBackend
from allotrope.attention.family import CacheFormat, Spec
from allotrope.attention.head_norm import HeadNorm
from allotrope.attention.registry import FAMILIES
from allotrope.layers.build import Build
from allotrope.layers.norm import AllHeadsNorm, RMSNorm
from allotrope.layers.parallel import Parallel
from allotrope.layers.step import LayerStep
from allotrope.ops.all_gather_reduce_scatter import ALL_GATHER

Shared = TypeVar("Shared", csa.IndexerSpec, dsa.IndexerSpec)


class MixerSpec(Protocol):
    """The sizes of one layer's mixer, over all ranks."""

    @property
    def shares_cache_of(self) -> int | None:
        """Index of the earlier layer whose cache this one reads; None if it owns one."""
        ...

    def attention(self, parallel: Parallel, dtype: torch.dtype, kv_dtype: torch.dtype) -> Spec:
        """The family's spec as one rank sees it. Raises ValueError where heads cannot be shared out."""
        ...

    def build(self, build: Build) -> nn.Module:
        """The module: `forward(x [T, hidden], ctx: LayerStep) -> [T, hidden]`, this rank's part of the sum over the
        ranks."""
        ...


class Mixer(nn.Module):
    """A mixer around the attention `spec`, which `backend` runs. `quantized_from`: of the product that reads the input,
    as of `Linear`."""

    spec: Any
    backend: AttentionBackend
    quantized_from: int | None = None

    def _attend(self, ctx: LayerStep, inputs: Any) -> torch.Tensor:
        """The attention of a step. `inputs`: of the family."""
        attended: torch.Tensor = self.backend.run(self.spec, ctx.plan, ctx.caches, inputs)
        return attended


def attention_of(spec: MixerSpec, build: Build) -> Any:
    """The family's spec of a layer with the cache format of `build`. Raises ValueError for an unsupported format."""
    attention = spec.attention(build.parallel, build.dtype, build.kv_dtype)
    cache = CacheFormat(build.row_format, build.state_dtype, build.max_drafts)
    return FAMILIES[attention.family].with_cache(attention, cache)


def shared_by(parallel: Parallel, indexer: Shared | None) -> Shared | None:
    """The indexer of one of the ranks that share its work on prompts; inside a host, which has no gather of rows, each
    rank does all of it."""
    if indexer is None or parallel.host_all_reduce is not None:
        return indexer
    return dataclasses.replace(indexer, rank=parallel.rank, ranks=parallel.size)


def choose_gather(indexer: Shared | None, hidden: int, build: Build) -> None:
    """The backend that gathers the top-k indices of the ranks that share an indexer, through `Parallel`."""
    if indexer is not None and indexer.ranks > 1:
        build.chooser.choose(ALL_GATHER, build.parallel.all_reduce_spec(hidden, build.dtype))


def head_norm(norm: RMSNorm | AllHeadsNorm | None) -> HeadNorm | None:
    """A layer's norm in the form of the family's inputs."""
    if norm is None:
        return None
    return HeadNorm(norm, norm.scaled_weight if isinstance(norm, RMSNorm) else None)
