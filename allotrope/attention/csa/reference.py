"""Compressed sparse attention over paged caches: the definition of `naive.py` with the signature of the kernels.

For the query of head h at position p, over the entries s that it sees (window entries p - W + 1 .. p and the top-k
entries of compressed KV; a token that both cover counts twice):

    l_s = scale * rope(q_h, p) . kv_s
    o_h = rope^-1(sum_s exp(l_s) kv_s / (sum_s exp(l_s) + exp(sink_h)), p)

An entry is key and value at once, and it is stored rotated. The sum is rotated as well; the inverse rotation is at the
position of the query. The family applies all rotary embedding: inputs and output are not rotated. Mathematics in fp32
whatever the inputs. Sources: DeepSeek-AI 2026, "DeepSeek-V4", section 2.3; Xiao et al. 2023, section 3 (sinks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from allotrope.attention.csa import rows
from allotrope.attention.csa.compressor import compress
from allotrope.attention.csa.indexer import select_topk
from allotrope.attention.csa.inputs import CsaInputs
from allotrope.attention.csa.plan import CsaPlan, SubBatch, Writes
from allotrope.attention.csa.rotary import rotate_tail
from allotrope.attention.csa.spec import CsaSpec
from allotrope.attention.family import CacheViews


def run(spec: CsaSpec, plan: CsaPlan, caches: CacheViews, inputs: CsaInputs) -> torch.Tensor:
    """Store the window entries, save compressor states, compress closed blocks, select the top-k, attend.

    Returns [T, H, D] in the queries' type.
    """
    (q, kv), kv_scale, index = inputs.normed(), inputs.kv_scale, inputs.index
    _put(caches["window"], plan.window, rows.encode(spec, rotate_tail(kv, plan.rotation), kv_scale))
    topk_indices = None
    if plan.compressor is not None:
        assert inputs.compressor is not None
        entries = compress(plan.compressor, caches["state"]["kv_score"], inputs.compressor, spec.norm_eps)
        if entries is not None and plan.compressor.closed is not None:
            _put(caches["compressed"], plan.compressor.closed.writes, rows.encode(spec, entries, kv_scale))
    if plan.index_compressor is not None:
        assert spec.indexer is not None and index is not None
        keys = caches["index"]["k"]
        entries = compress(plan.index_compressor, caches["index_state"]["kv_score"], index.compressor, spec.norm_eps)
        if entries is not None and plan.index_compressor.closed is not None:
            plan.index_compressor.closed.writes.put(keys, entries)
        topk_indices = select_topk(spec.indexer, plan, keys, index.q, index.weights, index.gather)
    q = rotate_tail(q, plan.rotation)
    out = torch.empty_like(q)
    for sub_batch in plan.sub_batches:
        block = q[sub_batch.tokens].unflatten(0, (-1, sub_batch.queries))
        out[sub_batch.tokens] = attend(
            block, gather(spec, caches, sub_batch, topk_indices, kv_scale), sub_batch.bias, inputs.sinks, spec.scale
        ).flatten(0, 1)
    return rotate_tail(out, plan.rotation.inverse())


def _put(pools: Mapping[str, torch.Tensor], writes: Writes, values: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        writes.put(pools[name], value)


def gather(
    spec: CsaSpec, caches: CacheViews, sub_batch: SubBatch, topk_indices: torch.Tensor | None, kv_scale: float
) -> list[torch.Tensor]:
    """Entries that each request of `sub_batch` reads: window entries [b, L, D], and compressed entries [b, N, D], those
    of the plan or of the sparse indices `topk_indices`."""
    compressed_rows = sub_batch.compressed_rows
    if compressed_rows is None and topk_indices is not None:
        compressed_rows = topk_indices[sub_batch.tokens]
    kv = [rows.decode(spec, caches["window"], sub_batch.window_rows, kv_scale)]
    if compressed_rows is not None and compressed_rows.shape[1]:
        kv.append(rows.decode(spec, caches["compressed"], compressed_rows, kv_scale))
    return kv


def attend(
    q: torch.Tensor, kv: Sequence[torch.Tensor], bias: torch.Tensor, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """The sum of the equation above for b requests of q queries.

    `q`: [b, q, H, D]. `kv`: fp32 keys and values as chunks [b, l, D] of [b, L, D]; they are too large to concatenate.
    `bias`: [b, q, L], 0 where an entry is visible, else -inf. `sinks`: [H], -inf for none. Returns [b, q, H, D] in
    `q`'s type; 0 where a query sees no entry.
    """
    requests, queries, heads, dim = q.shape
    sink, scaled_q = sinks.float()[:, None], (q.float() * scale).flatten(1, 2)
    chunks = [torch.bmm(scaled_q, chunk.transpose(1, 2)) for chunk in kv]
    logits = (chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=-1)).view(requests, queries, heads, -1)
    logits += bias[:, :, None]
    m_i = logits.amax(-1, keepdim=True).maximum(sink)
    m_i = m_i.masked_fill_(m_i == -torch.inf, 0.0)
    weights = logits.sub_(m_i).exp_()
    l_i = (weights.sum(-1, keepdim=True) + (sink - m_i).exp_()).clamp_(min=torch.finfo(torch.float32).tiny)
    chunk_weights = weights.flatten(1, 2).split([chunk.shape[1] for chunk in kv], dim=-1)
    acc = torch.bmm(chunk_weights[0], kv[0])
    for p, chunk in zip(chunk_weights[1:], kv[1:], strict=True):
        acc.baddbmm_(p, chunk)
    return acc.view(requests, queries, heads, dim).div_(l_i).to(q.dtype)
