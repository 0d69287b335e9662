"""Products with weights in blocks of few bits on a CPU, which are never unpacked whole (`blocks.c`): those of GGUF, and
MXFP4, INT4 and FP8 as blocks.

A weight is packed once into panels of 16 outputs: its codes keep their number of bits, scales are as exact as they are
stored. Rows are rounded to int8 by groups of 32, where the format lets them be, and multiplied in integers. Many rows
meet blocks that are unpacked in the cache once for all of them: to codes of a byte, to fp32, or to bf16 for matrix
units (AMX).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from allotrope.kernels.c.compiler import load
from allotrope.kernels.c.function import CFunction, c_reasons
from allotrope.kernels.chip import Chip
from allotrope.kernels.host_memory import empty_weight
from allotrope.ops.matmul.cpu import WeightInPanels
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.gguf import FP4_DOUBLED, IQ4_VALUES, PANEL, GgufBlocks, Layout, Plane, panel_bytes
from allotrope.ops.matmul.weight import Format, QuantizedWeight

# Inputs of a step, as in C.
STEP = 32
SOURCE, PACK_SOURCE = (Path(__file__).with_name(name) for name in ("blocks.c", "blocks_pack.c"))
# Other formats as blocks: their scales are put before so many of their codes, whose order stays as it is.
_FP8_SPANS = (128, 64, STEP)
_STORED_BLOCKS = {
    "mxfp4": Layout("mxfp4", 17, 32, (Plane(1, 4, 1),), table=FP4_DOUBLED, scale_type="power"),
    "int4": Layout("int4", 18, 32, (Plane(2, 4, 1),), offset=8, scale_type="bf16", rounded=True),
    **{
        f"fp8 by {span}": Layout(f"fp8 by {span}", 4 + span, span, (Plane(4, 8, 1),), scale_type="fp32", e4m3=True)
        for span in _FP8_SPANS
    },
}
_STORED = ("mxfp4", "int4", "fp8")
_TABLES = {(): 0, IQ4_VALUES: 1, FP4_DOUBLED: 2}


class BlockWeight(WeightInPanels):
    """`panels`: uint8 [E or 1, panels, bytes], as `blocks.c` says."""

    panel = PANEL

    def __init__(self, format: Format, panels: torch.Tensor, shape: tuple[int, ...]) -> None:
        super().__init__(panels, shape)
        self.format = format
        self.int8_activations = _int8_activations(format)
        self.layout = layout_of(format, shape[-1])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """As `Weight.dequantize`."""
        ids = torch.arange(self._shape[-2])
        each = [_rows(self.layout, panels, ids, self._shape[-1]) for panels in self.panels]
        return torch.stack(each).view(self._shape).to(dtype)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As `Weight.rows`."""
        return _rows(self.layout, self.panels[0], ids, self._shape[-1]).to(dtype)


def rejects(spec: Any, chip: Chip) -> list[str]:
    """`Backend.rejects`, of one weight and of weights of experts."""
    if chip.vendor != "cpu":
        return [f"chip={chip.arch} (needs cpu)"]
    format: Format = spec.format
    if not isinstance(format, GgufBlocks) and format.name not in _STORED:
        return [f"format={format.name} (needs blocks of GGUF, {', '.join(_STORED[:-1])} or {_STORED[-1]})"]
    if isinstance(format, Fp8) and format.fp8_activations:
        return ["fp8 activations (needs them as they are)"]
    if not isinstance(format, GgufBlocks) and (spec.inputs % STEP or format.group_size % STEP):
        return [f"inputs={spec.inputs}, group_size={format.group_size} (needs multiples of {STEP})"]
    layout = layout_of(format, spec.inputs)
    return c_reasons(SOURCE, spec.dtype, chip, **defines(layout, _int8_activations(format)))


def _int8_activations(format: Format) -> bool:
    return isinstance(format, GgufBlocks) and format.int8_activations


def layout_of(format: Format, inputs: int) -> Layout:
    """The blocks that a weight of a format is packed from. `inputs`: of the weight."""
    if isinstance(format, GgufBlocks):
        return format.layout
    if not isinstance(format, Fp8):
        return _STORED_BLOCKS[format.name]
    # As few scales as there may be.
    span = next(size for size in _FP8_SPANS if inputs % size == 0 == format.group_size % size)
    return _STORED_BLOCKS[f"fp8 by {span}"]


