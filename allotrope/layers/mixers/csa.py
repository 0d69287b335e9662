"""Projections and norms around compressed sparse attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from allotrope.attention.csa import Compression, CsaInputs, CsaSpec, IndexInputs
from allotrope.attention.csa import IndexerSpec as IndexerSpec
from allotrope.attention.registry import FAMILIES
from allotrope.layers.build import Build
from allotrope.layers.linear import Linear, RowLinear
from allotrope.layers.mixers.mixer import Mixer, attention_of, choose_gather, head_norm, shared_by
from allotrope.layers.norm import RMSNorm
from allotrope.layers.parallel import Parallel, Placement, Section
from allotrope.layers.step import LayerStep
from allotrope.ops.rope import RopeSpec


@dataclass(frozen=True, kw_only=True)
class CsaMixerSpec:
    """`q_rank`: size of the latent that queries and index queries are projected from. `out_groups`, `out_rank`: each
    group of heads is projected to `out_rank` numbers, and all of these to the output. The rest as in `CsaSpec`.
    """

    hidden: int
    num_heads: int
    head_dim: int
    q_rank: int
    out_groups: int
    out_rank: int
    window: int
    rope: RopeSpec
    ratio: int = 0
    overlap: bool = False
    indexer: IndexerSpec | None = None
    norm_eps: float = 1e-6
    shares_cache_of: int | None = None

    def attention(self, parallel: Parallel, dtype: torch.dtype, kv_dtype: torch.dtype) -> CsaSpec:
        parallel.shard("o_groups", self.out_groups)
        return CsaSpec(
            num_heads=parallel.shard("num_attention_heads", self.num_heads),
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.window,
            rope=self.rope,
            kv_dtype=kv_dtype,
            ratio=self.ratio,
            overlap=self.overlap,
            indexer=shared_by(parallel, self.indexer),
            norm_eps=self.norm_eps,
        )

    def build(self, build: Build) -> CsaMixer:
        return CsaMixer(self, build)


class CsaMixer(Mixer):
    def __init__(self, spec: CsaMixerSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.parallel = attention_of(spec, build), build.parallel
        self.backend = build.chooser.choose(FAMILIES[self.spec.family], self.spec)
        choose_gather(self.spec.indexer, spec.hidden, build)
        # Scales of FP8 entries by the argument's name; empty for other types.
        self.kv_scales: dict[str, float] = {}
        dim, indexer = spec.head_dim, spec.indexer
        inputs = [Section("q_a", spec.q_rank), Section("kv", dim)]
        queries = [Section("q", spec.num_heads * dim, dim)]
        if indexer is not None:
            inputs.append(Section("index_weights", indexer.num_heads))
            queries.append(Section("index_q", indexer.num_heads * indexer.head_dim))
        self.inputs = Linear(spec.hidden, tuple(inputs), build.at("inputs"))
        self.queries = Linear(spec.q_rank, tuple(queries), build.at("queries"))
        self.q_a_norm = RMSNorm(spec.q_rank, spec.norm_eps, build)
        self.q_norm = RMSNorm(dim, spec.norm_eps, build, weighted=False)
        self.kv_norm = RMSNorm(dim, spec.norm_eps, build)
        self.compressor = Compressor(self.spec, spec.hidden, build) if spec.ratio else None
        sinks = Placement((Section("", spec.num_heads, 1),))
        self.sinks = build.parameter((self.spec.num_heads,), sinks, torch.float32)
        self.grouped = GroupedLinear(spec.out_groups, spec.num_heads * dim // spec.out_groups, spec.out_rank, build)
        rank = spec.out_rank
        self.out = RowLinear(Section("", spec.out_groups * rank, rank), spec.hidden, build.at("out"))

    def forward(self, x: torch.Tensor, ctx: LayerStep) -> torch.Tensor:
        """`x`: [T, hidden]. Returns the same shape, this rank's part of the sum over the ranks."""
        projected = self.inputs(x).split(self.inputs.sizes, dim=-1)
        queries = self.queries(self.q_a_norm(projected[0])).split(self.queries.sizes, dim=-1)
        compressor = keys = index = None
        if self.compressor is not None:
            compressor, keys = self.compressor(x)
        if self.spec.indexer is not None:
            assert keys is not None
            index_q = queries[1].unflatten(-1, (-1, self.spec.indexer.head_dim))
            index = IndexInputs(index_q, projected[2], keys, self.parallel.all_gather)
        inputs = CsaInputs(
            queries[0].unflatten(-1, (-1, self.spec.head_dim)),
            projected[1],
            self.sinks,
            head_norm(self.q_norm),
            head_norm(self.kv_norm),
            compressor,
            index,
            **self.kv_scales,
        )
        return self.out(self.grouped(ctx.attend(self._attend, inputs).flatten(1)))


class Compressor(nn.Module):
    """The projections and parameters of the layer's compressor, and of its indexer's compressor: all fp32.

    One product computes the projections of both.
    """

    def __init__(self, spec: CsaSpec, hidden: int, build: Build) -> None:
        super().__init__()
        exact = build.exact()
        self.dims = {"": spec.head_dim}
        if spec.indexer is not None:
            self.dims["index_"] = spec.indexer.head_dim
        sections, widths = [], {}
        for prefix, dim in self.dims.items():
            widths[prefix] = spec.streams * dim
            sections += [Section(prefix + name, widths[prefix]) for name in ("kv", "score")]
            bias = build.parameter((spec.ratio, widths[prefix]), _whole(spec.ratio), torch.float32)
            self.register_parameter(prefix + "position_bias", bias)
            self.register_parameter(prefix + "norm", build.parameter((dim,), _whole(dim), torch.float32))
        self.widths = [2 * width for width in widths.values()]
        self.projection = Linear(hidden, tuple(sections), exact)

    def forward(self, x: torch.Tensor) -> tuple[Compression, Compression | None]:
        """`x`: [T, hidden]. Returns the inputs of the compressor and, with an indexer, of its compressor."""
        compressions = [
            Compression(state, self.get_parameter(prefix + "position_bias"), self.get_parameter(prefix + "norm"))
            for prefix, state in zip(self.dims, self.projection(x.float()).split(self.widths, dim=-1), strict=True)
        ]
        return compressions[0], compressions[1] if len(compressions) > 1 else None


def _whole(size: int) -> Placement:
    return Placement((Section("", size),))


class GroupedLinear(nn.Module):
    """y_g = W_g x_g for each group g of inputs; ranks share the groups."""

    def __init__(self, groups: int, inputs: int, outputs: int, build: Build) -> None:
        super().__init__()
        self.groups = build.parallel.shard("o_groups", groups)
        placement = Placement((Section("", groups * outputs, outputs),))
        self.weight = build.parameter((self.groups * outputs, inputs), placement)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [T, groups * inputs] of this rank. Returns [T, groups * outputs]."""
        if x.shape[0] == 1:
            # One token: a product for each group reads each weight once, in place.
            weights = self.weight.unflatten(0, (self.groups, -1))
            return torch.bmm(weights, x.view(self.groups, -1, 1)).view(1, -1)
        rows = x.unflatten(-1, (self.groups, -1)).transpose(0, 1)
        weights = self.weight.unflatten(0, (self.groups, -1)).transpose(1, 2)
        return torch.bmm(rows, weights).transpose(0, 1).flatten(1)
