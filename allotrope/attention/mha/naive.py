"""Softmax attention over keys and values: the definition, dense, one sequence, no cache.

For query t of head h, with g = h // (H / G) its KV head and s over the keys that t sees:

    l_s   = softcap(scale * q_t,h . k_s,g)                        softcap(x) = c tanh(x / c), where the layer has one
    o_t,h = sum_s exp(l_s) v_s,g / (sum_s exp(l_s) + exp(sink_h))       no sink: its term is 0

The query at position p sees keys 0 .. p, or with a sliding window W the last W of them, its own included.

Sources: Vaswani et al. 2017, section 3.2; Ainslie et al. 2023 (GQA); Jiang et al. 2023, section 2 (sliding window);
Gemma Team 2024 (Gemma 2), section 2 (soft-cap); Xiao et al. 2023, section 3 (sinks), one learned logit per head as in
gpt-oss.
"""

from __future__ import annotations

import torch

from allotrope.attention.mha.spec import MhaSpec


def naive(
    spec: MhaSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """The equation above, in fp32, or in float64 where `q` is float64.

    `q`: [T, H, D], rotated; query t sits at position L - T + t. `k`: [L, G, D], rotated. `v`: [L, G, Dv]. `sinks`: [H].
    Returns [T, H, Dv].
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(dtype), k.to(dtype), (k if spec.values_are_keys else v).to(dtype)
    k, v = (x.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1) for x in (k, v))
    key = torch.arange(len(k), device=q.device)
    position = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    visible = key <= position
    if spec.window is not None:
        visible &= key > position - spec.window
    logits = torch.einsum("thd,lhd->htl", q, k) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.to(dtype)[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : len(k)]
    return torch.einsum("htl,lhd->thd", weights, v)
