"""Multi-head latent attention (MLA): the definition, dense, one sequence, no cache.

Every token keeps one latent c [C] and one rotated key part k_pe [R] for all heads. For query t of head h and s over the
tokens up to t's own:

    k_s,h = [W_UK_h c_s | k_pe_s],   v_s,h = W_UV_h c_s,   q_t,h = [q_nope_t,h | q_pe_t,h]
    o_t,h = sum_s softmax_s(scale * q_t,h . k_s,h) v_s,h

This is the MHA form: keys and values are decompressed for every head. The absorbed form is the same sum as MQA in the
latent. W_UK moves to the query and W_UV behind the sum:

    q_t,h . k_s,h = [W_UK_h^T q_nope_t,h | q_pe_t,h] . [c_s | k_pe_s],   o_t,h = W_UV_h sum_s softmax_s(...) c_s

Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1 and appendix C.
"""

from __future__ import annotations

import torch

from allotrope.attention.mla.spec import MlaSpec


def naive(
    spec: MlaSpec,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    c: torch.Tensor,
    k_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
) -> torch.Tensor:
    """The equation above in the MHA form, in fp32, or in float64 where `q_nope` is float64.

    `q_nope`: [T, H, Dn], `q_pe`: [T, H, R] rotated; query t sits at position L - T + t. `c`: [L, C] normed. `k_pe`:
    [L, R] rotated. `w_uk`: [H, Dn, C]. `w_uv`: [H, Dv, C]. Returns [T, H, Dv].
    """
    dtype = torch.promote_types(q_nope.dtype, torch.float32)
    q_nope, q_pe, c, k_pe, w_uk, w_uv = (x.to(dtype) for x in (q_nope, q_pe, c, k_pe, w_uk, w_uv))
    k_nope = torch.einsum("hnc,lc->lhn", w_uk, c)
    v = torch.einsum("hvc,lc->lhv", w_uv, c)
    k_pe = k_pe[:, None].expand(-1, spec.num_heads, -1)
    k = torch.cat((k_nope, k_pe), dim=-1)
    q = torch.cat((q_nope, q_pe), dim=-1)
    tokens, length = len(q), len(k)
    key = torch.arange(length, device=q.device)
    position = torch.arange(length - tokens, length, device=q.device)[:, None]
    visible = key <= position
    logits = torch.einsum("thd,lhd->htl", q, k) * spec.scale
    logits = logits.masked_fill(~visible, -torch.inf)
    weights = torch.softmax(logits, dim=-1)
    return torch.einsum("htl,lhv->thv", weights, v)
