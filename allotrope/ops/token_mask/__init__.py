"""Masks logits by packed bits: z = value where the bit of a token is 0."""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.token_mask import cpu, reference
from allotrope.ops.token_mask.spec import BitMask, TokenMaskSpec

__all__ = ["TOKEN_MASK", "BitMask", "TokenMaskSpec"]

TOKEN_MASK = Op(
    "token_mask",
    "z = z where the packed bit of a token is 1, else a value such as -inf, in place",
    (
        Backend("triton", needs_triton, lazily("allotrope.ops.token_mask.triton", "mask_tokens")),
        Backend("cpu", cpu.rejects, cpu.mask_tokens),
        Backend("reference", runs_anywhere, reference.mask_tokens),
    ),
)
