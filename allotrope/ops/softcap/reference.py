"""Soft-capped logits in PyTorch: what kernels are held against."""

from __future__ import annotations

import torch


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(logits / cap). `logits`: any shape and type. Returns fp32 in the same shape."""
    return cap * torch.tanh(logits.float() / cap)
