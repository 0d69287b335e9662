"""Small layers of softmax attention that together use every field of `MhaSpec`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from allotrope.attention.check import Case, Inputs
from allotrope.attention.mha.spec import MhaSpec

PAGE = 16
# Around one page, and long enough for several; the last one is cut into blocks of queries.
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, 70)

VARIANTS: dict[str, dict[str, Any]] = {
    "multi_head": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64},
    "grouped_4": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128},
    "grouped_8": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 256},
    "wide": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 512},
    "narrow_values": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 96, "v_head_dim": 64},
    "shared_rows": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64, "values_are_keys": True},
    "softcap": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "softcap": 5.0},
    "sinks": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "sinks": True},
    "window_1": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "window": 1},
    "window_below_page": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "window": PAGE - 1},
    "window_is_page": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "window": PAGE},
    "window_above_page": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "window": PAGE + 1},
    "window_above_all": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "window": 1000},
    "window_and_sinks": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "window": 33, "sinks": True},
}


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Every variant, with inputs and cache entries of `dtype`."""
    for name, numbers in VARIANTS.items():
        spec = MhaSpec(scale=numbers["head_dim"] ** -0.5, kv_dtype=dtype, **numbers)
        yield Case(name, spec, LENGTHS, draw, dtype, PAGE)


def draw(spec: MhaSpec, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Normal queries, keys and values; sinks as large as the logits."""
    q = torch.randn(tokens, spec.num_heads, spec.head_dim, generator=generator)
    k = torch.randn(tokens, spec.num_kv_heads, spec.head_dim, generator=generator)
    v = torch.randn(tokens, spec.num_kv_heads, spec.value_dim, generator=generator)
    sinks = torch.randn(spec.num_heads, generator=generator).to(dtype) if spec.sinks else None
    return Inputs({"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}, {"sinks": sinks})
