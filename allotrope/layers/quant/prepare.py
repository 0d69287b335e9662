"""Quantized weights in the form that products read, made once when a weight is whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from allotrope.layers.quant.format import ACTIVATION_RUN, FP4_RUN, Kind, Quantized, shared_scales

# Of 4-bit codes; the largest that leaves room for the 2^126 that come on top.
_FAST_SCALES = 128


@dataclass(frozen=True)
class Prepared:
    """A weight as the kernel reads it; made by `prepare`. `kind`: or "plain".

    `codes`: [E or 1, outputs, padded / packed]. `scales`: [E or 1, outputs / scale_rows, runs]. `outputs`, `inputs`: of
    the plain weight. `fast`: the scales are small enough for the fast way from 4 bits to bf16. `library_scales`: runs
    rounded up to fours, a run's neighbour next to it [runs, outputs / 128], as PyTorch's product wants them; None where
    rows do not share scales.
    """

    kind: Kind | Literal["plain"]
    codes: torch.Tensor
    scales: torch.Tensor
    outputs: int
    inputs: int
    padded: int
    scale_rows: int
    row_scales: bool
    experts: int
    fast: bool
    library_scales: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def prepare(weight: Quantized) -> Prepared:
    """Pad the inputs to whole tiles, join rows that share a scale, and put 4-bit codes in the order of the kernel.

    `weight`: [outputs, inputs], or [E, outputs, inputs]; its memory is taken over. Raises ValueError for runs that are
    neither 128 nor a whole row.
    """
    stacked = len(weight.shape) == 3
    if weight.format.kind == "fp8" and weight.format.run not in (0, ACTIVATION_RUN):
        raise ValueError(f"fp8 has run={weight.format.run} (needs {ACTIVATION_RUN} or the whole row)")
    weight = shared_scales(weight)
    outputs, inputs = weight.shape[-2:]
    codes, scales = weight.codes, weight.scales
    if not stacked:
        codes, scales = codes[None], scales[None]
    if weight.format.kind == "fp8":
        padded = -(-inputs // ACTIVATION_RUN) * ACTIVATION_RUN
        codes = _padded(codes.view(torch.uint8), padded).view(torch.float8_e4m3fn)
    else:
        padded = -(-inputs // (2 * FP4_RUN)) * 2 * FP4_RUN
        codes, scales = _padded(codes, padded // 2), _padded(scales, padded // FP4_RUN)
        for expert in codes:
            expert.copy_(_in_pairs_of_runs(expert))
    blocks = None
    if weight.rows_per_scale == ACTIVATION_RUN and weight.format.run == ACTIVATION_RUN and not stacked:
        blocks = F.pad(scales[0], (0, -scales.shape[-1] % 4)).contiguous().t()
    return Prepared(
        weight.format.kind,
        codes.contiguous(),
        scales.contiguous(),
        outputs,
        inputs,
        padded,
        weight.rows_per_scale,
        weight.format.run == 0,
        codes.shape[0] if stacked else 0,
        weight.format.kind == "fp8" or int(scales.max()) <= _FAST_SCALES,
        blocks,
    )


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _in_pairs_of_runs(codes: torch.Tensor) -> torch.Tensor:
    """Byte j of each 32: number j of one run in its low half, number j of the next in its high half."""
    low, high = codes & 15, codes >> 4
    plain = torch.stack((low, high), dim=-1).flatten(-2).unflatten(-1, (-1, 2, FP4_RUN))
    return (plain[..., 0, :] | plain[..., 1, :] << 4).flatten(-2)


def prepare_plain(weights: torch.Tensor) -> Prepared:
    """Weights that are not quantized, in the same form. `weights`: [E, outputs, inputs]."""
    experts, outputs, inputs = weights.shape
    none = weights.new_empty(1, 1, 1)
    return Prepared("plain", weights, none, outputs, inputs, inputs, 1, False, experts, False)
