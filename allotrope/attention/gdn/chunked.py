"""The gated delta rule at matrix-product speed: one step for a decode, chunks of tokens for a prefill.

In a chunk with G_i the sum of g up to its token i and S the state before it, for every value head:

    A_ij = beta_i (k_i . k_j) e^(G_i - G_j), j < i
    D = (I + A)^-1 beta (V - e^G K S)
    O = e^G Q S + [(q_i . k_j) e^(G_i - G_j), j <= i] D
    S <- e^(G_last) S + (e^(G_last - G) K)^T D

Exponents are formed as differences, which are never positive. Whatever does not need S, the inverse above all, is done
for all chunks at once. With a decay per channel, G and g are vectors: e^(G_i - G_j) then weights the channels inside of
k_i . k_j and q_i . k_j, and the other powers scale rows of K, Q and S. Source: Yang et al. 2024 (gated delta networks),
section 3.2.
"""

from __future__ import annotations

import torch

CHUNK = 32


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
    """One token, the state read once for keys and queries: o = (e^g S)^T q + (k . q) d.

    `q`, `k`: [b, nk, dk]. `v`: [b, nv, dv]. `g`: [b, nv, 1 or dk]. `beta`: [b, nv]. `state`: [b, nv, dk, dv]. Returns
    [b, nv, dv].
    """
    repeat = v.shape[1] // k.shape[1]
    kq = _spread(torch.stack((k, q), dim=2), repeat)
    flat = state.flatten(0, 1)
    decay = g.exp()
    seen = torch.bmm((kq * decay[:, :, None]).flatten(0, 1), flat).view(*v.shape[:2], 2, -1)
    delta = beta[..., None] * (v - seen[:, :, 0])
    flat.mul_(decay.flatten(0, 1)[..., None])
    flat.baddbmm_(kq[:, :, 0].reshape(len(flat), -1, 1), delta.view(len(flat), 1, -1))
    return torch.addcmul(seen[:, :, 1], _spread((k * q).sum(-1, keepdim=True), repeat), delta)


def _spread(x: torch.Tensor, repeat: int) -> torch.Tensor:
    """[b, nk, ...] as [b, nk * repeat, ...], each key head for its value heads."""
    return x if repeat == 1 else x.unsqueeze(2).expand(-1, -1, repeat, *x.shape[2:]).flatten(1, 2)


def _chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    requests, length, heads, _ = v.shape
    groups, by_channel = k.shape[2], g.shape[-1] > 1
    size = min(CHUNK, _power_of_two(length) if by_channel else length)
    # Chunks come first, so that each is one contiguous batch of matrices; the R value heads of a key head stay apart.
    kq = torch.stack([_cut(t, size).transpose(2, 3) for t in (k, q)], dim=3)
    v = _cut(v, size).transpose(2, 3).flatten(1, 2).contiguous()
    g, beta = (_cut(t, size).transpose(2, 3).contiguous().unflatten(2, (groups, -1)) for t in (g, beta))
    # In double, or the difference of two large sums would lose the small decay between neighbours.
    total = g.double().cumsum(-2)
    grown, rest = total.float().exp(), (total[..., -1:, :] - total).float().exp()
    pairs = _pairs_by_channel(kq, g) if by_channel else _pairs_by_head(kq, total)
    # The solver reads only what lies below the diagonal.
    mixed = pairs[..., 0, :, :] * beta[..., None]
    identity = torch.eye(size, dtype=torch.float32, device=v.device).expand_as(mixed)
    mix = torch.linalg.solve_triangular(mixed, identity, upper=False, unitriangular=True) * beta[..., None, :]
    keys = (kq[:, :, :, None, 0] * rest).flatten(1, 3).transpose(-1, -2)
    readers = (kq[:, :, :, None] * grown[..., None, :, :]).flatten(4, 5).flatten(1, 3)
    mix, scores, last = mix.flatten(1, 3), pairs[..., 1, :, :].flatten(1, 3), grown[..., -1, :, None].flatten(1, 3)
    flat, out = state.flatten(0, 1), torch.empty_like(v)
    for c in range(len(v)):
        seen = torch.bmm(readers[c], flat)
        delta = torch.bmm(mix[c], v[c] - seen[:, :size])
        torch.baddbmm(seen[:, size:], scores[c], delta, out=out[c])
        flat.mul_(last[c]).baddbmm_(keys[c], delta)
    out = out.unflatten(1, (requests, heads)).permute(1, 0, 3, 2, 4)
    return out.flatten(1, 2)[:, :length]


