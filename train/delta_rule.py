"""The gated delta rule over whole sequences, in chunks, differentiable in plain PyTorch.

With b_t = sum of g up to t inside a chunk, A_ij = beta_i exp(b_i - b_j) k_i . k_j below the diagonal and S the state
before the chunk, the chunk's updates are U = (I + A)^-1 beta (V - exp(b) K S), and

    O = exp(b) Q S + (exp(b_i - b_j) q_i . k_j)_{j <= i} U,     S' = exp(b_C) S + (exp(b_C - b) K)^T U

Source: Yang et al. 2024 (Gated Delta Networks), section 3.3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunk: int = 64
) -> torch.Tensor:
    """`q`, `k`: [B, H, T, Dk] normed; `q` has its scale. `v`: [B, H, T, Dv]. `g`, `beta`: [B, H, T]. All fp32.

    Returns [B, H, T, Dv] fp32.
    """
    length = q.shape[2]
    spare = -length % chunk
    q, k, v = (F.pad(x, (0, 0, 0, spare)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, spare)).unflatten(2, (-1, chunk)) for x in (g, beta))
    total = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    # Masked before exp: above the diagonal it would overflow, and its gradient would be NaN.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    inner = (k * beta[..., None]) @ k.transpose(-1, -2) * decay
    eye = torch.eye(chunk, device=q.device, dtype=q.dtype)
    system = inner.tril(-1) + eye
    both = torch.cat((v, k * total.exp()[..., None]), dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    new, old = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    own = q @ k.transpose(-1, -2) * decay
    entering = q * total.exp()[..., None]
    leaving = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    kept = total[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    out = []
    for i in range(q.shape[2]):
        updates = new[:, :, i] - old[:, :, i] @ state
        out.append(entering[:, :, i] @ state + own[:, :, i] @ updates)
        state = kept[:, :, i] * state + leaving[:, :, i] @ updates
    return torch.cat(out, dim=2)[:, :, :length]
