"""The sum of the ranks' parts, alone or with the residual sum and the norm that follow it.

    y = sum over r of part_r
    s = (residual + y) * scale; norm(s)

Kernels send the parts through the ranks' memory; `protocol.py` says how, by the size of the message, and when the
process group's collective does it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.chip import Chip
from allotrope.kernels.symmetric_memory import symmetric_memory_reasons
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.all_reduce import reference

# Longer rows do not fit into the registers of a block.
MAX_SIZE = 8192
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AllReduceSpec:
    """`size`: of a row. `dtype`: of the parts. `ranks`: whose parts are summed. `unreachable`: why a rank cannot write
    into its peers' memory; empty if nothing is known against it."""

    size: int
    dtype: torch.dtype
    ranks: int
    unreachable: tuple[str, ...] = ()


def triton_rejects(spec: AllReduceSpec, chip: Chip) -> list[str]:
    """Why kernels cannot sum, and ranks map no memory for it."""
    reasons = [*needs_triton(spec, chip), *spec.unreachable]
    if not reasons:
        reasons += symmetric_memory_reasons(spec.ranks)
    if spec.dtype not in _DTYPES:
        reasons.append(f"dtype={spec.dtype} (needs one of {', '.join(map(str, _DTYPES))})")
    if spec.size > MAX_SIZE:
        reasons.append(f"size={spec.size} (needs {MAX_SIZE} or less)")
    return reasons


def _rows_rejects(spec: AllReduceSpec, chip: Chip) -> list[str]:
    reasons = triton_rejects(spec, chip)
    if spec.size * spec.dtype.itemsize % 16:
        reasons.append(f"size={spec.size} in {spec.dtype} (needs rows of a multiple of 16 bytes)")
    return reasons


ALL_REDUCE = Op(
    "all_reduce",
    "y = sum of the ranks' parts",
    (
        Backend("triton", triton_rejects, lazily("allotrope.ops.all_reduce.triton", "all_reduce")),
        Backend("reference", runs_anywhere, reference.all_reduce),
    ),
)
ALL_REDUCE_ADD_RMS_NORM = Op(
    "all_reduce_add_rms_norm",
    "s = (residual + sum of the ranks' parts) * scale; y = norm(s)",
    (
        Backend("triton", _rows_rejects, lazily("allotrope.ops.all_reduce.triton", "all_reduce_add_rms_norm")),
        Backend("reference", runs_anywhere, reference.all_reduce_add_rms_norm),
    ),
)
