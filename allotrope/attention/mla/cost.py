"""The roofline cost of latent attention, in its absorbed or its MHA form."""

from __future__ import annotations

import torch

from allotrope.attention.cache_layout import row_bytes
from allotrope.attention.cost import Lengths, StepCost, causal_pairs
from allotrope.attention.mla.spec import MlaSpec

MATMUL_SHARE = 0.57
"""Of the rate of a large matrix product, what prompts reach on an H200: 0.46 to 0.65
(`python bench/kernels.py --family mla --case prefill`)."""


def cost(spec: MlaSpec, lengths: Lengths) -> StepCost:
    """Each cache entry is read once; see `flops`."""
    new, kv = lengths.new, lengths.kv
    moved = int(kv.sum()) * row_bytes(spec.caches()["latent"])
    computed = int(flops(spec, causal_pairs(new, kv), new, kv).sum())
    return StepCost(moved + lengths.tokens * width(spec) * lengths.itemsize, computed)


def width(spec: MlaSpec) -> int:
    """Numbers of a token's queries and results."""
    return spec.num_heads * (spec.nope_dim + spec.rope_dim + spec.v_head_dim)


def flops(spec: MlaSpec, pairs: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
    """[B] floating-point operations of the cheaper form. The absorbed form projects each query and its result, and
    attends in the latent. The MHA form decompresses `keys` cache entries for all heads. `keys` None: absorbed."""
    up = 2 * spec.num_heads * spec.latent_dim * (spec.nope_dim + spec.v_head_dim)
    absorbed = 2 * spec.num_heads * pairs * (2 * spec.latent_dim + spec.rope_dim) + queries * up
    if keys is None:
        return absorbed
    return absorbed.minimum(2 * pairs * width(spec) + keys * up)
