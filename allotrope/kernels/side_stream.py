"""Work beside other work: on a GPU, small products run on a stream of their own while large ones read their weights.

Owns that stream, and who waits for whom. Must not know what is computed. Whatever runs there begins after all that was
asked for before it, and ends before its result is handed out: memory may be used again as if there were one stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

# Rows up to which a product leaves room on a GPU for another.
FEW_ROWS = 256


def beside(work: Callable[[], T], rows: torch.Tensor) -> Callable[[], T]:
    """Begin `work()`, which reads `rows`. Returns what waits for its result: call it once, on the same stream.

    On a CPU, and of many rows, it is not begun before its result is wanted.
    """
    if not rows.is_cuda or len(rows) > FEW_ROWS:
        return work
    stream = _side(rows.device)
    stream.wait_stream(torch.cuda.current_stream(rows.device))
    with torch.cuda.stream(stream):
        result = work()

    def wait() -> T:
        torch.cuda.current_stream(rows.device).wait_stream(stream)
        return result

    return wait


def is_beside(device: torch.device) -> bool:
    """Whether what is asked for now runs beside other work: it then needs scratch memory of its own."""
    return device.type == "cuda" and torch.cuda.current_stream(device) == _side(device)


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
