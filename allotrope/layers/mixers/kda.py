"""Projections, output norm and gate around the gated delta rule with a decay per key channel."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from allotrope.attention.gdn import GdnSpec
from allotrope.layers.build import Build
from allotrope.layers.linear import Linear
from allotrope.layers.mixers.gdn import GdnMixer, GdnMixerSpec
from allotrope.layers.parallel import Parallel, Section
from allotrope.layers.step import LayerStep


@dataclass(frozen=True, kw_only=True)
class KdaMixerSpec(GdnMixerSpec):
    """A `GdnMixerSpec` whose decay and gate are projected from latents of x, each of size `rank`."""

    rank: int

    @property
    def sections(self) -> tuple[Section, ...]:
        """The sections that are projected from x; every rank holds both latents whole."""
        b = Section("b", self.num_v_heads, 1)
        return (*self.inner_sections, b, Section("decay", self.rank), Section("gate", self.rank))

    @property
    def rates(self) -> Section:
        """The decay rates: one for each key channel of each value head."""
        return Section("", self.num_v_heads * self.k_head_dim, self.k_head_dim)

    def attention(self, parallel: Parallel, dtype: torch.dtype, kv_dtype: torch.dtype) -> GdnSpec:
        return dataclasses.replace(super().attention(parallel, dtype, kv_dtype), channel_decay=True)

    def build(self, build: Build) -> KdaMixer:
        return KdaMixer(self, build)


class KdaMixer(GdnMixer):
    def __init__(self, spec: KdaMixerSpec, build: Build) -> None:
        super().__init__(spec, build)
        self.rank = spec.rank
        values = Section("", spec.num_v_heads * spec.v_head_dim, spec.v_head_dim)
        self.decay = Linear(spec.rank, (spec.rates,), build.at("decay"))
        self.gate = Linear(spec.rank, (values,), build.at("gate"))

    def forward(self, x: torch.Tensor, ctx: LayerStep) -> torch.Tensor:
        """`x`: [T, hidden]. Returns the same shape, this rank's part of the sum over the ranks."""
        sizes = (self.spec.conv_dim, self.spec.num_v_heads, self.rank, self.rank)
        qkv, b, decay, gate = self.inputs(x).split(sizes, dim=-1)
        return self.out(self.gated_norm(self.mix(qkv, b, self.decay(decay), ctx), self.gate(gate), "sigmoid"))
