"""The spec of one softmax-attention layer: its sizes, types and options."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from allotrope.attention.cache_layout import CacheLayout, Field, PagedRows, WindowRows

MIN_HEAD_DIM, MAX_HEAD_DIM = 8, 512


@dataclass(frozen=True, kw_only=True)
class MhaSpec:
    """Softmax attention of one layer, as one rank sees it.

    `num_heads`, `num_kv_heads`: query heads H and key/value heads G, G divides H. `head_dim`: size D of queries and
    keys. `v_head_dim`: size of values, default D. `scale`: of the logits. `window`: keys a query sees, itself included;
    None is all of them. `softcap`: logits become `softcap * tanh(logits / softcap)`. `sinks`: one learned logit per
    query head joins the denominator. `values_are_keys`: one cached vector serves as key and value. `kv_dtype`: type of
    the cache entries.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    kv_dtype: torch.dtype
    v_head_dim: int | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    values_are_keys: bool = False

    def __post_init__(self) -> None:
        wrong = []
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            wrong.append(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        for name, dim in (("head_dim", self.head_dim), ("v_head_dim", self.value_dim)):
            if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
                wrong.append(f"{name}={dim}; allowed: {MIN_HEAD_DIM} to {MAX_HEAD_DIM}")
        if self.window is not None and self.window < 1:
            wrong.append(f"window={self.window}; allowed: at least 1, or None for no window")
        if self.softcap is not None and self.softcap <= 0:
            wrong.append(f"softcap={self.softcap}; allowed: above 0, or None for none")
        if self.values_are_keys and self.value_dim != self.head_dim:
            wrong.append(f"values_are_keys needs v_head_dim={self.value_dim} to equal head_dim={self.head_dim}")
        if wrong:
            raise ValueError("mha: " + "; ".join(wrong))

    @property
    def family(self) -> str:
        return "mha"

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def plan_key(self) -> Hashable:
        return ("mha", self.window)

    def caches(self) -> dict[str, CacheLayout]:
        fields = [Field("k", (self.num_kv_heads, self.head_dim), self.kv_dtype)]
        if not self.values_are_keys:
            fields.append(Field("v", (self.num_kv_heads, self.value_dim), self.kv_dtype))
        if self.window is None:
            return {"kv": PagedRows(tuple(fields))}
        return {"kv": WindowRows(tuple(fields), self.window)}
