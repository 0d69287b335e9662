"""Projections, norms and rotation around softmax attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from allotrope.attention.backend import choose
from allotrope.attention.mha import MhaSpec
from allotrope.attention.registry import FAMILIES
from allotrope.attention.rope import RopeSpec, rotate
from allotrope.layers.build import Build
from allotrope.layers.linear import Linear, RowLinear
from allotrope.layers.norm import RMSNorm
from allotrope.layers.parallel import Parallel, Placement, Section, parameter
from allotrope.layers.step import LayerStep


@dataclass(frozen=True, kw_only=True)
class MhaMixerSpec:
    """`qk_norm` "head": RMS over each head of q and k before rotation. `bias`: on q, k, v; `out_bias`: on the output.

    `norm_offset`: 1.0 where the norm's stored weight is around 0.
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
    qk_norm: Literal["head"] | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    shares_cache_of: int | None = None

    def attention(self, parallel: Parallel, dtype: torch.dtype, kv_dtype: torch.dtype) -> MhaSpec:
        return MhaSpec(
            num_heads=parallel.shard("num_attention_heads", self.num_heads),
            num_kv_heads=parallel.split("num_key_value_heads", self.num_kv_heads),
            head_dim=self.head_dim,
            scale=self.scale,
            kv_dtype=kv_dtype,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def build(self, build: Build) -> MhaMixer:
        return MhaMixer(self, build)


class MhaMixer(nn.Module):
    def __init__(self, spec: MhaMixerSpec, build: Build) -> None:
        super().__init__()
        self.rope = spec.rope
        self.spec = spec.attention(build.parallel, build.dtype, build.kv_dtype)
        family = FAMILIES[self.spec.family]
        self.backend = choose(family.name, family.backends, self.spec, build.device, build.backends.get(family.name))
        heads, groups, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        sections = (Section("q", heads * dim, dim), Section("k", groups * dim, dim), Section("v", groups * dim, dim))
        self.qkv = Linear(spec.hidden, sections, build, bias=spec.bias)
        self.out = RowLinear(Section("", heads * dim, dim), spec.hidden, build, bias=spec.out_bias)
        self.q_norm = self.k_norm = None
        if spec.qk_norm == "head":
            self.q_norm = RMSNorm(dim, spec.norm_eps, build, offset=spec.norm_offset)
            self.k_norm = RMSNorm(dim, spec.norm_eps, build, offset=spec.norm_offset)
        self.sinks = None
        if spec.sinks:
            placement = Placement((Section("", heads, 1),))
            self.sinks = parameter((self.spec.num_heads,), placement, torch.float32, build.device)

    def forward(self, x: torch.Tensor, here: LayerStep) -> torch.Tensor:
        """`x`: [T, hidden]. Returns the same shape."""
        spec = self.spec
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)
        groups = spec.num_kv_heads
        qk, v = heads[:, :-groups], heads[:, -groups:]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : spec.num_heads]), self.k_norm(qk[:, spec.num_heads :])), dim=1)
        if self.rope is not None:
            qk = rotate(qk, here.step.rotation(self.rope, x.dtype))
        q, k = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
        attended = self.backend.run(spec, here.plan, here.caches, q, k, v, self.sinks)
        return self.out(attended.flatten(1))
