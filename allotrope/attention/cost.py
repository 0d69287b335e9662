"""The roofline cost of an operation: bytes that must move and operations that must be computed.

Each family counts its own in `cost.py`. Must not know models, kernels, times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class StepCost:
    """`bytes`: read and written. `flops`: floating-point operations, `fp8` of them in products of FP8 numbers."""

    bytes: int = 0
    flops: int = 0
    fp8: int = 0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(self.bytes + other.bytes, self.flops + other.flops, self.fp8 + other.fp8)

    def __mul__(self, times: int) -> StepCost:
        return StepCost(self.bytes * times, self.flops * times, self.fp8 * times)


@dataclass(frozen=True)
class Lengths:
    """The lengths of a step's requests. `new`, `kv`: [B] new tokens, and tokens visible to the last of them.
    `itemsize`: bytes of one activation."""

    new: torch.Tensor
    kv: torch.Tensor
    itemsize: int

    @staticmethod
    def of(query_lens: Iterable[int], seq_lens: Iterable[int], itemsize: int) -> Lengths:
        new, kv = (torch.tensor(tuple(lens), dtype=torch.int64) for lens in (query_lens, seq_lens))
        return Lengths(new, kv, itemsize)

    @property
    def tokens(self) -> int:
        return int(self.new.sum())

    @cached_property
    def of_prompts(self) -> torch.Tensor:
        """[T] whether each new token is of a prompt, and not a decode."""
        return (self.new > 1).repeat_interleave(self.new)

    @cached_property
    def visible(self) -> torch.Tensor:
        """[T] tokens that each new token sees, itself included."""
        starts = self.new.cumsum(0) - self.new
        return torch.arange(self.tokens) + 1 + (self.kv - self.new - starts).repeat_interleave(self.new)

    def within(self, window: int) -> int:
        """Cache entries of the last `window` tokens that the queries read, each entry once a request."""
        return int(torch.minimum(self.kv, self.new - 1 + window).sum())


def causal_pairs(new: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """[B] number of pairs of a query and a visible key: the queries are the last `new` of `kv` tokens."""
    return new * (kv - new) + new * (new + 1) // 2
