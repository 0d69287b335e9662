"""Cases of sampling: greedy, drawn from all tokens and from the best; several segments of a vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.sampling.spec import RandomRows, SamplingSpec, SamplingStep

ROWS, VOCABULARY = 4, 5000
NUMBERS: dict[str, dict[str, Any] | None] = {
    "greedy": None,
    "untruncated": {},
    "min-p": {"min_p": 0.05, "temperature": 0.7},
    "top-k": {"top_k": 40},
    "top-p": {"top_p": 0.9},
    "top-k, top-p and min-p": {"top_k": 100, "top_p": 0.95, "min_p": 0.02},
}


def _spec(dtype: torch.dtype) -> SamplingSpec:
    return SamplingSpec(VOCABULARY)


def _make(
    numbers: dict[str, Any] | None, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    logits = 3 * Draw(generator, device)(dtype, ROWS, VOCABULARY)
    every = torch.arange(ROWS, device=device)
    if numbers is None:
        return logits, SamplingStep(greedy=every)

    def column(name: str, default: float, kind: torch.dtype) -> torch.Tensor:
        return torch.full((ROWS, 1), numbers.get(name, default), dtype=kind, device=device)

    random = RandomRows(
        rows=every,
        temperature=column("temperature", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float64) if "min_p" in numbers else None,
        top_p=column("top_p", 1.0, torch.float64),
        top_k=column("top_k", 0, torch.int64),
        uniform=torch.rand(ROWS, 1, dtype=torch.float64, generator=generator).to(device),
        top_ks=(numbers.get("top_k", 0),) * ROWS,
    )
    if {"top_k", "top_p"} & set(numbers):
        return logits, SamplingStep(greedy=None, truncated=random)
    return logits, SamplingStep(greedy=None, untruncated=random)


CASES: Cases = {
    "sampling": {
        name: OpCase(_spec, partial(_make, numbers), dtypes=(torch.float32,)) for name, numbers in NUMBERS.items()
    }
}
