"""The order of tokens by logit: the largest of a row, and log-probabilities with ranks.

Owns the total order (larger logit first, then lower id), which makes every answer independent of how wide a search
was and of what else is in the batch. Must not know requests or sampling parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from allotrope.ops.logprobs.spec import LogprobsTensors

_CPU_BLOCK = 2**18
_DEVICE_BLOCK = 2**25


def row_blocks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Consecutive slices of `rows` rows of `width` numbers. On a CPU a block's intermediates stay in the cache, and
    below the size at which the allocator asks for fresh pages each time; elsewhere a block bounds the scratch memory.
    """
    limit = _CPU_BLOCK if device.type == "cpu" else _DEVICE_BLOCK
    block = max(1, limit // width)
    return (slice(start, min(start + block, rows)) for start in range(0, rows, block))


def largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row in total order: by value, equal values by id.

    `logits`: [N, V] fp32. `count`: at most V. Returns values and ids, both [N, count].
    """
    # topk alone leaves open which of equal values it takes, so it is given keys of which no two are equal.
    ids = order_keys(logits).topk(count, dim=-1).indices
    return logits.gather(-1, ids), ids


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> LogprobsTensors:
    """`log_softmax(logits)` at one token of each row and at the `count` most likely ones.

    `logits`: [N, V] raw logits, any float type; not changed. `token_ids`: [N] int64. `count`: K, 0 for none.
    A row with a NaN or infinite logit gives NaN, never an error; a `token_ids` below 0 counts as 0.
    """
    size, vocab = logits.shape
    count = min(count, vocab)
    out = LogprobsTensors.unfilled(logits, token_ids, count)
    for block in row_blocks(size, vocab, logits.device):
        raw = logits[block].float()
        logprobs = raw.log_softmax(-1)
        ids = token_ids[block, None].clamp(min=0)
        out.logprobs[block] = logprobs.gather(-1, ids)[:, 0]
        out.ranks[block] = (raw > raw.gather(-1, ids)).sum(-1) + 1
        if count:
            top_ids = largest(raw, count)[1]
            out.top_ids[block] = top_ids
            out.top_logprobs[block] = logprobs.gather(-1, top_ids)
    return out


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """[N, V] int64 keys, all different within a row, that sort as (value, then lower id first)."""
    # Adding zero turns -0.0 into 0.0: equal numbers must have equal bits.
    bits = (logits + 0.0).view(torch.int32)
    # The bits of a negative float grow as it falls: turning all but the sign makes integers that sort as the floats.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    vocab = logits.shape[-1]
    return ordered.to(torch.int64).mul_(2**32).add_(torch.arange(vocab - 1, -1, -1, device=logits.device))
