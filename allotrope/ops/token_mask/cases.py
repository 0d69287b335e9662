"""Cases of masks: few tokens allowed, most, none, and a vocabulary that ends within a word."""

from __future__ import annotations

from functools import partial

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.token_mask import BitMask, TokenMaskSpec


def _make(vocab: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    draw = Draw(generator, device)
    words = (vocab + 31) // 32
    bits = draw.integers(-(2**31), 2**31, 3, words).to(torch.int32)
    bits[0] &= draw.integers(-(2**31), 2**31, words).to(torch.int32) >> 3
    bits[2, : words // 2] = 0
    return draw(dtype, 5, vocab), BitMask(torch.tensor([4, 0, 2], device=device), bits), -9.0


def _spec(vocab: int, dtype: torch.dtype) -> TokenMaskSpec:
    return TokenMaskSpec(vocab)


CASES: Cases = {
    "token_mask": {
        f"vocabulary {vocab}": OpCase(partial(_spec, vocab), partial(_make, vocab), dtypes=(torch.float32,))
        for vocab in (37, 4096, 5003)
    }
}
