"""What data-parallel ranks exchange: each one's rows to all ranks, and the sum over the ranks back to the rows' own.

    all_gather       y = rows of rank 0, rows of rank 1, ...
    reduce_scatter   y = sum over r of part_r, this rank's rows of it

Kernels send decode-sized messages through the ranks' memory, by the protocols of the all-reduce; the process group's
collectives send longer ones.
"""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.chip import Chip
from allotrope.kernels.symmetric_memory import symmetric_memory_reasons
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.all_gather_reduce_scatter import reference
from allotrope.ops.all_reduce import MAX_SIZE, SUMMED_DTYPES, AllReduceSpec


def _gather_rejects(spec: AllReduceSpec, chip: Chip) -> list[str]:
    reasons = [*needs_triton(spec, chip), *spec.unreachable]
    if not reasons:
        reasons += symmetric_memory_reasons(spec.ranks)
    if spec.size > MAX_SIZE:
        reasons.append(f"size={spec.size} (needs {MAX_SIZE} or less: for longer rows the ranks map no memory)")
    return reasons


def _scatter_rejects(spec: AllReduceSpec, chip: Chip) -> list[str]:
    reasons = _gather_rejects(spec, chip)
    if spec.dtype not in SUMMED_DTYPES:
        reasons.append(f"dtype={spec.dtype} (needs one of {', '.join(map(str, SUMMED_DTYPES))})")
    return reasons


ALL_GATHER = Op(
    "all_gather",
    "y = the rows of all ranks",
    (
        Backend("triton", _gather_rejects, lazily("allotrope.ops.all_gather_reduce_scatter.triton", "all_gather")),
        Backend("reference", runs_anywhere, reference.all_gather),
    ),
)
REDUCE_SCATTER = Op(
    "reduce_scatter",
    "y = this rank's rows of the sum of the ranks' parts",
    (
        Backend("triton", _scatter_rejects, lazily("allotrope.ops.all_gather_reduce_scatter.triton", "reduce_scatter")),
        Backend("reference", runs_anywhere, reference.reduce_scatter),
    ),
)
