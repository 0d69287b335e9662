"""Masking by packed bits in C (`cpu.c`)."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from allotrope.kernels.c.function import CFunction, c_reasons
from allotrope.kernels.chip import Chip
from allotrope.ops.token_mask import reference
from allotrope.ops.token_mask.spec import BitMask, TokenMaskSpec

SOURCE = Path(__file__).with_name("cpu.c")


def rejects(spec: TokenMaskSpec, chip: Chip) -> list[str]:
    return c_reasons(SOURCE, torch.float32, chip)


@functools.cache
def _mask_tokens() -> CFunction:
    return CFunction(SOURCE, "mask_tokens", torch.float32, "pppllllf")


def mask_tokens(logits: torch.Tensor, mask: BitMask, value: float = -torch.inf) -> torch.Tensor:
    """As `reference.mask_tokens`, which runs strided columns and other types."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not mask.bits.is_contiguous():
        return reference.mask_tokens(logits, mask, value)
    (count, words), vocab = mask.bits.shape, logits.shape[1]
    _mask_tokens()(logits, mask.rows, mask.bits, count, vocab, logits.stride(0), words, value)
    return logits
