"""The spec of one gated-delta-rule layer: its sizes, types and options."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from allotrope.attention.cache_layout import CacheLayout, Field, StateSlots
from allotrope.attention.gdn.chunked import CHUNK

KERNEL_CHUNK = 64
"""Tokens of a chunk in the kernels of a GPU; `CHUNK` is a CPU's."""


@dataclass(frozen=True, kw_only=True)
class GdnSpec:
    """Gated delta rule of one layer, as one rank sees it.

    `num_k_heads`, `num_v_heads`: key (and query) heads and value heads; value head j reads key head
    j // (num_v_heads / num_k_heads). `k_head_dim`, `v_head_dim`: their sizes. `conv_width`: inputs that the short
    convolution sees, the newest included. `conv_dtype`: type of its cached inputs, that of the activations.
    `channel_decay`: every key channel of a value head decays at its own rate; else a head has one rate.
    `state_dtype`: type of the cached recurrent state. `max_drafts`: drafts of a sequence in one step whose inputs are
    kept beside its state (speculative decoding).
    """

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_width: int
    conv_dtype: torch.dtype
    channel_decay: bool = False
    state_dtype: torch.dtype = torch.float32
    max_drafts: int = 0

    def __post_init__(self) -> None:
        wrong = []
        if self.num_k_heads < 1 or self.num_v_heads < 1 or self.num_v_heads % self.num_k_heads:
            wrong.append(f"num_v_heads={self.num_v_heads} is not a multiple of num_k_heads={self.num_k_heads}")
        for name, dim in (("k_head_dim", self.k_head_dim), ("v_head_dim", self.v_head_dim)):
            if dim < 1:
                wrong.append(f"{name}={dim}; allowed: at least 1")
        if self.conv_width < 2:
            wrong.append(f"conv_width={self.conv_width}; allowed: at least 2")
        if self.max_drafts < 0:
            wrong.append(f"max_drafts={self.max_drafts}; allowed: at least 0")
        if wrong:
            raise ValueError("gdn: " + "; ".join(wrong))

    @property
    def family(self) -> str:
        return "gdn"

    @property
    def key_dim(self) -> int:
        """Channels of all key heads (and of all query heads)."""
        return self.num_k_heads * self.k_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of all value heads."""
        return self.num_v_heads * self.v_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: [q | k | v]."""
        return 2 * self.key_dim + self.value_dim

    @property
    def decay_dim(self) -> int:
        """Number of decay rates of all value heads."""
        return self.num_v_heads * (self.k_head_dim if self.channel_decay else 1)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state."""
        return self.num_v_heads * self.k_head_dim * self.v_head_dim * self.state_dtype.itemsize

    @property
    def plan_key(self) -> Hashable:
        return ("gdn", self.state_bytes, self.max_drafts)

    def boundaries(self) -> tuple[int, ...]:
        return (self.conv_width, CHUNK, KERNEL_CHUNK)

    def caches(self) -> dict[str, CacheLayout]:
        conv = Field("conv", (self.conv_width - 1, self.conv_dim), self.conv_dtype)
        ssm = Field("ssm", (self.num_v_heads, self.k_head_dim, self.v_head_dim), self.state_dtype)
        return {"state": StateSlots((conv, ssm, *self._draft_fields()))}

    def _draft_fields(self) -> tuple[Field, ...]:
        """The inputs of the last step's drafts, in the type that they have there."""
        if not self.max_drafts:
            return ()
        widths = {"draft_qkv": self.conv_dim, "draft_b": self.num_v_heads, "draft_a": self.decay_dim}
        return tuple(Field(name, (self.max_drafts, width), self.conv_dtype) for name, width in widths.items())
