"""`mask_tokens` for a GPU: a program owns a block of one row, and writes what is masked alone.

Bytes moved: the bits, and the masked logits once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv
from allotrope.ops.token_mask.spec import BitMask

BLOCK = 4096


@pdl_jit
def mask_tokens_kernel(logits, rows, bits, vocab, row_stride, words, value, BLOCK: tl.constexpr):
    """`logits`: [B, vocab] fp32. `rows`: [N]. `bits`: [N, words]."""
    gdc_wait()
    gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    word = tl.load(bits + place * words + column // 32, mask=inside, other=-1)
    masked = ((word >> (column % 32)) & 1) == 0
    row = tl.load(rows + place)
    tl.store(logits + row * row_stride + column, value, mask=inside & masked)


def mask_tokens(logits: torch.Tensor, mask: BitMask, value: float = -torch.inf) -> torch.Tensor:
    """As `reference.mask_tokens`."""
    vocab, words = logits.shape[1], mask.bits.shape[1]
    if len(mask.rows):
        mask_tokens_kernel[(len(mask.rows), cdiv(vocab, BLOCK))](
            logits, mask.rows, mask.bits, vocab, logits.stride(0), words, value, BLOCK=BLOCK, num_warps=8
        )
    return logits


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Of any vocabulary."""
    signature = {"logits": "*fp32", "rows": "*i64", "bits": "*i32", "value": "fp32"}
    signature |= dict.fromkeys(("vocab", "row_stride", "words"), "i32")
    return [Specialization("masked tokens", mask_tokens_kernel, signature, {"BLOCK": BLOCK}, 8, 1)]
