"""Cases of the exchange of rows: each protocol, ranks of no power of two, messages that fill no block.

The ranks are all in one process, with workspaces so small that the number of rows decides on the protocol.
"""

from __future__ import annotations

from functools import partial

import torch

from allotrope.ops.all_reduce import AllReduceSpec
from allotrope.ops.all_reduce.cases import communicators
from allotrope.ops.all_reduce.protocol import FLAT_BYTES
from allotrope.ops.case import Cases, Draw, OpCase

SIZE = 520
# Ranks, and rows of each: blocks of as many as there are programs go by LL, more of them one-shot.
SHAPES = {"ll": (3, 3), "one-shot": (2, 12)}


def _gather(
    ranks: int, rows: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    draw = Draw(generator, device)
    return _ranks(ranks, device), [draw(dtype, rows, SIZE) for _ in range(ranks)]


def _scatter(
    ranks: int, rows: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    draw = Draw(generator, device)
    return _ranks(ranks, device), [draw(dtype, ranks * rows, SIZE) for _ in range(ranks)]


def _ranks(ranks: int, device: torch.device) -> object:
    return communicators(ranks, 12, FLAT_BYTES // 4, torch.float32, device)


def _spec(ranks: int, dtype: torch.dtype) -> AllReduceSpec:
    return AllReduceSpec(SIZE, dtype, ranks)


CASES: Cases = {
    name: {
        protocol: OpCase(partial(_spec, ranks), partial(make, ranks, rows))
        for protocol, (ranks, rows) in SHAPES.items()
    }
    for name, make in (("all_gather", _gather), ("reduce_scatter", _scatter))
}
