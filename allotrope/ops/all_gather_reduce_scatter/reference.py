"""The exchange of rows by PyTorch: of ranks in processes of their own by their group's collectives (NCCL, gloo).

Of ranks that are all in one process it is what kernels are held against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from allotrope.kernels.symmetric_memory import Communicator
from allotrope.kernels.warmup import warming_up

# By their names of today; older versions of PyTorch have the second.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(ranks: Sequence[Communicator], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of all ranks, in the order of the ranks.

    `ranks`: those that this process runs, all or one. `parts`: of each, [T, ...], equal shapes and types. Returns
    [ranks * T, ...] of each of `ranks`.
    """
    if len(ranks) == ranks[0].size:
        return [torch.cat(list(parts)) for _ in ranks]
    (rank,), (part,) = ranks, parts
    out = part.new_empty(rank.size * len(part), *part.shape[1:])
    if warming_up():
        # Each rank warms up by itself.
        out.view(rank.size, *part.shape).copy_(part)
    else:
        _all_gather(out, part.contiguous(), group=rank.group)
    return [out]


def reduce_scatter(ranks: Sequence[Communicator], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sum over the ranks of each rank's rows.

    `ranks`: as in `all_gather`. `parts`: of each, [ranks * T, ...], the rows of all ranks in their order. Returns the
    sum of its own rows [T, ...] of each of `ranks`, in the parts' type: kernels, and ranks that are all here, sum in
    fp32 in rank order and round once, a group's collective sums in its own order.
    """
    if len(ranks) == ranks[0].size:
        total = torch.zeros(parts[0].shape, dtype=torch.float32, device=parts[0].device)
        for part in parts:
            total += part.float()
        rows = total.to(parts[0].dtype).chunk(len(ranks))
        return [rows[rank.rank].clone() for rank in ranks]
    (rank,), (part,) = ranks, parts
    out = part.new_empty(len(part) // rank.size, *part.shape[1:])
    if warming_up():
        out.copy_(part[: len(out)])
    else:
        _reduce_scatter(out, part.contiguous(), group=rank.group)
    return [out]
