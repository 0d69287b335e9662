"""Compressed sparse attention (CSA, HCA): the definition, dense, one sequence, no cache.

One vector kv_s per token is key and value of every head. The query at position p sees the last W tokens (the sliding
window) and compressed KV, each entry of which pools a run of tokens. With r the compression ratio and rope(x, p) the
rotation of the last R dims:

    k_s   = rope(kv_s, s)
    e_n   = rope(RMSNorm(sum_j w_j * kv_j), r n)                 j over the r tokens of block n
    w_j   = softmax_j(score_j + position_bias[j mod r])          for each channel by itself
    o_p,h = rope(sum_s exp(l_s) k_s / (sum_s exp(l_s) + exp(sink_h)), -p)
    l_s   = scale * rope(q_p,h, p) . k_s                         s over the window's k and the selected e

With overlap, entry n pools 2r tokens: those of block n - 1 by their first stream of kv and score, those of block n by
their second. An entry is visible once its last token is: n < (p + 1) // r. All visible entries are selected, or those
with the top-k scores of the indexer, whose keys kI come from a compressor of its own; of equal scores the earlier one:

    I_p,n = sum_j wI_p,j relu(rope(qI_p,j, p) . kI_n) * (Hi Di)^-1/2           j over the Hi index heads

Ratio 0 has the sliding window alone; DeepSeek V4 has layers of ratio 0, 4 (overlap, indexer: CSA) and 128 (HCA).

Sources: DeepSeek-AI 2026 (DeepSeek-V4), section 2.3; Xiao et al. 2023, section 3 (sinks).
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from allotrope.attention.csa.spec import CsaSpec
from allotrope.ops.rope import inverse_frequencies


def rope(spec: CsaSpec, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotate interleaved pairs of the last R dims, in `x`'s type. `x`: [T, ..., D]. `position`: [T]."""
    angle = position.view(len(x), *(1 for _ in x.shape[1:])) * inverse_frequencies(spec.rope).to(x)
    freqs_cis = torch.polar(torch.ones_like(angle), angle)
    head, tail = x.split((x.shape[-1] - spec.rope.dim, spec.rope.dim), dim=-1)
    pairs = torch.view_as_complex(tail.unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((head, torch.view_as_real(pairs * freqs_cis).flatten(-2)), dim=-1)


def compressor(spec: CsaSpec, kv_score: torch.Tensor, position_bias: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Compressed KV: [L // r, D] entries e of `kv_score` [L, 2 * streams * D]. `norm`: [D] weight of the RMSNorm."""
    entries, dim = len(kv_score) // spec.ratio, len(norm)
    kv, score = kv_score[: entries * spec.ratio].unflatten(0, (entries, spec.ratio)).chunk(2, dim=-1)
    score = score + position_bias
    if spec.overlap:
        # Beside each block the one before it; before the first there is none, and the weights are 0.
        kv = torch.cat((pad(kv[..., :dim], (0, 0, 0, 0, 1, 0))[:-1], kv[..., dim:]), dim=1)
        score = torch.cat((pad(score[..., :dim], (0, 0, 0, 0, 1, 0), value=-torch.inf)[:-1], score[..., dim:]), dim=1)
    e = (torch.softmax(score, dim=1) * kv).sum(1)
    e = e * torch.rsqrt(e.square().mean(-1, keepdim=True) + spec.norm_eps) * norm
    return rope(spec, e, spec.ratio * torch.arange(entries, device=e.device))


def select(spec: CsaSpec, scores: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """[T, L // r] bool: the entries that the query at `position` [T] attends to. `scores`: [T, L // r]."""
    visible = torch.arange(scores.shape[1], device=scores.device) < (position[:, None] + 1) // spec.ratio
    if spec.indexer is None:
        return visible
    ranked = scores.masked_fill(~visible, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    return visible & torch.zeros_like(visible).scatter(1, ranked[:, : spec.indexer.topk], True)


def naive(
    spec: CsaSpec,
    q: torch.Tensor,
    kv: torch.Tensor,
    sinks: torch.Tensor,
    kv_score: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    entry_norm: torch.Tensor | None = None,
    index_q: torch.Tensor | None = None,
    index_weights: torch.Tensor | None = None,
    index_kv_score: torch.Tensor | None = None,
    index_position_bias: torch.Tensor | None = None,
    index_entry_norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """The equations above, in fp32, or in float64 where `q` is float64.

    `q`: [T, H, D] normed, not rotated; query t sits at position L - T + t. `kv`: [L, D] normed, not rotated. `sinks`:
    [H]. Where the spec has a ratio: `kv_score`: [L, 2 * streams * D] fp32 or wider, kv then score, 2 streams with
    overlap, else 1; `position_bias`: [r, streams * D]; `entry_norm`: [D]. Where it has an indexer: `index_q`:
    [T, Hi, Di] not rotated, `index_weights`: [T, Hi] as projected, and the same three of its compressor, of size Di.
    Returns [T, H, D], not rotated.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    key = torch.arange(len(kv), device=q.device)
    position = key[len(kv) - len(q) :]
    visible = (key <= position[:, None]) & (key > position[:, None] - spec.window)
    q, k = rope(spec, q.to(dtype), position), rope(spec, kv.to(dtype), key)
    if spec.ratio:
        assert kv_score is not None and position_bias is not None and entry_norm is not None
        compressed = compressor(spec, kv_score, position_bias, entry_norm)
        scores = compressed.new_zeros(len(q), len(compressed))
        if spec.indexer is not None:
            assert index_kv_score is not None and index_position_bias is not None and index_entry_norm is not None
            assert index_q is not None and index_weights is not None
            index_k = compressor(spec, index_kv_score, index_position_bias, index_entry_norm)
            hits = torch.relu(torch.einsum("tjd,nd->tjn", rope(spec, index_q.to(dtype), position), index_k))
            scores = torch.einsum("tj,tjn->tn", index_weights.to(dtype), hits) * index_q.shape[1:].numel() ** -0.5
        visible = torch.cat((visible, select(spec, scores, position)), dim=1)
        k = torch.cat((k, compressed))
    logits = (torch.einsum("thd,ld->htl", q, k) * spec.scale).masked_fill(~visible, -torch.inf)
    logits = torch.cat((logits, sinks.to(dtype)[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :-1]
    return rope(spec, torch.einsum("htl,ld->thd", weights, k), -position)
