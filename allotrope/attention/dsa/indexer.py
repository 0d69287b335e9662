"""The lightning indexer: which rows a query attends to.

    score_t(s) = sum_h w_t,h relu(q_t,h . k_s * d^-1/2)        for s up to t's own row
    picks_t    = the `topk` rows of the highest score; equal scores go to the earlier row

Weights may be negative, so they stay outside of the ReLU. Mathematics in fp32 whatever the inputs: terms of both signs
cancel. Source: DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.
"""

from __future__ import annotations

import torch

from allotrope.attention.dsa.plan import Contest, DsaPlan
from allotrope.attention.dsa.spec import DsaSpec
from allotrope.attention.mla.reference import gather
from allotrope.attention.topk import top_indices

# Scores per head that are held at a time.
HEAD_SCORES = 1 << 24


def pick(spec: DsaSpec, plan: DsaPlan, keys: torch.Tensor, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Pick for every query of the step.

    `keys`: [P, S, d] index pool, this step's keys stored. `q`: [T, heads, d] rotated. `weights`: [T, heads]. Returns
    [T, K] int64 positions within the query's own request, ascending, -1 at the end where it sees fewer than K rows.
    """
    picks = plan.picks.clone()
    for contest in plan.contests:
        picks[contest.tokens] = top_indices(
            scores(contest, keys, q[contest.tokens], weights[contest.tokens]), spec.topk
        )
    return picks


def scores(contest: Contest, keys: torch.Tensor, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The equation above. `q`: [b * q, heads, d]. `weights`: [b * q, heads].

    Returns [b * q, L] fp32, -inf for a row that the query does not see.
    """
    requests, length = contest.rows.shape
    queries, heads, dim = q.shape
    per_request = (q.float() * dim**-0.5).view(requests, -1, dim)
    share = weights.float()[:, None]
    found = torch.empty(queries, length, dtype=torch.float32, device=q.device)
    width = max(16, HEAD_SCORES // (queries * heads))
    for first in range(0, length, width):
        rows = gather(keys, contest.rows[:, first : first + width])
        hits = torch.matmul(per_request, rows.transpose(1, 2)).relu_().view(queries, heads, -1)
        found[:, first : first + width] = torch.matmul(share, hits).squeeze(1)
    return found.masked_fill_(torch.arange(length, device=q.device) >= contest.seen, -torch.inf)
