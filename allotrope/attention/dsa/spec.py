"""The numbers of one sparse latent-attention layer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from allotrope.attention.cache_layout import CacheLayout, Field, PagedRows
from allotrope.attention.mla.spec import MlaSpec


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """The scorer of a layer: `num_heads` query heads against one cached key of size `head_dim` per token.

    Every rank scores with all heads, so that all ranks pick the same rows.
    """

    num_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class DsaSpec:
    """Latent attention over picked rows, as one rank sees it.

    `mla`: the attention itself. `topk`: rows that a query attends to, its own included among the candidates.
    `indexer`: how this layer picks them; None for a layer that reuses the picks of the last layer that has one.
    """

    mla: MlaSpec
    topk: int
    indexer: IndexerSpec | None

    def __post_init__(self) -> None:
        wrong = [] if self.topk >= 1 else [f"topk={self.topk}; allowed: at least 1"]
        if self.indexer is not None and min(self.indexer.num_heads, self.indexer.head_dim) < 1:
            wrong.append(f"indexer={self.indexer}; num_heads and head_dim must be at least 1")
        if wrong:
            raise ValueError("dsa: " + "; ".join(wrong))

    @property
    def family(self) -> str:
        return "dsa"

    @property
    def plan_key(self) -> Hashable:
        return ("dsa", self.topk, self.indexer is None, self.mla.plan_key)

    def boundaries(self) -> tuple[int, ...]:
        return (self.topk,)

    def caches(self) -> dict[str, CacheLayout]:
        if self.indexer is None:
            return self.mla.caches()
        key = Field("k", (self.indexer.head_dim,), self.mla.kv_dtype)
        return {**self.mla.caches(), "index": PagedRows((key,))}
