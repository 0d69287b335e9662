"""Sparse latent attention over paged caches: the definition of `naive.py` with the signature of the kernels.

Query t attends, as in latent attention, to K_t alone: the top-k of its indexer's scores, or all tokens up to its own
where those are no more than `topk`.

    o_t,h = W_UV_h sum_{s in K_t} exp(l_s) c_s / sum_{s in K_t} exp(l_s)

Queries with sparse indices are always absorbed: neighbouring queries have different indices, so that a decompressed key
would serve one of them.
Source: DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from allotrope.attention.dsa.indexer import encode_keys, select_topk
from allotrope.attention.dsa.inputs import DsaInputs, missing_inputs
from allotrope.attention.dsa.plan import DsaPlan, SparseQueries
from allotrope.attention.dsa.spec import DsaSpec
from allotrope.attention.family import CacheViews
from allotrope.attention.mla import reference as mla
from allotrope.attention.mla.inputs import normed_and_rotated
from allotrope.attention.mla.rows import decode
from allotrope.attention.mla.spec import MlaSpec

# Cache entries that queries with sparse indices gather at a time.
GATHERED_ROWS = 1 << 16


def run(spec: DsaSpec, plan: DsaPlan, caches: CacheViews, inputs: DsaInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Store the step's latents and index keys, select top-k indices (or reuse given ones), then attend.

    Returns [T, H, Dv] in the queries' type, and the top-k indices. Raises ValueError if a tensor that the layer needs
    is missing.
    """
    latent, index, topk_indices = inputs.latent, inputs.index, inputs.topk_indices
    heads, w_uk, w_uv, kv_scale = normed_and_rotated(spec.mla, latent), latent.w_uk, latent.w_uv, latent.kv_scale
    out = mla.store_and_attend(spec.mla, plan.dense, caches, *heads, w_uk, w_uv, kv_scale)
    if index is not None and spec.indexer is not None and plan.index_writes is not None:
        index_q, index_k = index.normed_and_rotated()
        mla.store(plan.index_writes, caches["index"], encode_keys(spec.indexer, spec.mla.kv_dtype, index_k))
        topk_indices = select_topk(spec, plan, caches["index"], index_q, index.weights, index.gather)
    elif topk_indices is None:
        raise ValueError(missing_inputs(spec))
    if plan.sparse_queries is not None:
        tokens = plan.sparse_queries.tokens
        q = mla.absorb(heads.q_nope[tokens], heads.q_pe[tokens], w_uk)
        z = attend_sparse(spec.mla, plan.sparse_queries, caches["latent"], q, topk_indices[tokens], kv_scale)
        out[tokens] = mla.project_up(z, w_uv).to(out.dtype)
    return out, topk_indices


def store_only(spec: DsaSpec, plan: DsaPlan, caches: CacheViews, inputs: DsaInputs) -> None:
    """The part of `run` that writes the step's latents and index keys. The queries may have no heads."""
    mla.store_only(spec.mla, plan.dense, caches, inputs.latent)
    if spec.indexer is not None:
        assert inputs.index is not None and plan.index_writes is not None
        _, index_k = inputs.index.normed_and_rotated()
        mla.store(plan.index_writes, caches["index"], encode_keys(spec.indexer, spec.mla.kv_dtype, index_k))


def attend_sparse(
    spec: MlaSpec,
    sparse_queries: SparseQueries,
    pools: Mapping[str, torch.Tensor],
    q: torch.Tensor,
    topk_indices: torch.Tensor,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """Attention in the latent, every query over its own sparse indices.

    `q`: [t, H, C + R] absorbed. `topk_indices`: [t, topk] positions, -1 for none. Returns [t, H, C] fp32.
    """
    z = q.new_empty(*q.shape[:2], spec.latent_dim)
    size = max(1, GATHERED_ROWS // topk_indices.shape[1])
    for first in range(0, len(q), size):
        block = slice(first, first + size)
        rows = pool_rows(sparse_queries, topk_indices[block], block)
        latent, k_pe = decode(spec.row_format, spec.latent_dim, pools, rows, kv_scale)
        keys = torch.cat((latent, k_pe), dim=-1)
        # The bias is finite, so that a query without any index gets the mean of row 0, which is 0, and not NaN.
        bias = torch.where(topk_indices[block] < 0, torch.finfo(torch.float32).min, 0.0)[:, None]
        z[block] = mla.attend(q[block, None], keys, latent, bias, spec.scale).squeeze(1)
    return z


def pool_rows(sparse_queries: SparseQueries, topk_indices: torch.Tensor, block: slice) -> torch.Tensor:
    """Positions to rows of the latent pool, through the page table of each query's own request; row 0 for -1.

    `topk_indices`: [n, topk], those of the queries `block` of `sparse_queries`.
    """
    position = topk_indices.clamp(min=0)
    size = sparse_queries.pages.page_size
    page = sparse_queries.pages.table[sparse_queries.request[block, None], position // size]
    return torch.where((topk_indices >= 0) & (page >= 0), page * size + position % size, 0)
