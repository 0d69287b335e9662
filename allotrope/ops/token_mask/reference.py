"""Masking by packed bits in PyTorch: what kernels are held against."""

from __future__ import annotations

import torch

from allotrope.ops.token_mask.spec import BitMask


def mask_tokens(logits: torch.Tensor, mask: BitMask, value: float = -torch.inf) -> torch.Tensor:
    """Set `logits` [B, V] to `value` in place where a row of `mask` has the bit 0, and return them."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((mask.bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[mask.rows] = logits[mask.rows].masked_fill_(~allowed, value)
    return logits
