"""What data-parallel ranks exchange: each one's rows to all ranks, and the sum over the ranks back to the rows' own.

    all_gather       y = rows of rank 0, rows of rank 1, ...
    reduce_scatter   y = sum over r of part_r, this rank's rows of it

Kernels send decode-sized messages through the ranks' memory, by the protocols of the all-reduce; the process group's
collectives send longer ones. Ranks map memory where the all-reduce has a kernel for their sums, so that what speaks
against that one speaks against these.
"""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.ops.all_gather_reduce_scatter import reference
from allotrope.ops.all_reduce import triton_rejects

ALL_GATHER = Op(
    "all_gather",
    "y = the rows of all ranks",
    (
        Backend("triton", triton_rejects, lazily("allotrope.ops.all_gather_reduce_scatter.triton", "all_gather")),
        Backend("reference", runs_anywhere, reference.all_gather),
    ),
)
REDUCE_SCATTER = Op(
    "reduce_scatter",
    "y = this rank's rows of the sum of the ranks' parts",
    (
        Backend("triton", triton_rejects, lazily("allotrope.ops.all_gather_reduce_scatter.triton", "reduce_scatter")),
        Backend("reference", runs_anywhere, reference.reduce_scatter),
    ),
)
