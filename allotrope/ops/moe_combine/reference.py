"""The sum in PyTorch: what kernels are held against."""

from __future__ import annotations

import torch


def combine(
    results: torch.Tensor,
    weights: torch.Tensor,
    inverse: torch.Tensor,
    experts: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    held: int | None = None,
) -> torch.Tensor:
    """y[t] = sum over k of w[t, k] * (results[inverse[t, k]] + bias[experts[t, k]]) + shared[t] * sigmoid(gate[t]).

    `results`: [n, hidden]. `weights`: [T, K] fp32. `inverse`: [T * K] row of each pair. `experts`: [T, K].
    `dtype`: of y. `bias`: [E, hidden]. `shared`: [T, hidden]. `gate`: [T, 1]; without it shared counts whole. `held`:
    number of the experts that are here: choices of others count nothing, and their rows are not read. Returns y
    [T, hidden].
    """
    if held is not None:
        mine = experts < held
        weights, experts = torch.where(mine, weights, 0.0), torch.where(mine, experts, 0)
        # A row of zeros for all others.
        inverse = torch.where(mine.flatten(), inverse, len(results))
        results = torch.cat([results, results.new_zeros(1, results.shape[1])])
    # Reading rows in another order is several times faster than writing them so.
    back = results.index_select(0, inverse)
    y = torch.bmm(weights[:, None], back.float().unflatten(0, experts.shape)).squeeze(1)
    if bias is not None:
        # Each token's mix of the biases of its experts.
        shares = weights.new_zeros(len(weights), len(bias)).scatter_add_(1, experts, weights)
        y += shares @ bias.float()
    return add_shared(y.to(dtype), shared, gate)


def add_shared(y: torch.Tensor, shared: torch.Tensor | None, gate: torch.Tensor | None) -> torch.Tensor:
    """y + shared * sigmoid(gate), in y's type."""
    if shared is None:
        return y
    return y + (shared if gate is None else shared * torch.sigmoid(gate))
