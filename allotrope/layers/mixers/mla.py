"""Projections, norms and rotation around latent attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from allotrope.attention.mla import MlaInputs, MlaSpec
from allotrope.attention.registry import FAMILIES
from allotrope.layers.build import Build
from allotrope.layers.linear import Linear, RowLinear
from allotrope.layers.mixers.mixer import Mixer, attention_of, head_norm
from allotrope.layers.norm import RMSNorm
from allotrope.layers.parallel import Parallel, Placement, Section
from allotrope.layers.step import LayerStep
from allotrope.ops.mla_rope import MLA_ROPE, MlaRopeSpec
from allotrope.ops.rope import ROPE_COS_SIN, RopeSpec


@dataclass(frozen=True, kw_only=True)
class MlaMixerSpec:
    """`q_rank`: size of the normed latent that queries are projected from; None projects them from x. `rope` None: no
    dims are rotated. `scale`: of the logits, with all corrections. The rest as in `MlaSpec`.
    """

    hidden: int
    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    v_head_dim: int
    scale: float
    rope: RopeSpec | None
    q_rank: int | None = None
    norm_eps: float = 1e-6
    shares_cache_of: int | None = None

    def attention(self, parallel: Parallel, dtype: torch.dtype, kv_dtype: torch.dtype) -> MlaSpec:
        return MlaSpec(
            num_heads=parallel.shard("num_attention_heads", self.num_heads),
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            nope_dim=self.nope_dim,
            v_head_dim=self.v_head_dim,
            scale=self.scale,
            kv_dtype=kv_dtype,
        )

    def build(self, build: Build) -> MlaMixer:
        return MlaMixer(self, build)


class Projected(NamedTuple):
    """The family's inputs, and the further sections of the two projections."""

    inputs: MlaInputs
    from_x: Sequence[torch.Tensor]
    from_q: Sequence[torch.Tensor]


class LatentProjection(nn.Module):
    """The projections from x to queries and to the cached latent.

    `inputs` computes everything that is linear in x: the query latent "q_a" (or, without `q_rank`, the queries "q"),
    the latent "kv_a", and the sections of `from_x`. `queries` computes "q" and the sections of `from_q` from the query
    latent. `w_uk`, `w_uv`: the projections of a latent to keys and values, per head.
    """

    def __init__(
        self,
        spec: MlaMixerSpec,
        build: Build,
        from_x: tuple[Section, ...] = (),
        from_q: tuple[Section, ...] = (),
    ) -> None:
        super().__init__()
        self.rope = spec.rope
        if spec.rope is not None:
            build.chooser.choose(ROPE_COS_SIN, spec.rope)
        self._rope = build.chooser.choose(MLA_ROPE, MlaRopeSpec(spec.rope, build.dtype)).run
        self.nope_dim, self.rope_dim = spec.nope_dim, spec.rope_dim
        head_dim = spec.nope_dim + spec.rope_dim
        q, row = Section("q", spec.num_heads * head_dim, head_dim), Section("kv_a", spec.latent_dim + spec.rope_dim)
        first = q if spec.q_rank is None else Section("q_a", spec.q_rank)
        self.inputs = Linear(spec.hidden, (first, row, *from_x), build.at("inputs"))
        self.queries = self.q_a_norm = None
        if spec.q_rank is not None:
            self.queries = Linear(spec.q_rank, (q, *from_q), build.at("queries"))
            self.q_a_norm = RMSNorm(spec.q_rank, spec.norm_eps, build, quantized_from=self.queries.quantized_from)
        self.kv_a_norm = RMSNorm(spec.latent_dim, spec.norm_eps, build)
        placement = Placement((Section("", spec.num_heads, 1),))
        heads = placement.local(build.parallel)
        shapes = {"w_uk": (heads, spec.nope_dim, spec.latent_dim), "w_uv": (heads, spec.v_head_dim, spec.latent_dim)}
        for name, shape in shapes.items():
            self.register_parameter(name, build.parameter(shape, placement))

    def forward(
        self, x: torch.Tensor, ctx: LayerStep, scales: Mapping[str, float], *, stored: bool = False
    ) -> Projected:
        """`x`: [T, hidden]. `scales`: of plain FP8 entries, by the names of the family's inputs. `stored`: for entries
        of the caches alone, with queries of no heads."""
        first, row, *from_x = self.inputs(x).split(self.inputs.sizes, dim=-1)
        from_q: Sequence[torch.Tensor] = ()
        if stored:
            first = x.new_empty(len(x), 0)
            from_q = [first for _ in self.queries.sizes[1:]] if self.queries is not None else ()
        elif self.queries is not None and self.q_a_norm is not None:
            first, *from_q = self.queries(self.q_a_norm(first)).split(self.queries.sizes, dim=-1)
        head_dim = self.nope_dim + self.rope_dim
        q = first.unflatten(-1, (first.shape[1] // head_dim, head_dim))
        w_uk, w_uv = self.get_parameter("w_uk"), self.get_parameter("w_uv")
        rotation = None if self.rope is None else ctx.step.rotation(self.rope, x.dtype)
        inputs = MlaInputs(q, row, w_uk, w_uv, head_norm(self.kv_a_norm), rotation, self._rope, **scales)
        return Projected(inputs, from_x, from_q)


class MlaMixer(Mixer):
    def __init__(self, spec: MlaMixerSpec, build: Build) -> None:
        super().__init__()
        self.spec = attention_of(spec, build)
        self.backend = build.chooser.choose(FAMILIES[self.spec.family], self.spec)
        # Scales of FP8 entries by the argument's name; empty for other types.
        self.kv_scales: dict[str, float] = {}
        self.latent = LatentProjection(spec, build.at("latent"))
        self.quantized_from = self.latent.inputs.quantized_from
        out = Section("", spec.num_heads * spec.v_head_dim, spec.v_head_dim)
        self.out = RowLinear(out, spec.hidden, build.at("out"))

    def forward(self, x: torch.Tensor, ctx: LayerStep) -> torch.Tensor:
        """`x`: [T, hidden]. Returns the same shape, this rank's part of the sum over the ranks."""
        inputs = self.latent(x, ctx, self.kv_scales).inputs
        return self.out(ctx.attend(self._attend, inputs).flatten(1))

    def store(self, x: torch.Tensor, ctx: LayerStep) -> None:
        """The part of `forward` that stores latents; the backend has a `store`."""
        assert self.backend.store is not None
        inputs = self.latent(x, ctx, self.kv_scales, stored=True).inputs
        self.backend.store(self.spec, ctx.plan, ctx.caches, inputs)
