"""The all-reduce by PyTorch: of ranks in processes of their own by their group's collective (NCCL, gloo).

Of ranks that are all in one process it is what kernels are held against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from allotrope.kernels.symmetric_memory import Communicator
from allotrope.kernels.warmup import warming_up

AddNorm = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""As `rms_norm.reference.add_rms_norm`."""


def all_reduce(ranks: Sequence[Communicator], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """y = sum of the parts of all ranks.

    `ranks`: those that this process runs, all or one. `parts`: of each, equal shapes and types; they may be
    overwritten. Returns y of each of `ranks`, in the parts' type: kernels, and ranks that are all here, sum in fp32 in
    rank order and round once, a group's collective sums in its own order. Every rank gets the same bits.
    """
    if len(ranks) < ranks[0].size:
        (rank,), (part,) = ranks, parts
        # Each rank warms up by itself.
        if warming_up():
            return [part]
        if rank.host_all_reduce is not None:
            return [rank.host_all_reduce(part)]
        dist.all_reduce(part, group=rank.group)
        return [part]
    total = torch.zeros(parts[0].shape, dtype=torch.float32, device=parts[0].device)
    for part in parts:
        total += part.float()
    return [total.to(part.dtype) for part in parts]


def all_reduce_add_rms_norm(
    ranks: Sequence[Communicator],
    parts: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    floor: float,
    inner: torch.Tensor | None,
    scale: torch.Tensor | None,
    add_norm: AddNorm,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """s = (residual + y) * scale and norm(s), with y as `all_reduce` returns it.

    `parts`: [T, size] each. `add_norm`: what computes both where the sum is made apart. The rest as in
    `rms_norm.reference.add_rms_norm`. Returns s and norm(s) of each of `ranks`.
    """
    return [add_norm(y, residual, weight, floor, inner, scale) for y in all_reduce(ranks, parts)]
