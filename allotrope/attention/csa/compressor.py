"""Pooling of tokens into compressed entries, across step and chunk borders.

Token t brings kv_t and score_t, each of one stream per entry that pools it. Entry e closes at token (e + 1) r - 1 and
pools, for each channel c by itself, the K = streams * r tokens that end there:

    w_j[c]  = softmax_j(score_j[c] + position_bias[j mod r][c])
    entry_e = rope(RMSNorm(sum_j w_j * kv_j), e r)

With overlap, the r tokens before the entry's own give their stream 0 and its own r tokens their stream 1; tokens before
the first have weight 0. The row is rotated at the position of the first token that the entry owns, e r. Every token's
kv and biased score are saved before anything is pooled, so that pooling never cares which step a token came in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from allotrope.attention.csa.plan import CompressorPlan
from allotrope.attention.csa.rotary import rotate_tail


@dataclass(frozen=True)
class Compression:
    """What one compressor gets in a step.

    `kv_score`: [T, 2 * streams * d], kv and score as projected; keep them fp32 from the projection on. `position_bias`:
    [r, streams * d], added to the score of a token at its position mod r. `norm`: [d] weight of the entry's norm.
    """

    kv_score: torch.Tensor
    position_bias: torch.Tensor
    norm: torch.Tensor


def compress(compressor: CompressorPlan, states: torch.Tensor, new: Compression, eps: float) -> torch.Tensor | None:
    """Save the step's tokens, then pool the entries that close in it.

    `states`: [P, S, 2 * streams * d] fp32. `eps`: of the entries' norm. Returns [E, d] fp32, to be stored by
    `pooling.closing.writes`; None if none closes.
    """
    kv, score = new.kv_score.float().chunk(2, dim=-1)
    compressor.state_writes.put(states, torch.cat((kv, score + new.position_bias.float()[compressor.phase]), dim=-1))
    closed = compressor.closed
    if closed is None:
        return None
    streams = states.view(-1, new.norm.shape[-1])
    weights = torch.softmax(_members(streams, closed.scores) + closed.bias, dim=1)
    pooled = (weights * _members(streams, closed.kv_rows)).sum(dim=1)
    normed = pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + eps) * new.norm.float()
    return rotate_tail(normed, closed.rotation)


def _members(streams: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[E, K, d] of `rows` [E, K]."""
    return streams.index_select(0, rows.flatten()).unflatten(0, rows.shape)
