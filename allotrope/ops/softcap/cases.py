"""Cases of soft-capped logits: far below the cap and far above it, and columns of a wider tensor."""

from __future__ import annotations

from functools import partial

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.softcap import SoftcapSpec


def _spec(cap: float, dtype: torch.dtype) -> SoftcapSpec:
    return SoftcapSpec(cap)


def _logits(cap: float, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    return 20 * Draw(generator, device)(dtype, 5, 1030)[:, :1027], cap


CASES: Cases = {"softcap": {f"cap {cap}": OpCase(partial(_spec, cap), partial(_logits, cap)) for cap in (0.5, 30.0)}}
