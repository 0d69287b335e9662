"""Small layers of compressed sparse attention: each layer type, and its variations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from allotrope.attention.check import Case, Inputs
from allotrope.attention.csa.spec import CsaSpec, IndexerSpec
from allotrope.ops.rope import RopeScaling, RopeSpec

PAGE = 16
# Around blocks of 4 tokens, the window, and the length from which there are more entries than the top-k.
SHORT = (1, 3, 4, 5, 7, 8, PAGE, PAGE + 1, 34, 35, 36, 70)
# Around the first and the second block of 128 tokens.
LONG = (1, 127, 128, 129, 257)

MAIN = RopeSpec(dim=16, theta=10000.0, interleaved=True)
STRETCHED = RopeSpec(
    dim=16,
    theta=160000.0,
    interleaved=True,
    scaling=RopeScaling(kind="yarn", factor=16.0, original_length=128),
)
# Many heads: with few, most scores are exactly 0 after the ReLU, and equal scores leave the top-k open.
INDEXER = IndexerSpec(num_heads=32, head_dim=32, topk=8)

VARIANTS: dict[str, dict[str, Any]] = {
    "window_only": {"rope": MAIN},
    "chosen": {"ratio": 4, "overlap": True, "indexer": INDEXER},
    "chosen_without_overlap": {"ratio": 4, "indexer": INDEXER},
    "chosen_one": {"ratio": 2, "overlap": True, "indexer": IndexerSpec(num_heads=64, head_dim=16, topk=1)},
    "all_overlapping": {"ratio": 8, "overlap": True},
    "all_of_128": {"ratio": 128, "lengths": LONG},
    "wide": {"ratio": 4, "overlap": True, "indexer": INDEXER, "head_dim": 512, "lengths": (5, 40)},
    "narrow_window": {"ratio": 4, "overlap": True, "indexer": INDEXER, "window": 1},
}


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Every variant, with inputs and cache entries of `dtype`."""
    for name, variant in VARIANTS.items():
        numbers: dict[str, Any] = {"num_heads": 4, "head_dim": 64, "window": PAGE, "rope": STRETCHED} | variant
        lengths = numbers.pop("lengths", SHORT)
        spec = CsaSpec(scale=numbers["head_dim"] ** -0.5, kv_dtype=dtype, **numbers)
        yield Case(name, spec, lengths, draw, dtype, PAGE)


def draw(spec: CsaSpec, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Normal queries and entries; sinks as large as the logits, biases as large as the scores, norms around 1."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rows = {"q": normal(tokens, spec.num_heads, spec.head_dim).to(dtype), "kv": normal(tokens, spec.head_dim).to(dtype)}
    layer: dict[str, torch.Tensor | None] = {"sinks": normal(spec.num_heads)}

    def add_compressor(prefix: str, dim: int) -> None:
        rows[prefix + "kv_score"] = normal(tokens, 2 * spec.streams * dim)
        layer[prefix + "position_bias"] = normal(spec.ratio, spec.streams * dim)
        layer[prefix + "entry_norm"] = 1.0 + 0.25 * normal(dim)

    if spec.ratio:
        add_compressor("", spec.head_dim)
    if spec.indexer is not None:
        rows["index_q"] = normal(tokens, spec.indexer.num_heads, spec.indexer.head_dim).to(dtype)
        rows["index_weights"] = normal(tokens, spec.indexer.num_heads).to(dtype)
        add_compressor("index_", spec.indexer.head_dim)
    return Inputs(rows, layer)
