"""The gated delta rule in chunked form, by matrix products; a decode is one recurrent step.

In a chunk with G_i the cumulative sum of g up to its token i and S the state before it, for every value head:

    A_ij = beta_i (k_i . k_j) e^(G_i - G_j), j < i
    D = (I + A)^-1 beta (V - e^G K S)
    O = e^G Q S + [(q_i . k_j) e^(G_i - G_j), j <= i] D
    S <- e^(G_last) S + (e^(G_last - G) K)^T D

Exponents are differences, which are never positive. The matrices that do not depend on S, such as the inverse (the WY
representation), are computed for all chunks at once. With a decay per channel, G and g are vectors: e^(G_i - G_j) then
weights the channels inside of k_i . k_j and q_i . k_j, and the other powers scale rows of K, Q and S. Source: Yang et
al. 2024 (gated delta networks), section 3.2.
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
    return _chunked(q, k, v, g, beta, state)


def _step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """One token, the state read once for keys and queries: o = (e^g S)^T q + (k . q) d.

    `q`, `k`: [b, nk, dk]. `v`: [b, nv, dv]. `g`: [b, nv, 1 or dk]. `beta`: [b, nv]. `state`: [b, nv, dk, dv]. Returns
    [b, nv, dv].
    """
    values_per_key = v.shape[1] // k.shape[1]
    kq = _repeat_heads(torch.stack((k, q), dim=2), values_per_key)
    flat = state.flatten(0, 1)
    decay = g.exp()
    kq_state = torch.bmm((kq * decay[:, :, None]).flatten(0, 1), flat).view(*v.shape[:2], 2, -1)
    delta = beta[..., None] * (v - kq_state[:, :, 0])
    flat.mul_(decay.flatten(0, 1)[..., None])
    flat.baddbmm_(kq[:, :, 0].reshape(len(flat), -1, 1), delta.view(len(flat), 1, -1))
    return torch.addcmul(kq_state[:, :, 1], _repeat_heads((k * q).sum(-1, keepdim=True), values_per_key), delta)


def _repeat_heads(x: torch.Tensor, values_per_key: int) -> torch.Tensor:
    """[b, nk, ...] as [b, nk * repeat, ...], each key head for its value heads."""
    return x if values_per_key == 1 else x.unsqueeze(2).expand(-1, -1, values_per_key, *x.shape[2:]).flatten(1, 2)


def _chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    requests, length, heads, _ = v.shape
    key_heads, by_channel = k.shape[2], g.shape[-1] > 1
    size = min(CHUNK, _power_of_two(length) if by_channel else length)
    # Chunks are the first dimension, so that each is one contiguous batch of matrices. The R value heads of a key head
    # have a dimension of their own.
    kq = torch.stack([_to_chunks(t, size).transpose(2, 3) for t in (k, q)], dim=3)
    v = _to_chunks(v, size).transpose(2, 3).flatten(1, 2).contiguous()
    g, beta = (_to_chunks(t, size).transpose(2, 3).contiguous().unflatten(2, (key_heads, -1)) for t in (g, beta))
    # In float64: in fp32 the difference of two large sums would lose the small decay between neighbours.
    g_cumsum = g.double().cumsum(-2)
    exp_g, decay_to_end = g_cumsum.float().exp(), (g_cumsum[..., -1:, :] - g_cumsum).float().exp()
    intra = _intra_chunk_by_channel(kq, g) if by_channel else _intra_chunk(kq, g_cumsum)
    # The solver reads only the entries below the diagonal.
    A = intra[..., 0, :, :] * beta[..., None]
    identity = torch.eye(size, dtype=torch.float32, device=v.device).expand_as(A)
    Akk_inv = torch.linalg.solve_triangular(A, identity, upper=False, unitriangular=True) * beta[..., None, :]
    k_to_end = (kq[:, :, :, None, 0] * decay_to_end).flatten(1, 3).transpose(-1, -2)
    kq_exp_g = (kq[:, :, :, None] * exp_g[..., None, :, :]).flatten(4, 5).flatten(1, 3)
    Akk_inv, Aqk, exp_g_last = (
        Akk_inv.flatten(1, 3),
        intra[..., 1, :, :].flatten(1, 3),
        exp_g[..., -1, :, None].flatten(1, 3),
    )
    flat, out = state.flatten(0, 1), torch.empty_like(v)
    for c in range(len(v)):
        kq_state = torch.bmm(kq_exp_g[c], flat)
        delta = torch.bmm(Akk_inv[c], v[c] - kq_state[:, :size])
        torch.baddbmm(kq_state[:, size:], Aqk[c], delta, out=out[c])
        flat.mul_(exp_g_last[c]).baddbmm_(k_to_end[c], delta)
    out = out.unflatten(1, (requests, heads)).permute(1, 0, 3, 2, 4)
    return out.flatten(1, 2)[:, :length]


def _intra_chunk(kq: torch.Tensor, g_cumsum: torch.Tensor) -> torch.Tensor:
    """(k_i . k_j) e^(G_i - G_j) and (q_i . k_j) e^(G_i - G_j), j <= i; 0 for later j.

    `kq`: [n, b, nk, 2, size, dk]. `g_cumsum`: [n, b, nk, R, size, 1], G. Returns [n, b, nk, R, 2, size, size].
    """
    size = g_cumsum.shape[-2]
    above_diagonal = torch.ones(size, size, dtype=torch.bool, device=kq.device).triu(1)
    decay = (g_cumsum - g_cumsum.transpose(-1, -2)).float().masked_fill_(above_diagonal, -torch.inf).exp_()
    intra = (kq.flatten(3, 4) @ kq[:, :, :, 0].transpose(-1, -2)).unflatten(3, (2, size))[:, :, :, None]
    return intra * decay[..., None, :, :]


def _intra_chunk_by_channel(kq: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The sums over channels c of k_ic k_jc e^(G_ic - G_jc) and q_ic k_jc e^(G_ic - G_jc), j <= i; 0 for later j.

    With m the last token of a block's first half, e^(G_i - G_j) = e^(G_i - G_m) e^(G_m - G_j) for j in that half and i
    in the other: one matrix product for all of them. Blocks of 2, 4, 8, ... tokens give every pair once. Both factors
    are products of e^g, at most 1, and are updated from one block size to the next.

    `kq`: [n, b, nk, 2, size, dk], size a power of two. `g`: [n, b, nk, R, size, dk]. Returns as `_intra_chunk`.
    """
    size = g.shape[-2]
    rows = kq[:, :, :, None].transpose(-3, -2).contiguous()
    intra = rows.new_zeros(*g.shape[:-1], 2, size)
    intra.diagonal(dim1=-3, dim2=-1).copy_((rows * rows[..., :1, :]).sum(-1).transpose(-1, -2))
    # Decay of each channel from its block's start up to each token, and after each token up to its block's end.
    from_start, to_end = g.exp(), torch.ones_like(g)
    half = 1
    while half < size:
        block_shape = (-1, 2 * half)
        blocks, block_from_start, block_to_end = (
            rows.unflatten(-3, block_shape),
            from_start.unflatten(-2, block_shape),
            to_end.unflatten(-2, block_shape),
        )
        early = blocks[..., :half, 0, :] * block_to_end[..., :half, :]
        late = (blocks[..., half:, :, :] * block_from_start[..., half:, None, :]).flatten(-3, -2)
        products = (late @ early.transpose(-1, -2)).unflatten(-2, (half, 2)).movedim(-4, -1)
        below = intra.unflatten(-3, block_shape).unflatten(-1, block_shape)[..., half:, :, :, :half]
        below.diagonal(dim1=-5, dim2=-2).copy_(products)
        block_to_end[..., :half, :] *= block_from_start[..., -1:, :]
        block_from_start[..., half:, :] *= block_from_start[..., half - 1 : half, :]
        half *= 2
    return intra.transpose(-3, -2)


def _power_of_two(length: int) -> int:
    """The smallest power of two that is not below `length`."""
    return 1 << (length - 1).bit_length()


def _to_chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """[b, L, ...] as chunks [n, b, size, ...], the last one padded with zeros.

    A token of zeros has key, beta and g zero, and does not change the state.
    """
    padding = -x.shape[1] % size
    if padding:
        x = torch.cat((x, x.new_zeros(x.shape[0], padding, *x.shape[2:])), dim=1)
    return x.unflatten(1, (-1, size)).transpose(0, 1)
