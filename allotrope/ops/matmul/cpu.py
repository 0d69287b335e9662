"""Products with a weight in panels (`cpu.c`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from allotrope.kernels.c.compiler import UNSUITED, CannotCompile, load
from allotrope.kernels.c.function import CFunction
from allotrope.kernels.chip import Chip
from allotrope.kernels.host_memory import empty_weight
from allotrope.ops.matmul.onednn import plain_reasons, small_reasons
from allotrope.ops.matmul.plain import PLAIN, PlainWeight
from allotrope.ops.matmul.weight import Format, Weight

SOURCE = Path(__file__).with_name("cpu.c")
# Outputs of a panel, as in C.
_PANEL = 32


class WeightInPanels(Weight):
    """A weight packed in panels of `panel` outputs each, of which the last one is filled up. `shape`: without these."""

    panel: ClassVar[int]

    def __init__(self, panels: torch.Tensor, shape: tuple[int, ...]) -> None:
        self.panels, self._shape = panels, shape
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """As `Weight.shape`."""
        return self._shape

    @property
    def nbytes(self) -> int:
        """As `Weight.nbytes`."""
        return self.panels.nbytes

    def padded(self, bias: torch.Tensor) -> torch.Tensor:
        """`bias` in fp32, as long as the panels; made once, since a layer's bias is always the same."""
        if self._bias is None or self._bias[0] is not bias:
            self._bias = (bias, F.pad(bias.float(), (0, -self._shape[-2] % self.panel)))
        return self._bias[1]


class PanelWeight(WeightInPanels):
    """`panels`: [[E,] panels, inputs / pair, panel, pair], zeros behind the last output."""

    format: Format = PLAIN
    panel = _PANEL

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """As `Weight.dequantize`."""
        rows = self.panels.transpose(-3, -2).flatten(-4, -3).flatten(-2)
        return rows[..., : self._shape[-2], :].to(dtype)


def rejects(spec: Any, chip: Chip) -> list[str]:
    """`Backend.rejects` of one weight."""
    return rejects_experts(spec, chip) + small_reasons(spec)


def rejects_experts(spec: Any, chip: Chip) -> list[str]:
    """`Backend.rejects` of weights of experts, of any size."""
    if chip.vendor != "cpu":
        return [f"chip={chip.arch} (needs cpu)"]
    reasons = plain_reasons(spec)
    if spec.inputs % 2:
        reasons.append(f"inputs={spec.inputs} (needs an even number)")
    return reasons or library_reasons(spec.dtype)


@functools.cache
def _library_reasons(dtype: torch.dtype) -> tuple[str, ...]:
    try:
        return () if load(SOURCE, dtype).suits() else (UNSUITED,)
    except CannotCompile as reason:
        return (str(reason),)


def library_reasons(dtype: torch.dtype) -> list[str]:
    """Why this machine has no such products of a type."""
    return list(_library_reasons(dtype))


def pack(weight: PlainWeight) -> PanelWeight:
    """`MatmulBackend.pack`: [..., outputs, inputs] as [..., panels, inputs / pair, panel, pair]."""
    values = weight.values
    pair = 4 // values.element_size()
    padded = F.pad(values, (0, 0, 0, -values.shape[-2] % _PANEL))
    in_panels = padded.unflatten(-1, (-1, pair)).unflatten(-3, (-1, _PANEL)).transpose(-3, -2)
    return PanelWeight(empty_weight(in_panels.shape, values.dtype).copy_(in_panels), weight.shape)


def panel_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of the panels of a weight of `shape`."""
    *outer, outputs, inputs = shape
    return torch.Size(outer).numel() * (outputs + -outputs % _PANEL) * inputs * dtype.itemsize


@functools.cache
def _product(dtype: torch.dtype) -> CFunction:
    return CFunction(SOURCE, "product", dtype, "pplpplll")


@functools.cache
def _grouped_product(dtype: torch.dtype) -> CFunction:
    return CFunction(SOURCE, "grouped_product", dtype, "pplpplll")


def matmul(
    x: torch.Tensor, weight: PanelWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference.matmul`."""
    if x.stride(1) != 1:
        x = x.contiguous()
    outputs, inputs = weight.shape
    y = x.new_empty(len(x), outputs)
    added = None if bias is None else weight.padded(bias)
    _product(x.dtype)(y, x, x.stride(0), weight.panels, added, len(x), inputs, outputs)
    return y if out is None else out.copy_(y)


def multiply_experts(rows: torch.Tensor, weight: PanelWeight, expert_offsets: torch.Tensor) -> torch.Tensor:
    """`rows`: [n, inputs], sorted by expert. `expert_offsets`: [E] int32, where each expert's rows end. Returns
    [n, outputs]."""
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    experts, outputs, inputs = weight.shape
    y = rows.new_empty(len(rows), outputs)
    _grouped_product(rows.dtype)(y, rows, rows.stride(0), weight.panels, expert_offsets, experts, inputs, outputs)
    return y
