"""The indexer: the top-k compressed entries that a query attends to.

    score_t(e) = sum_h weight_t,h * relu(q_t,h . k_e) * (heads * d)^-1/2        for e < (p_t + 1) // r
    topk_t     = the `topk` entries of the highest score; of equal scores the earlier entry

A query that sees at most `topk` entries attends to all of them, and is not scored.
"""

from __future__ import annotations

import torch

from allotrope.attention.csa.plan import CsaPlan, ScoreChunk
from allotrope.attention.csa.rotary import rotate_tail
from allotrope.attention.csa.spec import IndexerSpec
from allotrope.attention.dsa.sharing import Gather, exchange
from allotrope.attention.topk import top_indices


def select_topk(
    spec: IndexerSpec,
    plan: CsaPlan,
    keys: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    gather: Gather | None = None,
) -> torch.Tensor:
    """Select the top-k compressed entries of every query that is scored.

    `keys`: [P, rows, d], the index keys of the entries. `q`: [T, heads, d], not rotated. `weights`: [T, heads], as
    projected. `gather`: of the ranks that share its work. Returns [T, topk] int64 rows of the compressed cache; only
    those of queries that are scored are set.
    """
    topk_indices = torch.zeros(q.shape[0], spec.topk, dtype=torch.int64, device=keys.device)
    if plan.chunks:
        q = rotate_tail(q, plan.rotation)
        for chunk in plan.chunks:
            entry = top_indices(scores(spec, chunk, keys, q, weights), spec.topk)
            rows = chunk.compressed_rows.repeat_interleave(chunk.queries, dim=0)
            topk_indices[chunk.tokens] = rows.gather(1, entry)
    exchange(plan.shared, topk_indices, gather)
    return topk_indices


def scores(
    spec: IndexerSpec, chunk: ScoreChunk, keys: torch.Tensor, q: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The equation above. `q`: [T, heads, d] rotated. Returns [b * q, N] fp32, -inf where an entry is not visible."""
    k = keys.flatten(0, 1).index_select(0, chunk.key_rows.flatten()).unflatten(0, chunk.key_rows.shape)
    queries = q[chunk.tokens].float().unflatten(0, (-1, chunk.queries))
    head_weights = weights[chunk.tokens].float() * (spec.num_heads * spec.head_dim) ** -0.5
    logits = torch.bmm(queries.flatten(1, 2), k.float().transpose(1, 2)).relu_()
    score = torch.bmm(head_weights[:, None], logits.view(len(head_weights), spec.num_heads, -1)).squeeze(1)
    return score + chunk.bias.flatten(0, 1)
