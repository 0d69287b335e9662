"""Projections, norms and rotation around sparse latent attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from allotrope.attention.dsa import DsaInputs, DsaSpec, IndexInputs
from allotrope.attention.dsa import IndexerSpec as IndexerSpec
from allotrope.attention.registry import FAMILIES
from allotrope.layers.build import Build
from allotrope.layers.linear import RowLinear
from allotrope.layers.mixers.mixer import Mixer, attention_of, choose_gather, shared_by
from allotrope.layers.mixers.mla import LatentProjection, MlaMixerSpec, Projected
from allotrope.layers.parallel import Parallel, Placement, Section
from allotrope.layers.step import LayerStep
from allotrope.ops.mla_rope import MLA_ROPE, LayerNorm, MlaRopeSpec
from allotrope.ops.rope import ROPE_COS_SIN, RopeSpec


@dataclass(frozen=True, kw_only=True)
class DsaMixerSpec:
    """`mla`: the attention itself, whose queries come from a latent. `topk`: tokens a query attends to. `indexer`:
    selects them; None reuses the top-k indices of the last layer with an indexer. `index_rope`: rotation of the first
    dims of index queries and keys. `index_norm_eps`: of the norm of index keys.
    """

    mla: MlaMixerSpec
    topk: int
    indexer: IndexerSpec | None
    index_rope: RopeSpec | None
    index_norm_eps: float = 1e-6
    shares_cache_of: int | None = None

    @property
    def reads_topk_indices(self) -> bool:
        """Whether it needs those of an earlier layer."""
        return self.indexer is None

    def __post_init__(self) -> None:
        if self.mla.q_rank is None:
            raise ValueError("q_lora_rank is absent; an indexer needs the latent that queries are made from")

    def attention(self, parallel: Parallel, dtype: torch.dtype, kv_dtype: torch.dtype) -> DsaSpec:
        indexer = self.indexer
        if indexer is not None and kv_dtype == torch.float8_e4m3fn:
            # In an FP8 cache each index key has a scale: without it, rounding would change the top-k.
            indexer = dataclasses.replace(indexer, key_format="scaled")
        return DsaSpec(
            mla=self.mla.attention(parallel, dtype, kv_dtype), topk=self.topk, indexer=shared_by(parallel, indexer)
        )

    def build(self, build: Build) -> DsaMixer:
        return DsaMixer(self, build)


class DsaMixer(Mixer):
    def __init__(self, spec: DsaMixerSpec, build: Build) -> None:
        super().__init__()
        self.spec = attention_of(spec, build)
        self.backend = build.chooser.choose(FAMILIES[self.spec.family], self.spec)
        choose_gather(self.spec.indexer, spec.mla.hidden, build)
        # Scales of FP8 entries by the argument's name; empty for other types.
        self.kv_scales: dict[str, float] = {}
        from_x: tuple[Section, ...] = ()
        from_q: tuple[Section, ...] = ()
        if spec.indexer is not None:
            heads, dim = spec.indexer.num_heads, spec.indexer.head_dim
            from_x = (Section("index_k", dim), Section("index_weights", heads))
            from_q = (Section("index_q", heads * dim),)
        self.latent = LatentProjection(spec.mla, build.at("latent"), from_x, from_q)
        self.quantized_from = self.latent.inputs.quantized_from
        self.indexer = Indexer(spec, spec.indexer, build) if spec.indexer is not None else None
        width = spec.mla.num_heads * spec.mla.v_head_dim
        self.out = RowLinear(Section("", width, spec.mla.v_head_dim), spec.mla.hidden, build.at("out"))

    def forward(self, x: torch.Tensor, ctx: LayerStep) -> torch.Tensor:
        """`x`: [T, hidden]. Returns the same shape, this rank's part of the sum over the ranks."""
        projected = self.latent(x, ctx, self.kv_scales)
        index = None if self.indexer is None or ctx.step.reuses_topk else self.indexer(projected, ctx)
        return self.out(ctx.attend(self._attend, DsaInputs(projected.inputs, index)).flatten(1))

    def _attend(self, ctx: LayerStep, inputs: DsaInputs) -> torch.Tensor:
        """Top-k indices pass from layer to layer of the step that attends."""
        step = ctx.step
        if inputs.index is None:
            inputs = dataclasses.replace(inputs, topk_indices=step.topk_indices)
        attended, step.topk_indices = self.backend.run(self.spec, ctx.plan, ctx.caches, inputs)
        return attended

    def store(self, x: torch.Tensor, ctx: LayerStep) -> None:
        """The part of `forward` that stores latents and index keys; the backend has a `store`."""
        assert self.backend.store is not None
        projected = self.latent(x, ctx, self.kv_scales, stored=True)
        index = None if self.indexer is None else self.indexer(projected, ctx)
        self.backend.store(self.spec, ctx.plan, ctx.caches, DsaInputs(projected.inputs, index))


class Indexer(nn.Module):
    """Index queries, keys and weights from the layer's two projections. Equal on every rank."""

    def __init__(self, spec: DsaMixerSpec, indexer: IndexerSpec, build: Build) -> None:
        super().__init__()
        self.rope, self.eps = spec.index_rope, spec.index_norm_eps
        if spec.index_rope is not None:
            build.chooser.choose(ROPE_COS_SIN, spec.index_rope)
        self._rope = build.chooser.choose(MLA_ROPE, MlaRopeSpec(spec.index_rope, build.dtype)).run
        self.heads, self.dim, self.parallel = indexer.num_heads, indexer.head_dim, build.parallel
        placement = Placement((Section("", indexer.head_dim),))
        self.k_norm_weight = build.parameter((indexer.head_dim,), placement, torch.float32)
        self.k_norm_bias = build.parameter((indexer.head_dim,), placement, torch.float32)

    def forward(self, projected: Projected, ctx: LayerStep) -> IndexInputs:
        """Returns the indexer's inputs."""
        k, weights = projected.from_x
        q = projected.from_q[0].unflatten(-1, (projected.from_q[0].shape[1] // self.dim, self.dim))
        rotation = None if self.rope is None else ctx.step.rotation(self.rope, k.dtype)
        norm = LayerNorm(self.k_norm_weight, self.k_norm_bias, self.eps)
        # The weights are fp32: terms of both signs cancel, and small differences decide the top-k.
        head_weights = weights.float() * self.heads**-0.5
        return IndexInputs(q, k, head_weights, norm, rotation, self._rope, self.parallel.all_gather)
