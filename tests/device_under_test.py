"""Where things are tested: on GPUs if there are enough, else on the CPU, kernels in Triton's interpreter."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def device_of_ranks(ranks: int) -> str:
    """The `device` option of an engine of several ranks, and of one that it is compared with."""
    return "cuda" if torch.cuda.device_count() >= ranks else "cpu"
