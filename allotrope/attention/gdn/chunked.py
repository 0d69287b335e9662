"""The gated delta rule at matrix-product speed: one step for a decode, chunks of tokens for a prefill.

In a chunk with G_i the sum of g up to its token i and S the state before it, for every value head:

    A_ij = beta_i (k_i . k_j) e^(G_i - G_j), j < i
    D = (I + A)^-1 beta (V - e^G K S)
    O = e^G Q S + [(q_i . k_j) e^(G_i - G_j), j <= i] D
    S <- e^(G_last) S + (e^(G_last - G) K)^T D

Exponents are formed as differences, which are never positive. Whatever does not need S, the inverse above all, is done
for all chunks at once. Source: Yang et al. 2024 (gated delta networks), section 3.2.
"""

from __future__ import annotations

import torch

CHUNK = 64


def advance(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """As `reference.advance`."""
    if v.shape[1] == 1:
        return _step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)[:, None]
    return _chunks(q, k, v, g, beta, state)


def _step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """One token, the state read once for keys and queries: o = e^g S^T q + (k . q) d.

    `q`, `k`: [b, nk, dk]. `v`: [b, nv, dv]. `g`, `beta`: [b, nv]. `state`: [b, nv, dk, dv]. Returns [b, nv, dv].
    """
    repeat = v.shape[1] // k.shape[1]
    kq = _spread(torch.stack((k, q), dim=2), repeat)
    flat = state.flatten(0, 1)
    decay = g.exp()[..., None]
    seen = torch.bmm(kq.flatten(0, 1), flat).view(*v.shape[:2], 2, -1) * decay[..., None]
    delta = beta[..., None] * (v - seen[:, :, 0])
    flat.mul_(decay.view(-1, 1, 1)).baddbmm_(kq[:, :, 0].reshape(len(flat), -1, 1), delta.view(len(flat), 1, -1))
    return torch.addcmul(seen[:, :, 1], _spread((k * q).sum(-1, keepdim=True), repeat), delta)


def _spread(x: torch.Tensor, repeat: int) -> torch.Tensor:
    """[b, nk, ...] as [b, nk * repeat, ...], each key head for its value heads."""
    return x if repeat == 1 else x.unsqueeze(2).expand(-1, -1, repeat, *x.shape[2:]).flatten(1, 2)


def _chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    requests, length, heads, _ = v.shape
    groups, size = k.shape[2], min(CHUNK, length)
    # Chunks come first, so that each is one contiguous batch of matrices; the R value heads of a key head stay apart.
    kq = torch.stack([_cut(t, size).transpose(2, 3) for t in (k, q)], dim=3)
    v = _cut(v, size).transpose(2, 3).flatten(1, 2).contiguous()
    g, beta = (_cut(t, size).transpose(2, 3).unflatten(2, (groups, -1)) for t in (g, beta))
    # In double, or the difference of two large sums would lose the small decay between neighbours.
    total = g.double().cumsum(-1)
    hidden = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).float().masked_fill_(hidden, -torch.inf).exp_()
    grown, rest = total.float().exp()[..., None], (total[..., -1:] - total).float().exp()[..., None]
    pairs = (kq.flatten(3, 4) @ kq[:, :, :, 0].transpose(-1, -2)).unflatten(3, (2, size))[:, :, :, None]
    pairs = pairs * decay[..., None, :, :]
    # The solver reads only what lies below the diagonal.
    identity = torch.eye(size, device=v.device).expand_as(decay)
    mixed = pairs[..., 0, :, :] * beta[..., None]
    mix = torch.linalg.solve_triangular(mixed, identity, upper=False, unitriangular=True) * beta[..., None, :]
    keys = (kq[:, :, :, None, 0] * rest).flatten(1, 3).transpose(-1, -2)
    readers = (kq[:, :, :, None] * grown[..., None, :, :]).flatten(4, 5).flatten(1, 3)
    mix, scores, last = mix.flatten(1, 3), pairs[..., 1, :, :].flatten(1, 3), grown[..., -1:, :].flatten(1, 3)
    flat, out = state.flatten(0, 1), torch.empty_like(v)
    for c in range(len(v)):
        seen = torch.bmm(readers[c], flat)
        delta = torch.bmm(mix[c], v[c] - seen[:, :size])
        torch.baddbmm(seen[:, size:], scores[c], delta, out=out[c])
        flat.mul_(last[c]).baddbmm_(keys[c], delta)
    out = out.unflatten(1, (requests, heads)).permute(1, 0, 3, 2, 4)
    return out.flatten(1, 2)[:, :length]


def _cut(x: torch.Tensor, size: int) -> torch.Tensor:
    """[b, L, ...] as chunks [n, b, size, ...], the last one filled up with zeros.

    A token of zeros has no key, no beta and no decay: it leaves the state as it is.
    """
    missing = -x.shape[1] % size
    if missing:
        x = torch.cat((x, x.new_zeros(x.shape[0], missing, *x.shape[2:])), dim=1)
    return x.unflatten(1, (-1, size)).transpose(0, 1)
