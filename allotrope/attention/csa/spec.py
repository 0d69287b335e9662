"""The spec of one layer of compressed sparse attention: its sizes, types and options."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from allotrope.attention.cache_layout import CacheLayout, Field, PagedRows, WindowRows
from allotrope.attention.csa.rows import BLOCK, FP8, ROW_FORMATS, row_fields
from allotrope.ops.rope import RopeSpec

MAX_HEAD_DIM = 512


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """The indexer: `num_heads` scoring heads of size `head_dim` select the `topk` entries of the highest score. `rank`,
    `ranks`: this one among those that share the queries of prompts (`dsa/sharing.py`)."""

    num_heads: int
    head_dim: int
    topk: int
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class CsaSpec:
    """Compressed sparse attention of one layer, as one rank sees it.

    `num_heads`: query heads H; all read one entry of size `head_dim` D, which is key and value. `scale`: of the logits.
    `window`: latest tokens a query sees, itself included. `rope`: rotation of the last R dims of an entry (and of an
    index key). `ratio`: tokens per compressed entry; 0 is none. `overlap`: an entry also pools the `ratio` tokens
    before its block. `indexer`: selects entries; None attends to all of them. `norm_eps`: of the norm of an entry.
    `kv_dtype`: type of the cache entries. `row_format`: "plain", or "scaled" for block-scaled FP8 entries with a scale
    for every 64 values (`rows.py`). Index keys of FP8 caches are bf16: coarser keys would select other entries.
    """

    num_heads: int
    head_dim: int
    scale: float
    window: int
    rope: RopeSpec
    kv_dtype: torch.dtype
    ratio: int = 0
    overlap: bool = False
    indexer: IndexerSpec | None = None
    norm_eps: float = 1e-6
    row_format: str = "plain"

    def __post_init__(self) -> None:
        wrong = []
        if self.num_heads < 1:
            wrong.append(f"num_heads={self.num_heads}; allowed: at least 1")
        if self.window < 1:
            wrong.append(f"window={self.window}; allowed: at least 1")
        if self.ratio != 0 and self.ratio < 2:
            wrong.append(f"ratio={self.ratio}; allowed: 0 for no compressed entries, or at least 2")
        if self.ratio == 0 and (self.overlap or self.indexer is not None):
            wrong.append(f"ratio=0 has no entries to overlap or choose: overlap={self.overlap}, indexer={self.indexer}")
        dims = {"head_dim": self.head_dim}
        if self.indexer is not None:
            dims["indexer.head_dim"] = self.indexer.head_dim
            if self.indexer.num_heads < 1 or self.indexer.topk < 1:
                wrong.append(f"indexer={self.indexer}; num_heads and topk must be at least 1")
        for name, dim in dims.items():
            if not self.rope.dim <= dim <= MAX_HEAD_DIM:
                wrong.append(f"{name}={dim}; allowed: from the {self.rope.dim} that are rotated to {MAX_HEAD_DIM}")
        if self.row_format not in ROW_FORMATS:
            wrong.append(f"row_format={self.row_format!r}; allowed: {', '.join(ROW_FORMATS)}")
        elif self.row_format == "scaled":
            if (self.head_dim - self.rope.dim) % BLOCK:
                wrong.append(f"head_dim={self.head_dim} without the {self.rope.dim} that are rotated; scaled rows need "
                             f"a multiple of {BLOCK}")  # fmt: skip
            if self.kv_dtype != FP8:
                wrong.append(f"kv_dtype={self.kv_dtype}; scaled rows are {FP8}")
        if wrong:
            raise ValueError("csa: " + "; ".join(wrong))

    @property
    def family(self) -> str:
        return "csa"

    @property
    def streams(self) -> int:
        """Projections of a token for a compressor: one for each entry that pools it."""
        return 2 if self.overlap else 1

    @property
    def plan_key(self) -> Hashable:
        return self

    def visible_entries(self, seen: int) -> int:
        """Number of compressed entries for a query that sees `seen` tokens: an entry exists once its block closes."""
        return seen // self.ratio if self.ratio else 0

    def boundaries(self) -> tuple[int, ...]:
        return () if self.indexer is None else (self.ratio * self.indexer.topk,)

    def caches(self) -> dict[str, CacheLayout]:
        row = row_fields(self.row_format, self.head_dim, self.rope.dim, self.kv_dtype)
        caches: dict[str, CacheLayout] = {"window": WindowRows(row, self.window)}
        if self.ratio:
            caches["compressed"] = PagedRows(row, self.ratio)
            caches["state"] = self._state(self.head_dim)
        if self.indexer is not None:
            dtype = torch.bfloat16 if self.kv_dtype == FP8 else self.kv_dtype
            caches["index"] = PagedRows((Field("k", (self.indexer.head_dim,), dtype),), self.ratio)
            caches["index_state"] = self._state(self.indexer.head_dim)
        return caches

    def _state(self, dim: int) -> WindowRows:
        """The compressor's state of each token, kept until the last block that pools it closes."""
        row = Field("kv_score", (2 * self.streams * dim,), torch.float32)
        return WindowRows((row,), self.streams * self.ratio)
