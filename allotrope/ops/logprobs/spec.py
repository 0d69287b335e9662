"""Log-probabilities and ranks, in tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LogprobsSpec:
    """`vocab_size`: logits of a row."""

    vocab_size: int


@dataclass(frozen=True)
class LogprobsTensors:
    """Log-probabilities of one token per row, and of the row's K most likely tokens.

    `token_ids`: [N] the tokens asked for. `logprobs`: [N] fp32. `ranks`: [N], 1 plus the number of tokens that are more
    likely. `top_ids`, `top_logprobs`: [N, K], best first, equal ones by id.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @classmethod
    def unfilled(cls, logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> LogprobsTensors:
        """Memory for those of `token_ids` in the rows of `logits`, and of the `count` best."""
        size = len(logits)
        return cls(
            token_ids,
            logits.new_empty(size, dtype=torch.float32),
            logits.new_empty(size, dtype=torch.int64),
            logits.new_empty((size, count), dtype=torch.int64),
            logits.new_empty((size, count), dtype=torch.float32),
        )