def packed_bytes(format: Format, shape: tuple[int, ...], shared: bool) -> tuple[int, int]:
    """As `Format.packed_bytes`, of what `pack` makes: all of it counts as values."""
    *outer, outputs, inputs = shape
    panels = torch.Size(outer).numel() * -(-outputs // PANEL)
    return panels * panel_bytes(layout_of(format, inputs), inputs), 0


def _blocks(weight: QuantizedWeight, layout: Layout) -> torch.Tensor:
    """uint8 [outputs, bytes]: one weight as its layout has it."""
    if isinstance(weight.format, GgufBlocks):
        return weight.values.contiguous()
    outputs, inputs = weight.shape
    codes = weight.values.contiguous().view(torch.uint8).unflatten(-1, (inputs // layout.numbers, -1))
    group = weight.format.group_size or inputs
    scales = weight.scales.repeat_interleave(group // layout.numbers, dim=-1)[:, : codes.shape[1]]
    scales = scales.repeat_interleave(weight.rows_per_scale, dim=0)[:outputs].contiguous()
    return torch.cat((scales.view(torch.uint8).unflatten(-1, (codes.shape[1], -1)), codes), dim=-1).flatten(-2)


@functools.cache
def _defines(layout: Layout) -> tuple[tuple[str, int], ...]:
    planes: dict[str, Plane | None] = {"P0": layout.codes[0], "S0": None, "S1": None, "P1": None}
    planes |= dict(zip(("P1",), layout.codes[1:], strict=False)) | dict(zip(("S0", "S1"), layout.scales, strict=False))
    found = {
        "NUMBERS": layout.numbers,
        "BYTES": layout.bytes,
        "OFFSET": layout.offset,
        "TABLE": _TABLES[layout.table],
        "GROUP": layout.group,
        "INTEGER_SCALES": int(layout.has_scales),
        "SCALE_AT": layout.scale_at,
        "SCALE_OFFSET": 0 if layout.scale_bits == 8 else layout.scale_offset,
        "MINIMUM": int(layout.minimum_at >= 0),
        "MINIMUM_AT": layout.minimum_at,
        "MINIMUM_SIGN": layout.minimum_sign,
        "MIXED": int(layout.mixed_scales),
        "POWER": int(layout.scale_type == "power"),
        "BRAIN": int(layout.scale_type == "bf16"),
        "SINGLE": int(layout.scale_type == "fp32"),
        "E4M3": int(layout.e4m3),
        "ROUNDED_WEIGHTS": int(layout.rounded),
    }
    for name, plane in planes.items():
        found[f"{name}_BITS"] = 0 if plane is None else plane.bits
        if plane is not None:
            found |= {f"{name}_AT": plane.at, f"{name}_RUN": plane.run}
    return tuple(found.items())


def defines(layout: Layout, int8_activations: bool) -> dict[str, int]:
    """The macros of `blocks.c` for one type of blocks."""
    return {**dict(_defines(layout)), "INT8_ACTIVATIONS": int(int8_activations)}


@functools.cache
def _product(layout: Layout, int8_activations: bool, dtype: torch.dtype) -> CFunction:
    return CFunction(SOURCE, "product", dtype, "pllplpppllllp", **defines(layout, int8_activations))


@functools.cache
def _packing(layout: Layout, name: str, signature: str) -> CFunction:
    return CFunction(PACK_SOURCE, name, torch.float32, signature, **dict(_defines(layout)))


@functools.cache
def _scratch_size(layout: Layout, int8_activations: bool, dtype: torch.dtype) -> Callable[[int, int], int]:
    function = load(SOURCE, dtype, **defines(layout, int8_activations)).scratch_size
    function.argtypes, function.restype = [ctypes.c_long] * 2, ctypes.c_long
    return cast(Callable[[int, int], int], function)


def pack(weight: QuantizedWeight) -> BlockWeight:
    """`MatmulBackend.pack`."""
    outputs, inputs = weight.shape[-2:]
    layout = layout_of(weight.format, inputs)
    each = [weight[expert] for expert in range(weight.shape[0])] if len(weight.shape) == 3 else [weight]
    panels = empty_weight((len(each), -(-outputs // PANEL), panel_bytes(layout, inputs)), torch.uint8)
    for packed, one in zip(panels, each, strict=True):
        _packing(layout, "pack", "pplll")(packed, _blocks(one, layout), 1, outputs, inputs)
    return BlockWeight(weight.format, panels, weight.shape)


def _rows(layout: Layout, panels: torch.Tensor, ids: torch.Tensor, inputs: int) -> torch.Tensor:
    """Outputs `ids` of a weight, [n, inputs] fp32."""
    found = torch.empty(len(ids), inputs)
    _packing(layout, "rows", "pppll")(found, panels, ids.contiguous(), len(ids), inputs)
    return found


def multiply(
    x: torch.Tensor,
    weight: BlockWeight,
    bias: torch.Tensor | None = None,
    expert_offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_i = W_e x_i + b. `x`: [n, inputs], sorted by expert where there are `expert_offsets`, [E] int32: where each
    expert's rows end. `bias`: [panels of outputs] fp32, or such a one for each expert. `out`: of `x`'s type or fp32."""
    if x.stride(1) != 1:
        x = x.contiguous()
    outputs, inputs = weight.shape[-2:]
    if x.shape[1] != inputs:
        raise ValueError(f"rows of {x.shape[1]} numbers for a weight of {inputs} inputs")
    y = x.new_empty(len(x), outputs) if out is None or out.stride(1) != 1 else out
    variant = weight.layout, weight.int8_activations, x.dtype
    scratch = torch.empty(_scratch_size(*variant)(len(x), inputs), dtype=torch.uint8)
    _product(*variant)(
        *(y, y.stride(0), y.dtype != x.dtype or x.dtype == torch.float32, x, x.stride(0), weight.panels),
        *(bias, expert_offsets, len(weight.panels), len(x), inputs, outputs, scratch),
    )
    return y if out is None or y is out else out.copy_(y)


def matmul(
    x: torch.Tensor, weight: BlockWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference.matmul`; `out` may be fp32, for sums that are not rounded."""
    return multiply(x, weight, None if bias is None else weight.padded(bias), None, out)
