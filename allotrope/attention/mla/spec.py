"""The spec of one latent-attention layer: its sizes, types and options."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from allotrope.attention.cache_layout import CacheLayout, Field, PagedRows
from allotrope.attention.mla.rows import BLOCK, ROW_FORMATS, scaled_bytes


@dataclass(frozen=True, kw_only=True)
class MlaSpec:
    """Latent attention of one layer, as one rank sees it.

    `num_heads`: query heads H. `latent_dim`: size C of the cached latent, shared by all heads. `rope_dim`: size R of
    the cached key part that is rotated. `nope_dim`: size P of a head's query without its rotated part. `v_head_dim`:
    size V of a head's values. `scale`: of the logits. `kv_dtype`: type of the cache entries. `row_format`: "plain", or
    "scaled" for block-scaled FP8 entries with a scale for every 128 values (`rows.py`).
    """

    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    v_head_dim: int
    scale: float
    kv_dtype: torch.dtype
    row_format: str = "plain"

    def __post_init__(self) -> None:
        sizes = ("num_heads", "latent_dim", "rope_dim", "nope_dim", "v_head_dim")
        wrong = [f"{name}={getattr(self, name)}; allowed: at least 1" for name in sizes if getattr(self, name) < 1]
        if self.scale <= 0:
            wrong.append(f"scale={self.scale}; allowed: above 0")
        if self.row_format not in ROW_FORMATS:
            wrong.append(f"row_format={self.row_format!r}; allowed: {', '.join(ROW_FORMATS)}")
        elif self.row_format == "scaled":
            if self.latent_dim % BLOCK:
                wrong.append(f"latent_dim={self.latent_dim}; scaled rows need a multiple of {BLOCK}")
            if self.kv_dtype != torch.float8_e4m3fn:
                wrong.append(f"kv_dtype={self.kv_dtype}; scaled rows are torch.float8_e4m3fn")
        if wrong:
            raise ValueError("mla: " + "; ".join(wrong))

    @property
    def family(self) -> str:
        return "mla"

    @property
    def plan_key(self) -> Hashable:
        return ("mla", self.num_heads, self.latent_dim, self.rope_dim, self.nope_dim, self.v_head_dim)

    def caches(self) -> dict[str, CacheLayout]:
        if self.row_format == "scaled":
            return {"latent": PagedRows((Field("row", (scaled_bytes(self.latent_dim, self.rope_dim),), torch.uint8),))}
        fields = (Field("c", (self.latent_dim,), self.kv_dtype), Field("k_pe", (self.rope_dim,), self.kv_dtype))
        return {"latent": PagedRows(fields)}
