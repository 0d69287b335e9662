"""Gated delta rule with a short causal convolution: the definition, token by token, one sequence, no cache.

For token t of value head j, with q and k from key head j // (Hv / Hk), and S_t the head's [Dk, Dv] state, S_-1 = 0:

    [q | k | v]_t = silu(sum_i w_i u_(t - conv_width + 1 + i) + bias)      u: the projected [q | k | v], 0 before t = 0
    q_t <- q_t / |q_t| / sqrt(Dk),   k_t <- k_t / |k_t|                    |x|^2 = sum x^2 + 1e-6
    beta_t = sigmoid(b_t),   g_t = -exp(A_log) softplus(a_t + dt_bias)
    S_t = (I - beta_t k_t k_t^T) (exp(g_t) S_(t-1)) + beta_t k_t v_t^T
    o_t = S_t^T q_t

The delta rule is computed as S <- exp(g) S, then S <- S + k (beta (v - S^T k))^T. With `channel_decay` (KDA), a,
dt_bias and g are vectors of Dk per head, and exp(g) scales the rows of S.

Sources: Yang et al. 2024 (Gated Delta Networks), equation 10 and section 3; Kimi Team 2025 (Kimi Linear), section 3,
for the decay per channel; `naive.py` of flash-linear-attention.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from allotrope.attention.gdn.spec import GdnSpec


def naive(
    spec: GdnSpec,
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The equation above over a whole sequence, in fp32, or in float64 where `qkv` is float64.

    `qkv`: [T, 2 Hk Dk + Hv Dv] projections u before the convolution. `b`: [T, Hv]. `a`: [T, Hv], or [T, Hv Dk] with
    `channel_decay`. `conv_weight`: [2 Hk Dk + Hv Dv, conv_width], the newest input's factor last. `conv_bias`: one per
    channel. `A_log`: [Hv]. `dt_bias`: [Hv] or [Hv Dk], as `a`. Returns o [T, Hv, Dv] and the last state [Hv, Dk, Dv].
    """
    dtype = torch.promote_types(qkv.dtype, torch.float32)
    u, b, a, conv_weight, A_log, dt_bias = (x.to(dtype) for x in (qkv, b, a, conv_weight, A_log, dt_bias))
    y = functional.pad(u.T, (spec.conv_width - 1, 0))
    y = functional.conv1d(y, conv_weight[:, None], groups=spec.conv_dim).T
    y = functional.silu(y if conv_bias is None else y + conv_bias.to(dtype))
    q, k, v = y.split((spec.key_dim, spec.key_dim, spec.value_dim), dim=-1)
    q, k = (x.unflatten(-1, (spec.num_k_heads, spec.k_head_dim)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(spec.num_v_heads // spec.num_k_heads, dim=1) for x in (q, k))
    q, v = q * spec.k_head_dim**-0.5, v.unflatten(-1, (spec.num_v_heads, spec.v_head_dim))
    beta = torch.sigmoid(b)[..., None]
    g = -torch.exp(A_log)[:, None] * functional.softplus(a + dt_bias).unflatten(-1, (spec.num_v_heads, -1))

    state = v.new_zeros(spec.num_v_heads, spec.k_head_dim, spec.v_head_dim)
    out = []
    for t in range(len(u)):
        state = torch.exp(g[t])[..., None] * state
        delta = beta[t] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], delta)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out), state
