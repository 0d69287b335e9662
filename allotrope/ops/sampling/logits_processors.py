"""Changes to logits before a token is chosen: penalties (repetition, then frequency and presence), added bias, allowed
tokens, the min-tokens mask, in this order. The sampler applies the packed masks of grammars behind them.
"""

from __future__ import annotations

import torch

from allotrope.ops.sampling.spec import LogitsProcessors, Penalties


def apply_logits_processors(logits: torch.Tensor, processors: LogitsProcessors) -> torch.Tensor:
    """Change `logits` [B, V] fp32 in place, and return it."""
    if processors.penalties is not None:
        _penalize(logits, processors.penalties)
    if processors.bias is not None:
        logits[processors.bias.rows, processors.bias.ids] += processors.bias.values
    if processors.allowed is not None:
        mask = processors.allowed
        kept = logits[mask.rows, mask.ids]
        logits.index_fill_(0, mask.masked_rows, -torch.inf)
        logits[mask.rows, mask.ids] = kept
    if processors.min_tokens_mask is not None:
        # An index_put_ with a number as value would make its tensor on the host, and wait for the device.
        lowest = logits.new_full((), -torch.inf)
        logits.index_put_((processors.min_tokens_mask.rows, processors.min_tokens_mask.ids), lowest)
    return logits


def _penalize(logits: torch.Tensor, seen: Penalties) -> None:
    """`z = (z / r if z > 0 else z * r) - frequency * count - presence * (count > 0)` at the seen tokens, in place."""
    values = logits[seen.rows, seen.ids]
    values = torch.where(values > 0, values / seen.repetition, values * seen.repetition)
    counts = seen.output_counts
    logits[seen.rows, seen.ids] = values - seen.frequency * counts - seen.presence * (counts > 0)
