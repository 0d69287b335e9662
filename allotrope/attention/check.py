"""Is an output of attention right? Small named cases of every family, and the comparison of `kernels/tolerance.py`.

for case in cases("mha"):
    want = Replay(case, reference).play(whole(case.lengths))
    got = ...the same inputs through another engine
    assert compare(got, want, "fp32")
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from allotrope.attention.family import Spec
from allotrope.attention.registry import FAMILIES
from allotrope.kernels.tolerance import KINDS, ROW_FLOOR, SPARE, TOLERANCES, Comparison, Tolerance, compare

__all__ = [
    "KINDS",
    "ROW_FLOOR",
    "SPARE",
    "TOLERANCES",
    "Case",
    "Comparison",
    "Inputs",
    "Tolerance",
    "cases",
    "compare",
]


@dataclass(frozen=True)
class Inputs:
    """What one layer is fed.

    `tokens`: argument name -> [N, ...], all tokens of all sequences, sequence after sequence. `layer`: argument name
    -> tensor that belongs to the layer (sinks, weights), or None.
    """

    tokens: dict[str, torch.Tensor]
    layer: dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Case:
    """One layer and a few sequences for it.

    `lengths`: tokens of each sequence. `draw(spec, N, generator)`: makes the inputs. `page_size`: tokens per page.
    """

    name: str
    spec: Spec
    lengths: tuple[int, ...]
    draw: Callable[..., Inputs]
    dtype: torch.dtype
    page_size: int = 16

    def inputs(self, seed: int = 0) -> Inputs:
        """The case's tensors on the CPU, in `dtype`; equal for equal seeds."""
        return self.draw(self.spec, sum(self.lengths), torch.Generator().manual_seed(seed), self.dtype)

    @property
    def kind(self) -> str:
        """The row of `TOLERANCES` that its output is judged by."""
        return KINDS[self.dtype]


def cases(family: str, dtype: torch.dtype = torch.float32) -> dict[str, Case]:
    """Small cases of a family by name, with inputs and cached rows of `dtype`; each family folder has a `cases.py`.

    Raises KeyError for a family that does not exist.
    """
    module = importlib.import_module(f"allotrope.attention.{FAMILIES[family].name}.cases")
    return {case.name: case for case in module.cases(dtype)}
