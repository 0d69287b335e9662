"""The packed masks of some rows of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenMaskSpec:
    """`vocab_size`: logits of a row."""

    vocab_size: int


@dataclass(frozen=True)
class BitMask:
    """`rows`: [N] int64 rows of the logits, without repeats. `bits`: [N, W] int32: bit i % 32 of word i // 32 says
    whether token i may be chosen; 32 W is at least the vocabulary.
    """

    rows: torch.Tensor
    bits: torch.Tensor
