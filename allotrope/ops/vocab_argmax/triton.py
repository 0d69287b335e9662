"""The best column of a row, by the kernels of sampling: a row is read in segments by many programs."""

from __future__ import annotations

import torch

from allotrope.kernels.tiles import cdiv
from allotrope.ops.logprobs.triton import SEGMENT
from allotrope.ops.sampling.triton import greedy_kernel, peaks_kernel


def best(logits: torch.Tensor) -> torch.Tensor:
    """As `reference.best`; rows have any stride."""
    size, columns = logits.shape
    assert logits.stride(1) == 1
    segments = cdiv(columns, SEGMENT)
    peaks = logits.new_empty((size, segments), dtype=torch.int64)
    peaks_kernel[(size, segments)](logits, peaks, columns, logits.stride(0), segments, SEGMENT=SEGMENT, num_warps=8)
    return peaks.amax(-1)


def token(best: torch.Tensor, columns: int) -> torch.Tensor:
    """As `reference.token`."""
    out = torch.empty_like(best)
    greedy_kernel[(len(best),)](best, out, columns, 1, SEGMENTS=1, num_warps=1)
    return out
