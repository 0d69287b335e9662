"""Projections, output norm and gate around the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from allotrope.attention.gdn import GdnInputs, GdnSpec
from allotrope.attention.registry import FAMILIES
from allotrope.layers.build import Build
from allotrope.layers.linear import Linear, RowLinear, quantizing
from allotrope.layers.mixers.mixer import Mixer, attention_of
from allotrope.layers.parallel import Parallel, Placement, Section
from allotrope.layers.step import LayerStep
from allotrope.ops.rms_norm import GATED_RMS_NORM, RMSNormSpec


@dataclass(frozen=True, kw_only=True)
class GdnMixerSpec:
    """One projection gives [q | k | v | z | b | a]; q, k and v pass through a convolution over `conv_width` tokens.

    `num_k_heads`, `num_v_heads`, `k_head_dim`, `v_head_dim`: as in `GdnSpec`. z gates the output after its norm.
    """

    hidden: int
    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_width: int
    norm_eps: float = 1e-6
    shares_cache_of: int | None = None

    @property
    def inner_sections(self) -> tuple[Section, ...]:
        """The sections that pass through the convolution, head by head."""
        key = self.num_k_heads * self.k_head_dim
        value = self.num_v_heads * self.v_head_dim
        return (
            Section("q", key, self.k_head_dim),
            Section("k", key, self.k_head_dim),
            Section("v", value, self.v_head_dim),
        )

    @property
    def sections(self) -> tuple[Section, ...]:
        """All sections of the projection."""
        heads = self.num_v_heads
        z = Section("z", heads * self.v_head_dim, self.v_head_dim)
        return (*self.inner_sections, z, Section("b", heads, 1), Section("a", heads, 1))

    @property
    def rates(self) -> Section:
        """The decay rates: one for each value head."""
        return Section("", self.num_v_heads, 1)

    def attention(self, parallel: Parallel, dtype: torch.dtype, kv_dtype: torch.dtype) -> GdnSpec:
        return GdnSpec(
            num_k_heads=parallel.split("linear_num_key_heads", self.num_k_heads),
            num_v_heads=parallel.shard("linear_num_value_heads", self.num_v_heads),
            k_head_dim=self.k_head_dim,
            v_head_dim=self.v_head_dim,
            conv_width=self.conv_width,
            conv_dtype=dtype,
        )

    def build(self, build: Build) -> GdnMixer:
        return GdnMixer(self, build)


class GdnMixer(Mixer):
    def __init__(self, spec: GdnMixerSpec, build: Build) -> None:
        super().__init__()
        self.spec = attention_of(spec, build)
        self.backend = build.chooser.choose(FAMILIES[self.spec.family], self.spec)
        self.inputs = Linear(spec.hidden, spec.sections, build.at("inputs"))
        self.quantized_from = self.inputs.quantized_from
        out = Section("", spec.num_v_heads * spec.v_head_dim, spec.v_head_dim)
        self.out = RowLinear(out, spec.hidden, build.at("out"))
        inner, heads = Placement(spec.inner_sections), Placement((Section("", spec.num_v_heads, 1),))
        whole = Placement((Section("", spec.v_head_dim),))
        shape = (self.spec.conv_dim, spec.conv_width)
        self.conv_weight = build.parameter(shape, inner)
        self.A_log = build.parameter((self.spec.num_v_heads,), heads, torch.float32)
        self.dt_bias = build.parameter((self.spec.decay_dim,), Placement((spec.rates,)), torch.float32)
        self.norm = build.parameter((spec.v_head_dim,), whole, torch.float32)
        self.norm_weight, self.norm_floor = self.norm.data, spec.v_head_dim * spec.norm_eps
        norm_spec = RMSNormSpec(spec.v_head_dim, build.dtype)
        self._gated_norm = quantizing(build.chooser.choose(GATED_RMS_NORM, norm_spec), self.out.quantized_from)

    def finish_loading(self) -> None:
        """Lay the convolution's weight out tap by tap, all channels of a tap together, as the family reads it."""
        self.conv_weight.data = self.conv_weight.data.float().t().contiguous().t()
        self.norm_weight = self.norm.data * self.spec.v_head_dim**0.5

    def forward(self, x: torch.Tensor, ctx: LayerStep) -> torch.Tensor:
        """`x`: [T, hidden]. Returns the same shape, this rank's part of the sum over the ranks."""
        spec = self.spec
        sizes = (spec.conv_dim, spec.value_dim, spec.num_v_heads, spec.num_v_heads)
        qkv, z, b, a = self.inputs(x).split(sizes, dim=-1)
        return self.out(self.gated_norm(self.mix(qkv, b, a, ctx), z, "silu"))

    def mix(self, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, ctx: LayerStep) -> torch.Tensor:
        """The rule. Arguments as the family's; returns [T, Hv, Dv]."""
        inputs = GdnInputs(qkv, b, a, self.conv_weight, None, self.A_log, self.dt_bias)
        return ctx.attend(self._attend, inputs)

    def gated_norm(self, mixed: torch.Tensor, gate: torch.Tensor, kind: Literal["silu", "sigmoid"]) -> torch.Tensor:
        """The norm of each head times silu or sigmoid of its gate. `mixed`: [T, Hv, Dv]. `gate`: [T, value_dim].

        Returns [T, value_dim] in the gate's type.
        """
        normed: torch.Tensor = self._gated_norm(mixed, self.norm_weight, self.norm_floor, gate, kind)
        return normed
