"""How ranks share the work of an indexer: each selects for some queries of prompts, and gets the others' selections.
Compressed sparse attention shares its indexer's as well.

Attention is cut by heads, but all heads of the indexer make one score, so every rank would score every query alike. Its
work grows with the length of the prompt, and that of sparse attention does not. Decodes are too few to be shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from allotrope.attention.batch import on_device
from allotrope.attention.mla.plan import Span

Gather = Callable[[torch.Tensor], torch.Tensor]
"""[n, K] of this rank to [ranks * n, K] of all, in their order."""

# Pairs of a query and a key of a step from which scoring them takes longer on a GPU than the exchange.
MIN_PAIRS = 1 << 23


@dataclass(frozen=True)
class SharedQueries:
    """`own`: tokens of the queries of this rank, filled up with some of them so that every rank has as many. `tokens`:
    [n] of all shared queries; `source`: [n] their rows among those that are gathered."""

    own: torch.Tensor
    tokens: torch.Tensor
    source: torch.Tensor


def exchange(shared: SharedQueries | None, topk_indices: torch.Tensor, gather: Gather | None) -> None:
    """Fill in the rows of other ranks' queries in `topk_indices` [T, K], where any are shared."""
    if shared is None:
        return
    assert gather is not None
    found = gather(topk_indices.index_select(0, shared.own).int())
    topk_indices[shared.tokens] = found.index_select(0, shared.source).to(topk_indices.dtype)


def share(
    spans: Sequence[Span], size: int, rank: int, ranks: int, device: torch.device, ratio: int = 1
) -> tuple[list[Span], SharedQueries | None]:
    """The spans of one rank, of `size` queries or fewer, where `spans` are worth sharing; else `spans`, and None.
    `ratio`: tokens for each key.

    Spans are dealt in turns: later queries of a prompt see more keys.
    """
    pairs = sum(span.queries * span.position + span.queries * (span.queries + 1) // 2 for span in spans) // ratio
    if ranks == 1 or not spans or (device.type == "cuda" and pairs < MIN_PAIRS):
        return list(spans), None
    cut = [
        Span(span.request, span.token + first, span.position + first, min(size, span.queries - first))
        for span in spans
        for first in range(0, span.queries, size)
    ]
    held = [_tokens(cut[i::ranks]) for i in range(ranks)]
    rows = max(map(len, held))
    source = np.concatenate([i * rows + np.arange(len(tokens)) for i, tokens in enumerate(held)])
    own = held[rank]
    own = np.concatenate([own, np.repeat((own if len(own) else held[0])[:1], rows - len(own))])
    index = (own, np.concatenate(held), source)
    return cut[rank::ranks], SharedQueries(*(on_device(one, torch.int64, device) for one in index))


def _tokens(spans: Sequence[Span]) -> npt.NDArray[np.int64]:
    own = [np.arange(span.token, span.token + span.queries) for span in spans]
    return np.concatenate([np.arange(0), *own])
