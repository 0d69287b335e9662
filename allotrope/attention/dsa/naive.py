"""DeepSeek sparse attention (DSA): the definition, one sequence, no cache.

A lightning indexer scores every token s up to query t's own, and MLA runs over the top-k of them:

    I_t,s = sum_j w_t,j relu(qI_t,j . kI_s * Di^-1/2)                     j over the Hi index heads
    o_t   = MLA(q_t, {c_s, k_pe_s | I_t,s in top-k(I_t,:)})

Of equal scores the earlier token is taken. A query that sees at most `topk` tokens attends to all of them. The weights
w may be negative, so they stay outside of the ReLU; they carry every factor but Di^-1/2.

A layer without an indexer attends to the top-k indices that an earlier layer returned for the same tokens.

Source: DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.1, equations 1 and 2.
"""

from __future__ import annotations

import torch

from allotrope.attention.dsa.spec import DsaSpec
from allotrope.attention.mla.naive import naive as mla_naive


def indexer(spec: DsaSpec, index_q: torch.Tensor, index_k: torch.Tensor, index_weights: torch.Tensor) -> torch.Tensor:
    """Top-k indices of the scores I. Arguments as of `naive`.

    Returns [T, min(topk, L)] int64 positions, the highest score first, -1 at the end where a query sees fewer tokens.
    """
    dtype = torch.promote_types(index_q.dtype, torch.float32)
    index_q, index_k, index_weights = (x.to(dtype) for x in (index_q, index_k, index_weights))
    hits = torch.relu(torch.einsum("tjd,ld->tjl", index_q, index_k) * index_k.shape[-1] ** -0.5)
    scores = torch.einsum("tj,tjl->tl", index_weights, hits)
    key = torch.arange(len(index_k), device=scores.device)
    position = torch.arange(len(index_k) - len(index_q), len(index_k), device=scores.device)[:, None]
    scores = scores.masked_fill(key > position, -torch.inf)
    indices = scores.sort(dim=-1, descending=True, stable=True).indices[:, : spec.topk]
    return indices.masked_fill(indices > position, -1)


def naive(
    spec: DsaSpec,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    c: torch.Tensor,
    k_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    index_q: torch.Tensor | None = None,
    index_k: torch.Tensor | None = None,
    index_weights: torch.Tensor | None = None,
    topk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The equation above, in fp32, or in float64 where `q_nope` is float64.

    `q_nope` to `w_uv`: as in `mla.naive`; query t sits at position L - T + t. With an indexer: `index_q`: [T, Hi, Di]
    rotated, `index_k`: [L, Di] normed and rotated, `index_weights`: [T, Hi]. Without: `topk_indices`: [T, topk] those
    of an earlier layer, -1 for none. Returns [T, H, Dv] and the top-k indices.
    """
    if spec.indexer is not None:
        assert index_q is not None and index_k is not None and index_weights is not None
        topk_indices = indexer(spec, index_q, index_k, index_weights)
    assert topk_indices is not None
    out = []
    for t, indices in enumerate(topk_indices):
        s = indices[indices >= 0].sort().values
        out.append(mla_naive(spec.mla, q_nope[t : t + 1], q_pe[t : t + 1], c[s], k_pe[s], w_uk, w_uv))
    return torch.cat(out), topk_indices
