"""The roofline cost of softmax attention."""

from __future__ import annotations

from allotrope.attention.cache_layout import row_bytes
from allotrope.attention.cost import Lengths, StepCost
from allotrope.attention.mha.spec import MhaSpec

MATMUL_SHARE = 0.64
"""Of the rate of a large matrix product, what prompts reach on an H200: 0.53 to 0.86
(`python bench/kernels.py --family mha --case "prefill 8192"`)."""


def cost(spec: MhaSpec, lengths: Lengths) -> StepCost:
    """The cost of one step. Each cache entry in the window is read once; every pair of a query and a visible key has a
    logit and a weighted value."""
    window = int(lengths.kv.max()) if spec.window is None else spec.window
    width = spec.num_heads * (spec.head_dim + spec.value_dim)
    moved = lengths.within(window) * row_bytes(spec.caches()["kv"])
    pairs = int(lengths.visible.clamp(max=window).sum())
    return StepCost(moved + lengths.tokens * width * lengths.itemsize, 2 * pairs * width)
