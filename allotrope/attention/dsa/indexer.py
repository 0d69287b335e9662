"""The lightning indexer: the top-k tokens that a query attends to.

    score_t(s) = sum_h w_t,h relu(q_t,h . k_s * d^-1/2)        for s up to t itself
    topk_t     = the `topk` tokens of the highest score; of equal scores the earlier token

Weights may be negative, so they stay outside of the ReLU. Mathematics in fp32 whatever the inputs: terms of both signs
cancel. Source: DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from allotrope.attention.dsa.plan import DsaPlan, ScoreChunk
from allotrope.attention.dsa.sharing import Gather, exchange
from allotrope.attention.dsa.spec import DsaSpec, IndexerSpec
from allotrope.attention.mla.rows import power_of_two, take, to_fp8
from allotrope.attention.topk import top_indices

# Scores per head that are held at a time.
HEAD_SCORES = 1 << 24


def encode_keys(spec: IndexerSpec, kv_dtype: torch.dtype, k: torch.Tensor) -> dict[str, torch.Tensor]:
    """Index keys in their stored format. `k`: [T, d]. Returns field name -> [T, n]."""
    if spec.key_format == "scaled":
        quantized, scale = scaled(k)
        return {"k": quantized, "factor": scale}
    return {"k": to_fp8(k) if kv_dtype == torch.float8_e4m3fn else k.to(kv_dtype)}


def scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and one scale for each vector: x ~ values * scale, scale = 2^ceil(log2(max|x| / 448)).

    `x`: [..., d]. Returns e4m3 [..., d] and fp32 [..., 1].
    """
    scale = power_of_two(x)
    return to_fp8(x.float() / scale), scale


def select_topk(
    spec: DsaSpec,
    plan: DsaPlan,
    keys: Mapping[str, torch.Tensor],
    q: torch.Tensor,
    weights: torch.Tensor,
    gather: Gather | None = None,
) -> torch.Tensor:
    """Select the top-k tokens of every query of the step.

    `keys`: fields [P, S, n] of the index pool, this step's keys stored. `q`: [T, heads, d] rotated. `weights`:
    [T, heads]. `gather`: of the ranks that share its work. Returns [T, K] int64 positions within the query's own
    request, ascending, -1 at the end where it sees fewer than K tokens.
    """
    topk_indices = plan.topk_indices.clone()
    if "factor" in keys:
        quantized, scale = scaled(q)
        q = quantized.float() * scale
    for chunk in plan.chunks:
        topk_indices[chunk.tokens] = top_indices(scores(chunk, keys, q[chunk.tokens], weights[chunk.tokens]), spec.topk)
    exchange(plan.shared, topk_indices, gather)
    return topk_indices


def scores(chunk: ScoreChunk, keys: Mapping[str, torch.Tensor], q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The equation above. `q`: [b * q, heads, d]. `weights`: [b * q, heads].

    Returns [b * q, L] fp32, -inf for a token that the query does not see.
    """
    requests, length = chunk.rows.shape
    queries, heads, dim = q.shape
    per_request = (q.float() * dim**-0.5).view(requests, -1, dim)
    head_weights = weights.float()[:, None]
    out = torch.empty(queries, length, dtype=torch.float32, device=q.device)
    width = max(16, HEAD_SCORES // (queries * heads))
    for first in range(0, length, width):
        rows = chunk.rows[:, first : first + width]
        k = take(keys["k"], rows).float()
        if "factor" in keys:
            k *= take(keys["factor"], rows)
        logits = torch.matmul(per_request, k.transpose(1, 2)).relu_().view(queries, heads, -1)
        out[:, first : first + width] = torch.matmul(head_weights, logits).squeeze(1)
    return out.masked_fill_(torch.arange(length, device=q.device) >= chunk.seen, -torch.inf)
