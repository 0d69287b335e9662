"""The spec of one sparse latent-attention layer: its sizes, types and options."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from allotrope.attention.cache_layout import CacheLayout, Field, PagedRows
from allotrope.attention.mla.spec import MlaSpec

KEY_FORMATS = ("plain", "scaled")


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """The indexer of a layer: `num_heads` query heads against one cached key of size `head_dim` per token.

    Every rank scores with all heads, so that all ranks select the same tokens. `key_format`: "plain" keys of the
    cache's type, or "scaled" keys: FP8 values and one fp32 scale a key, scored against FP8 queries. `rank`, `ranks`:
    this one among those that share the queries of prompts, as `sharing.py` says.
    """

    num_heads: int
    head_dim: int
    key_format: str = "plain"
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class DsaSpec:
    """Latent attention over selected tokens, as one rank sees it.

    `mla`: the attention itself. `topk`: tokens that a query attends to; its own may be one. `indexer`: selects them;
    None for a layer that reuses the top-k indices of the last layer with an indexer.
    """

    mla: MlaSpec
    topk: int
    indexer: IndexerSpec | None

    def __post_init__(self) -> None:
        wrong = [] if self.topk >= 1 else [f"topk={self.topk}; allowed: at least 1"]
        if self.indexer is not None and min(self.indexer.num_heads, self.indexer.head_dim) < 1:
            wrong.append(f"indexer={self.indexer}; num_heads and head_dim must be at least 1")
        if self.indexer is not None and self.indexer.key_format not in KEY_FORMATS:
            wrong.append(f"key_format={self.indexer.key_format!r}; allowed: {', '.join(KEY_FORMATS)}")
        if wrong:
            raise ValueError("dsa: " + "; ".join(wrong))

    @property
    def family(self) -> str:
        return "dsa"

    @property
    def plan_key(self) -> Hashable:
        return ("dsa", self.topk, self.indexer, self.mla.plan_key)

    def boundaries(self) -> tuple[int, ...]:
        return (self.topk,)

    def caches(self) -> dict[str, CacheLayout]:
        if self.indexer is None:
            return self.mla.caches()
        dim = self.indexer.head_dim
        fields: tuple[Field, ...] = (Field("k", (dim,), self.mla.kv_dtype),)
        if self.indexer.key_format == "scaled":
            fields = (Field("k", (dim,), torch.float8_e4m3fn), Field("factor", (1,), torch.float32))
        return {**self.mla.caches(), "index": PagedRows(fields)}
