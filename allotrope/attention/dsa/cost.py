"""The roofline cost of sparse latent attention."""

from __future__ import annotations

import torch

from allotrope.attention.cache_layout import row_bytes
from allotrope.attention.cost import Lengths, StepCost, causal_pairs
from allotrope.attention.dsa.spec import DsaSpec
from allotrope.attention.mla.cost import flops, width

MATMUL_SHARE = 0.61
"""Of the rate of a large matrix product, what prompts reach on an H200: of sparse attention; index scores reach 0.73
(`python bench/kernels.py --family dsa --case picked`)."""


def gathered(spec: DsaSpec, lengths: Lengths) -> int:
    """Bytes of the top-k indices of the queries of prompts that the ranks share."""
    if spec.indexer is None or spec.indexer.ranks == 1:
        return 0
    return int(_sparse(spec, lengths)[lengths.new > 1].sum()) * spec.topk * torch.int32.itemsize


def _sparse(spec: DsaSpec, lengths: Lengths) -> torch.Tensor:
    """[B] new tokens that see more than `topk` tokens."""
    return lengths.new - (spec.topk - (lengths.kv - lengths.new)).clamp(min=0).minimum(lengths.new)


def cost(spec: DsaSpec, lengths: Lengths) -> StepCost:
    """The cost of one step. Queries that see at most `topk` entries cost as in latent attention. The others score all
    index keys, those of prompts on one of the ranks that share them, and read their top-k entries in the absorbed
    form."""
    new, kv, mla = lengths.new, lengths.kv, spec.mla
    sparse = _sparse(spec, lengths)
    dense = new - sparse
    computed = flops(mla, causal_pairs(dense, kv - sparse), dense, torch.where(dense > 0, kv - sparse, 0))
    computed = computed + flops(mla, sparse * spec.topk, sparse, None)
    moved = int(kv.minimum(spec.topk * new).sum()) * row_bytes(mla.caches()["latent"])
    attended = StepCost(moved + lengths.tokens * width(mla) * lengths.itemsize, int(computed.sum()))
    if spec.indexer is None:
        return attended
    index_width = spec.indexer.num_heads * spec.indexer.head_dim
    pairs, prompts = causal_pairs(sparse, kv), new > 1
    scored = 2 * index_width * (int(pairs[~prompts].sum()) + int(pairs[prompts].sum()) // spec.indexer.ranks)
    keys = int(kv[sparse > 0].sum()) * row_bytes(spec.caches()["index"])
    fp8 = scored if spec.indexer.key_format == "scaled" else 0
    return attended + StepCost(keys + int(sparse.sum()) * index_width * lengths.itemsize, scored, fp8)
