"""A side stream: on a GPU, small products overlap large ones, which wait for their weights.

Owns that stream, and which stream waits for which. Must not know what is computed. Work on it begins after all that was
launched before it, and ends before its result is handed out: memory may be used again as if there were one stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

# Tokens up to which a product leaves room on a GPU for another.
MAX_OVERLAPPED_TOKENS = 256


def overlap(work: Callable[[], T], rows: torch.Tensor) -> Callable[[], T]:
    """Launch `work()`, which reads `rows`, on the side stream. Returns a function that waits for its result: call it
    once, on the same stream.

    On a CPU, and for many rows, `work` runs only then, in the caller's stream.
    """
    if not rows.is_cuda or len(rows) > MAX_OVERLAPPED_TOKENS:
        return work
    stream = _side(rows.device)
    stream.wait_stream(torch.cuda.current_stream(rows.device))
    with torch.cuda.stream(stream):
        result = work()

    def wait() -> T:
        torch.cuda.current_stream(rows.device).wait_stream(stream)
        return result

    return wait


def on_side_stream(device: torch.device) -> bool:
    """Whether the current stream is the side stream: a launch then needs scratch memory of its own."""
    return device.type == "cuda" and torch.cuda.current_stream(device) == _side(device)


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
