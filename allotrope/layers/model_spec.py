"""A model in numbers: what its config says, in our words, before any weight is read."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.mixers.mixer import MixerSpec


class FfnSpec(Protocol):
    """The numbers of one layer's feed-forward part (dense or mixture of experts)."""

    def build(self, build: Build) -> nn.Module:
        """The module: `forward(x [T, hidden], ctx: LayerStep) -> [T, hidden]`, this rank's part of the sum over the
        ranks."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer. `extra`: numbers that only the architecture's own layer class reads."""

    mixer: MixerSpec
    ffn: FfnSpec
    extra: Hashable = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """`context`: longest sequence the checkpoint was made for. `norm_offset`: 1.0 where norm weights are around 0.

    `softcap`: of the final logits. `extra`: numbers that only the architecture's own decoder reads.
    """

    vocab_size: int
    hidden: int
    context: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    norm_offset: float = 0.0
    tied: bool = False
    embedding_scale: float = 1.0
    softcap: float | None = None
    extra: Hashable = None

    @property
    def longest_context(self) -> int:
        """`context`, or as far as YaRN stretches the positions of a layer, if that is farther: checkpoints are released
        without it, and it is added for longer texts."""
        ropes = [getattr(layer.mixer, "rope", None) for layer in self.layers]
        return max([self.context, *(rope.scaling.reach for rope in ropes if rope is not None)])
