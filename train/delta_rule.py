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
    both = torch.cat((v, k * total.exp()[..., None]), dim=-1) * beta[..., None]
    new, old = (inverse(inner.tril(-1)) @ both).split((v.shape[-1], k.shape[-1]), dim=-1)
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


# Blocks of this size are inverted by their series; powers of larger ones grow beyond what fp32 holds.
_SERIES = 8


def inverse(a: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 by products alone, which a CUDA graph can hold. `a`: [..., n, n], zero from the diagonal on.

    n is 8 times a power of two. Two blocks on the diagonal become one: [[P, 0], [-Q C P, Q]].
    """
    n, size = a.shape[-1], _SERIES
    power = -_diagonal_blocks(a, size)
    eye = torch.eye(size, device=a.device, dtype=a.dtype)
    # I + x + ... + x^7 = (I + x) (I + x^2) (I + x^4)
    found = eye + power
    for _ in range(2):
        power = power @ power
        found = found + found @ power
    while size < n:
        p, q = found[..., ::2, :, :], found[..., 1::2, :, :]
        below = -q @ _diagonal_blocks(a, 2 * size)[..., size:, :size] @ p
        found = torch.cat((torch.cat((p, torch.zeros_like(p)), -1), torch.cat((below, q), -1)), -2)
        size *= 2
    return found.squeeze(-3)


def _diagonal_blocks(a: torch.Tensor, size: int) -> torch.Tensor:
    """[..., n / size, size, size] of `a` [..., n, n]."""
    blocks = a.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
