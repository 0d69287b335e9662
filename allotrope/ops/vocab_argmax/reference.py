"""The best column of a row in PyTorch: what kernels are held against."""

from __future__ import annotations

import torch

from allotrope.ops.logprobs.reference import order_keys

# The key of NaN: above that of infinity.
_NAN = 0x7FFFFFFF << 32


def best(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit of each row and its column. `logits`: [n, V] fp32. Returns [n] int64, as the package says."""
    return order_keys(logits).masked_fill_(logits.isnan(), _NAN).amax(-1)


def token(best: torch.Tensor, columns: int) -> torch.Tensor:
    """The column of each `best` [n], of `columns`. Returns [n] int64, -1 where the logit is not finite."""
    keys = (best >> 32).to(torch.int32)
    logits = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return torch.where(logits.isfinite(), columns - 1 - (best & 0xFFFFFFFF), -1)
