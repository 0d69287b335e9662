"""Cases of the all-reduce: each protocol, ranks of no power of two, rows that fill no block, all that may follow.

The ranks are all in one process, with workspaces so small that the number of rows decides on the protocol.
"""

from __future__ import annotations

from functools import partial

import torch

from allotrope.kernels.symmetric_memory import Communicator, local_workspaces
from allotrope.ops.all_reduce import AllReduceSpec
from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.rms_norm.reference import add_rms_norm

FLOOR, SIZE, PROGRAMS = 0.25, 72, 2
# Ranks and rows: as many rows as programs go by LL, a few more one-shot, those that take all the room two-shot.
SHAPES = {"ll": (3, 2), "one-shot": (2, 4), "two-shot": (4, 8)}


def communicators(ranks: int, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> list[Communicator]:
    """The ranks of one process, with room for `rows` rows."""
    row_bytes = size * dtype.itemsize
    workspaces = local_workspaces(ranks, row_bytes, device, PROGRAMS, rows * row_bytes)
    return [Communicator(rank, ranks, workspace=one) for rank, one in enumerate(workspaces)]


def _sum(
    ranks: int, rows: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    draw = Draw(generator, device)
    return communicators(ranks, rows, 4096, dtype, device), [draw(dtype, rows, 4096 // 2) for _ in range(ranks)]


def _add_norm(
    ranks: int,
    rows: int,
    inner: bool,
    scale: bool,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[object, ...]:
    draw = Draw(generator, device)
    parts = [draw(dtype, rows, SIZE) for _ in range(ranks)]
    residual, weight = draw(dtype, rows, 2 * SIZE)[:, :SIZE], draw(torch.float32, SIZE)
    inner_weight, factor = draw(torch.float32, SIZE) if inner else None, draw(dtype, 1) if scale else None
    comms = communicators(ranks, rows, SIZE, dtype, device)
    return comms, parts, residual, weight, FLOOR, inner_weight, factor, add_rms_norm


def _spec(size: int, ranks: int, dtype: torch.dtype) -> AllReduceSpec:
    return AllReduceSpec(size, dtype, ranks)


CASES: Cases = {
    "all_reduce": {
        name: OpCase(partial(_spec, 2048, ranks), partial(_sum, ranks, rows)) for name, (ranks, rows) in SHAPES.items()
    },
    "all_reduce_add_rms_norm": {
        f"{name}, {what}": OpCase(partial(_spec, SIZE, ranks), partial(_add_norm, ranks, rows, inner, scale))
        for name, (ranks, rows) in SHAPES.items()
        for what, inner, scale in (("plain", False, False), ("normed before and scaled", True, True))
    },
}