def _pairs_by_head(kq: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """(k_i . k_j) e^(G_i - G_j) and (q_i . k_j) e^(G_i - G_j), j <= i; 0 for later j.

    `kq`: [n, b, nk, 2, size, dk]. `total`: [n, b, nk, R, size, 1], G. Returns [n, b, nk, R, 2, size, size].
    """
    size = total.shape[-2]
    hidden = torch.ones(size, size, dtype=torch.bool, device=kq.device).triu(1)
    decay = (total - total.transpose(-1, -2)).float().masked_fill_(hidden, -torch.inf).exp_()
    pairs = (kq.flatten(3, 4) @ kq[:, :, :, 0].transpose(-1, -2)).unflatten(3, (2, size))[:, :, :, None]
    return pairs * decay[..., None, :, :]


def _pairs_by_channel(kq: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The sums over channels c of k_ic k_jc e^(G_ic - G_jc) and q_ic k_jc e^(G_ic - G_jc), j <= i; 0 for later j.

    With m the last token of a block's first half, e^(G_i - G_j) = e^(G_i - G_m) e^(G_m - G_j) for j in that half and i
    in the other: one matrix product for all of them. Blocks of 2, 4, 8, ... tokens meet every pair once. Both factors
    are products of e^g, never above 1, and are carried from one block size to the next.

    `kq`: [n, b, nk, 2, size, dk], size a power of two. `g`: [n, b, nk, R, size, dk]. Returns as `_pairs_by_head`.
    """
    size = g.shape[-2]
    rows = kq[:, :, :, None].transpose(-3, -2).contiguous()
    pairs = rows.new_zeros(*g.shape[:-1], 2, size)
    pairs.diagonal(dim1=-3, dim2=-1).copy_((rows * rows[..., :1, :]).sum(-1).transpose(-1, -2))
    # Decay of each channel from its block's first token up to each, and behind each up to its block's last.
    since, until = g.exp(), torch.ones_like(g)
    half = 1
    while half < size:
        block = (-1, 2 * half)
        tokens, before, behind = rows.unflatten(-3, block), since.unflatten(-2, block), until.unflatten(-2, block)
        early = tokens[..., :half, 0, :] * behind[..., :half, :]
        late = (tokens[..., half:, :, :] * before[..., half:, None, :]).flatten(-3, -2)
        found = (late @ early.transpose(-1, -2)).unflatten(-2, (half, 2)).movedim(-4, -1)
        below = pairs.unflatten(-3, block).unflatten(-1, block)[..., half:, :, :, :half]
        below.diagonal(dim1=-5, dim2=-2).copy_(found)
        behind[..., :half, :] *= before[..., -1:, :]
        before[..., half:, :] *= before[..., half - 1 : half, :]
        half *= 2
    return pairs.transpose(-3, -2)


def _power_of_two(length: int) -> int:
    """The smallest one that is not below `length`."""
    return 1 << (length - 1).bit_length()


def _cut(x: torch.Tensor, size: int) -> torch.Tensor:
    """[b, L, ...] as chunks [n, b, size, ...], the last one filled up with zeros.

    A token of zeros has no key, no beta and no decay: it leaves the state as it is.
    """
    missing = -x.shape[1] % size
    if missing:
        x = torch.cat((x, x.new_zeros(x.shape[0], missing, *x.shape[2:])), dim=1)
    return x.unflatten(1, (-1, size)).transpose(0, 1)
