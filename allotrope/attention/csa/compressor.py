"""The compressor: it pools each block of r tokens into one compressed entry, across step and chunk borders.

Token t has kv_t and score_t, with one stream for each entry that pools it. Block e closes at its boundary, token
(e + 1) r - 1, and pools the K = streams * r tokens up to it, each channel c by itself:

    w_j[c]  = softmax_j(score_j[c] + position_bias[j mod r][c])
    entry_e = rope(RMSNorm(sum_j w_j * kv_j), e r)

With overlap, an entry pools stream 0 of the block before and stream 1 of its own block; tokens before the first have
weight 0. The entry is rotated at the position of its block's first token, e r. The compressor saves every token's kv
and biased score before it pools, so that the steps in which tokens come do not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from allotrope.attention.csa.plan import CompressorPlan
from allotrope.attention.csa.rotary import rotate_tail


@dataclass(frozen=True)
class Compression:
    """The inputs of one compressor in a step.

    `kv_score`: [T, 2 * streams * d] fp32, the projected kv and score. `position_bias`: [r, streams * d], added to the
    score of a token at its position mod r. `norm`: [d] weight of the entry's norm.
    """

    kv_score: torch.Tensor
    position_bias: torch.Tensor
    norm: torch.Tensor

    def map_tokens(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Compression:
        """As in `TokenInputs`."""
        return replace(self, kv_score=change(self.kv_score))


def compress(compressor: CompressorPlan, states: torch.Tensor, new: Compression, eps: float) -> torch.Tensor | None:
    """Save the step's tokens, then pool the blocks that close in it.

    `states`: [P, S, 2 * streams * d] fp32. `eps`: of the entries' norm. Returns [E, d] fp32, to be stored by
    `compressor.closed.writes`; None if no block closes.
    """
    kv, score = new.kv_score.float().chunk(2, dim=-1)
    compressor.state_writes.put(states, torch.cat((kv, score + new.position_bias.float()[compressor.phase]), dim=-1))
    closed = compressor.closed
    if closed is None:
        return None
    # Rows of several layers may lie beside each other, so that rows are not back to back.
    streams = states.flatten(0, 1).unflatten(-1, (-1, new.norm.shape[-1]))
    weights = torch.softmax(_members(streams, closed.scores) + closed.bias, dim=1)
    pooled = (weights * _members(streams, closed.kv_rows)).sum(dim=1)
    normed = pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + eps) * new.norm.float()
    return rotate_tail(normed, closed.rotation)


def _members(streams: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[E, K, d] of `streams` [R, n, d], those with the numbers `rows` [E, K]."""
    return streams[rows // streams.shape[1], rows % streams.shape[1]]
