"""Projections, norms and rotation around softmax attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from allotrope.attention.mha import MhaInputs, MhaSpec
from allotrope.attention.registry import FAMILIES
from allotrope.layers.build import Build
from allotrope.layers.linear import Linear, RowLinear, quantizing
from allotrope.layers.mixers.mixer import Mixer, attention_of, head_norm
from allotrope.layers.norm import AllHeadsNorm, RMSNorm
from allotrope.layers.parallel import Parallel, Placement, Section
from allotrope.layers.step import LayerStep
from allotrope.ops.gated_activation import SIGMOID_GATE, SigmoidGateSpec
from allotrope.ops.qk_norm_rope import HeadSpec
from allotrope.ops.rope import APPLY_ROPE, ROPE_COS_SIN, ApplyRopeSpec, RopeSpec


@dataclass(frozen=True, kw_only=True)
class MhaMixerSpec:
    """`qk_norm`: RMS of q and of k before rotation, over each "head" or over "all" heads at once. `bias`: on q, k, v;
    `out_bias`: on the output.

    `norm_offset`: 1.0 where the norm's stored weight is around 0. `v_head_dim`: default `head_dim`. `values_from_keys`:
    values are the projected keys, before their norm and rotation. `v_norm`: RMS over each head of v, without a weight.
    `value_scale`: multiplies v. `output_gate`: the output is multiplied by the sigmoid of a projection of x. A layer
    that shares another's cache projects queries only. `inputs`: size of x; default `hidden`, the size of the output.
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    v_head_dim: int | None = None
    values_from_keys: bool = False
    v_norm: bool = False
    value_scale: float = 1.0
    output_gate: bool = False
    shares_cache_of: int | None = None
    inputs: int | None = None

    def attention(self, parallel: Parallel, dtype: torch.dtype, kv_dtype: torch.dtype) -> MhaSpec:
        return MhaSpec(
            num_heads=parallel.shard("num_attention_heads", self.num_heads),
            num_kv_heads=parallel.split("num_key_value_heads", self.num_kv_heads),
            head_dim=self.head_dim,
            scale=self.scale,
            kv_dtype=kv_dtype,
            v_head_dim=self.v_head_dim,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def build(self, build: Build) -> MhaMixer:
        return MhaMixer(self, build)


class MhaMixer(Mixer):
    def __init__(self, spec: MhaMixerSpec, build: Build) -> None:
        super().__init__()
        self.rope = spec.rope
        self._apply_rope = None
        if spec.rope is not None:
            build.chooser.choose(ROPE_COS_SIN, spec.rope)
            self._apply_rope = build.chooser.choose(APPLY_ROPE, ApplyRopeSpec(build.dtype)).run
        self.spec = attention_of(spec, build)
        self.backend = build.chooser.choose(FAMILIES[self.spec.family], self.spec)
        # Scales of FP8 entries by the argument's name; empty for other types.
        self.kv_scales: dict[str, float] = {}
        heads, dim, value_dim = spec.num_heads, spec.head_dim, self.spec.value_dim
        self.qkv = Linear(spec.inputs or spec.hidden, _sections(spec, value_dim), build.at("qkv"), bias=spec.bias)
        self.quantized_from = self.qkv.quantized_from
        out = Section("", heads * value_dim, value_dim)
        self.out = RowLinear(out, spec.hidden, build.at("out"), bias=spec.out_bias)
        self.gate_size = self.spec.num_heads * value_dim if spec.output_gate else 0
        self._apply_gate = None
        if self.gate_size:
            apply_gate = build.chooser.choose(SIGMOID_GATE, SigmoidGateSpec(build.dtype))
            self._apply_gate = quantizing(apply_gate, self.out.quantized_from)
        self.v_norm = RMSNorm(value_dim, spec.norm_eps, build, weighted=False) if spec.v_norm else None
        self.q_norm: RMSNorm | AllHeadsNorm | None = None
        self.k_norm: RMSNorm | AllHeadsNorm | None = None
        if spec.qk_norm == "head":
            self.q_norm = RMSNorm(dim, spec.norm_eps, build, offset=spec.norm_offset)
            if spec.shares_cache_of is None:
                self.k_norm = RMSNorm(dim, spec.norm_eps, build, offset=spec.norm_offset)
        if spec.qk_norm == "all":
            self.q_norm = AllHeadsNorm(heads, dim, spec.norm_eps, build)
            self.k_norm = AllHeadsNorm(spec.num_kv_heads, dim, spec.norm_eps, build)
        self.sinks = None
        if spec.sinks:
            placement = Placement((Section("", heads, 1),))
            self.sinks = build.parameter((self.spec.num_heads,), placement, torch.float32)
        self.heads = HeadSpec(
            heads=self.spec.num_heads,
            kv_heads=self.spec.num_kv_heads if spec.shares_cache_of is None else 0,
            dim=spec.head_dim,
            v_dim=self.spec.value_dim,
            eps=spec.norm_eps,
            qk_norm=spec.qk_norm is not None,
            v_norm=spec.v_norm,
            value_scale=spec.value_scale,
            values_from_keys=spec.values_from_keys,
        )

    def forward(self, x: torch.Tensor, ctx: LayerStep) -> torch.Tensor:
        """`x`: [T, inputs]. Returns [T, hidden], this rank's part of the sum over the ranks."""
        inputs, gate = self._inputs(x, ctx)
        return self._out(ctx.attend(self._attend, inputs), gate)

    def store(self, x: torch.Tensor, ctx: LayerStep) -> None:
        """The part of `forward` that stores keys and values; the backend has a `store`."""
        assert self.backend.store is not None
        self.backend.store(self.spec, ctx.plan, ctx.caches, self._inputs(x, ctx)[0])

    def _inputs(self, x: torch.Tensor, ctx: LayerStep) -> tuple[MhaInputs, torch.Tensor | None]:
        """The family's inputs, and the gate of its output."""
        projected = self.qkv(x)
        gate = None
        if self.gate_size:
            projected, gate = projected.split((projected.shape[1] - self.gate_size, self.gate_size), dim=1)
        inputs = MhaInputs(
            projected,
            self.heads,
            None if self.rope is None else ctx.step.rotation(self.rope, projected.dtype),
            self._apply_rope,
            head_norm(self.q_norm),
            head_norm(self.k_norm),
            head_norm(self.v_norm),
            self.sinks,
            **self.kv_scales,
        )
        return inputs, gate

    def _out(self, attended: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        attended = attended.flatten(1)
        if gate is not None and self._apply_gate is not None:
            attended = self._apply_gate(attended, gate)
        return self.out(attended)


def _sections(spec: MhaMixerSpec, value_dim: int) -> tuple[Section, ...]:
    """The sections of the fused projection, head by head."""
    dim, groups = spec.head_dim, spec.num_kv_heads
    sections = [Section("q", spec.num_heads * dim, dim)]
    if spec.shares_cache_of is None:
        sections.append(Section("k", groups * dim, dim))
        if not spec.values_from_keys:
            sections.append(Section("v", groups * value_dim, value_dim))
    if spec.output_gate:
        sections.append(Section("gate", spec.num_heads * value_dim, value_dim))
    return tuple(sections)
