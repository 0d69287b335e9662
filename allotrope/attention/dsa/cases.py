"""Small layers of sparse latent attention: with an indexer, and with the top-k indices of an earlier layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from allotrope.attention.check import Case, Inputs
from allotrope.attention.dsa.spec import DsaSpec, IndexerSpec
from allotrope.attention.mla import cases as mla

PAGE = 16
# Around the top-k (8 tokens), around a page, and long enough for several.
LENGTHS = (1, 7, 8, 9, PAGE, PAGE + 1, 70)
# Many heads: with few, most scores are exactly 0 after the ReLU, and equal scores leave the top-k open.
INDEXER = IndexerSpec(num_heads=32, head_dim=32)

VARIANTS: dict[str, dict[str, Any]] = {
    "picking": {"indexer": INDEXER},
    "picking_released": {"sizes": "released", "indexer": IndexerSpec(num_heads=64, head_dim=128)},
    "picking_one": {"indexer": INDEXER, "topk": 1},
    "picking_a_page": {"indexer": INDEXER, "topk": PAGE},
    "picking_all": {"indexer": INDEXER, "topk": 1000},
    "reusing": {"indexer": None},
    "reusing_wide_values": {"sizes": "wide_values", "indexer": None},
}


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Every variant, with inputs and cache entries of `dtype`."""
    for name, variant in VARIANTS.items():
        numbers: dict[str, Any] = {"topk": 8, "sizes": "small"} | variant
        sizes = mla.mla_spec(numbers.pop("sizes"), dtype)
        yield Case(name, DsaSpec(mla=sizes, **numbers), LENGTHS, draw, dtype, PAGE)


def draw(spec: DsaSpec, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """As latent attention; normal index keys, or random top-k indices among the tokens that each query sees."""
    inputs = mla.draw(spec.mla, tokens, generator, dtype)
    rows = dict(inputs.tokens)
    if spec.indexer is not None:
        heads, dim = spec.indexer.num_heads, spec.indexer.head_dim
        rows["index_q"] = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
        rows["index_k"] = torch.randn(tokens, dim, generator=generator).to(dtype)
        rows["index_weights"] = torch.randn(tokens, heads, generator=generator).to(dtype)
    else:
        if tokens != sum(LENGTHS):
            raise ValueError(f"{tokens} tokens; top-k indices are drawn for the lengths {LENGTHS}")
        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        rows["topk_indices"] = _random_topk(positions, spec.topk, generator)
    return Inputs(rows, inputs.layer)


def _random_topk(positions: torch.Tensor, topk: int, generator: torch.Generator) -> torch.Tensor:
    """[N, topk]: of each query's positions up to its own, `topk` at random, -1 where it sees fewer."""
    topk_indices = torch.full((len(positions), topk), -1)
    for row, position in zip(topk_indices, positions.tolist(), strict=True):
        selected = torch.randperm(position + 1, generator=generator)[:topk]
        row[: len(selected)] = selected.sort().values
    return topk_indices
