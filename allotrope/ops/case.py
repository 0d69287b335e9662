"""Small named cases of an operation: what tests and `verify` run every backend of it with.

Each folder's `cases.py` holds `CASES`: name of the operation -> name of the case -> `OpCase`. Must not know:
tolerances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.kernels.backend import Backend
from allotrope.ops.matmul.weight import Weight

FP32_AND_BF16 = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class OpCase:
    """One spec of an operation, and arguments for it.

    `spec`: dtype -> the spec, which `Backend.rejects` reads. `make(generator, dtype, device)` returns the positional
    arguments of `Backend.run`; two calls with generators of one seed return equal arguments. A backend may write into
    them. The generator is the CPU's, so that every device gets the same numbers. `dtypes`: of the activations.
    `tolerance`: dtype whose tolerance holds every floating-point output; None: that of each output's own dtype.
    Integers must be equal. What is wanted of a backend is what the reference returns for arguments of `dtype` that are
    widened to fp32.
    """

    spec: Callable[[torch.dtype], Any]
    make: Callable[[torch.Generator, torch.dtype, torch.device], tuple[Any, ...]]
    dtypes: tuple[torch.dtype, ...] = FP32_AND_BF16
    tolerance: torch.dtype | None = None


Cases = Mapping[str, Mapping[str, OpCase]]
"""Name of the operation -> name of the case -> case."""


def arguments_of(
    case: OpCase, backend: Backend, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[Any, ...]:
    """What `case.make` returns, with stored weights packed as `backend` reads them, where it packs."""
    pack = getattr(backend, "pack", None)
    made = case.make(generator, dtype, device)
    return made if pack is None else tuple(pack(one) if isinstance(one, Weight) else one for one in made)


class Draw:
    """Random arguments of one case: `Draw(generator, device)(dtype, 3, 5)` is a normal tensor [3, 5]."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self.generator, self.device = generator, device

    def __call__(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Drawn in fp32, then rounded to `dtype`."""
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Uniform in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, dtype)

    def permutation(self, count: int) -> torch.Tensor:
        """0 to count - 1 in random order, int64."""
        return torch.randperm(count, generator=self.generator).to(self.device)
