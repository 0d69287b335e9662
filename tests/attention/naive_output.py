"""What a case's sequences give by their family's definition, `naive.py`."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from allotrope.attention.check import Case, Inputs


def naive_results(case: Case, dtype: torch.dtype = torch.float64, inputs: Inputs | None = None) -> list[Any]:
    """What `naive` of the case's family returns for each sequence, computed in `dtype` from the case's inputs.

    `naive` has the arguments of a backend's `run` without plan and caches. `inputs`: in place of the case's own.
    """
    naive = importlib.import_module(f"allotrope.attention.{case.spec.family}.naive").naive
    given = inputs or case.inputs()

    def widened(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: t if t is None or not t.is_floating_point() else t.to(dtype) for name, t in tensors.items()}

    tokens, layer = widened(given.tokens), widened(given.layer)
    sequences = zip(*(t.split(case.lengths) for t in tokens.values()), strict=True)
    return [naive(case.spec, **dict(zip(tokens, one, strict=True)), **layer) for one in sequences]


def naive_output(case: Case, dtype: torch.dtype = torch.float64, inputs: Inputs | None = None) -> torch.Tensor:
    """[N, ...], every token's output, sequence after sequence, as `Replay.play` returns it."""
    results = naive_results(case, dtype, inputs)
    return torch.cat([result[0] if isinstance(result, tuple) else result for result in results])
