"""The parameters that weights are loaded into, and what becomes of them once all are in.

Must not know: how a format stores its numbers, or how a backend multiplies.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from allotrope.kernels.backend import Op
from allotrope.kernels.tiles import cdiv
from allotrope.layers.build import Build
from allotrope.layers.parallel import Placement, Section
from allotrope.ops.matmul import MatmulBackend, MatmulSpec, StoredWeight
from allotrope.ops.matmul.packed_weight import PackedWeight
from allotrope.ops.matmul.plain import PLAIN, PlainWeight
from allotrope.ops.matmul.weight import Format, QuantizedWeight, Weight

VALUES, SCALES = "_values", "_scales"
"""What the names of the two parameters of a quantized weight end with."""


def kept_names(name: str) -> Iterator[str]:
    """Names of the quantized weights that sections of a weight `name` are kept in: one for each format."""
    yield name
    yield from (f"{name}_{number}" for number in itertools.count(2))


# Of parameters: their bytes once packed, and their format; of scales, whether blocks of rows share them in the stored
# weight.
_PACKED_BYTES, _FORMAT, _BLOCKS = "packed_bytes", "format", "scales_of_blocks"
# Rows of a plain weight that are quantized at a time.
_QUANTIZED_ROWS = 8192
# Kernels that take many rows take as many outputs at a time.
_TILE_OUTPUTS = 64

log = logging.getLogger("allotrope.layers")


class WeightMatmul:
    """The backend that multiplies a weight, chosen when the layer is made."""

    def __init__(self, op: Op, spec: MatmulSpec, build: Build) -> None:
        self.backend: MatmulBackend = build.chooser.choose(op, spec)
        self.run = self.backend.run
        self.spec, self.format = spec, spec.format
        self.quantized_from = self.backend.quantized_from(spec, build.chooser.chip)
        choices = (one for one in build.chooser.choices if one.op == op.name and one.spec == spec)
        # Why no backend that reads quantized weights as they are packed for it runs.
        passed_over = next(choices).passed_over
        packing = [one.name for one in op.backends if isinstance(one, MatmulBackend) and one.own_layout]
        self.reasons = [reason for name in packing for reason in passed_over.get(name, ())]

    def pack(self, weight: StoredWeight) -> Weight:
        """The whole weight as `run` reads it. One that is dequantized for each product says why, once."""
        if self.format is not PLAIN and not self.backend.own_layout:
            _warn(self.format.name, "; ".join(self.reasons))
        packed = self.backend.pack(weight)
        if self.spec.experts_of_layer and isinstance(packed, PackedWeight):
            return replace(packed, experts_of_layer=self.spec.experts_of_layer)
        return packed

    def in_fp32(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product in fp32: not rounded before, where the backend can leave that out."""
        if not self.backend.fp32_out:
            rounded: torch.Tensor = self.run(x, weight, bias)
            return rounded.float()
        out = torch.empty(len(x), weight.shape[-2], dtype=torch.float32, device=x.device)
        exact: torch.Tensor = self.run(x, weight, bias, out=out)
        return exact


@functools.cache
def _warn(format: str, reasons: str) -> None:
    log.warning("%s weights are dequantized anew for every product: %s", format, reasons)


def create_weights(
    module: nn.Module,
    name: str,
    matmul: WeightMatmul,
    shape: tuple[int, ...],
    placement: Placement,
    build: Build,
) -> None:
    """Give `module` the parameters of a weight `name`, of `shape` ([E,] outputs, inputs) on this rank: one of that name
    for a plain weight, `VALUES` and `SCALES` for a quantized one."""
    format = matmul.format
    if format is PLAIN:
        module.register_parameter(name, build.parameter(shape, placement))
        return
    *outer, inputs = shape
    values = scales = placement
    if placement.dim == 1:
        values = replace(placement, sections=_counted(placement.sections, format.pack_factor, format.elements))
        scales = replace(placement, sections=_counted(placement.sections, format.group_size or 1))
        if not format.group_size:
            # A row's scale counts for all of its inputs: every rank has it.
            scales = replace(placement, sections=(Section(placement.sections[0].name, outer[-1]),), dim=0)
    outputs = [section.local(build.parallel) for section in placement.sections] if placement.dim == 0 else outer[-1:]
    shared = format.shares(*outputs)
    sizes = functools.partial(matmul.backend.packed_bytes, format) if matmul.backend.own_layout else format.stored_bytes
    for ending, width, place, dtype, size in zip(
        (VALUES, SCALES),
        (format.width(inputs), format.groups(inputs)),
        (values, scales),
        (format.value_dtype, format.scale_dtype),
        sizes(shape, shared),
        strict=True,
    ):
        made = build.parameter((*outer, width), place, dtype)
        setattr(made, _PACKED_BYTES, size)
        setattr(made, _FORMAT, format)
        setattr(made, _BLOCKS, ending == SCALES and format.shares())
        module.register_parameter(name + ending, made)


def mark_quantized_on_load(made: torch.nn.Parameter, matmul: WeightMatmul) -> None:
    """Let the plain weight `made` count as what it becomes once it is loaded: one of `matmul`'s format."""
    format, shape = matmul.format, tuple(made.shape)
    sizes = functools.partial(matmul.backend.packed_bytes, format) if matmul.backend.own_layout else format.stored_bytes
    setattr(made, _PACKED_BYTES, sum(sizes(shape, False)))
    setattr(made, _FORMAT, format)


def quantized(weight: Weight, format: Format) -> QuantizedWeight:
    """The plain `weight` [outputs, inputs] in another format."""
    plain = weight.values if isinstance(weight, PlainWeight | PackedWeight) else weight.dequantize()
    plain = plain.view(weight.shape)
    out: QuantizedWeight | None = None
    # A few rows at a time: quantizing takes several fp32 copies.
    for first in range(0, len(plain), _QUANTIZED_ROWS):
        rows = slice(first, first + _QUANTIZED_ROWS)
        part = format.quantize(plain[rows])
        if out is None:
            values, scales = (one.new_empty(len(plain), *one.shape[1:]) for one in (part.values, part.scales))
            out = QuantizedWeight(format, values, scales)
        out.values[rows].copy_(part.values)
        out.scales[rows].copy_(part.scales)
    assert out is not None, "the weight has no rows"
    return out


def _counted(sections: tuple[Section, ...], by: int, elements: int = 1) -> tuple[Section, ...]:
    """Sections of inputs in groups of `by`, of `elements` each."""
    found = []
    for one in sections:
        unit = (one.unit // by if one.room else min(one.unit, 1)) * elements
        found.append(replace(one, size=cdiv(one.size, by) * elements, unit=unit, room=one.room // by * elements))
    return tuple(found)


def scales_of_blocks(parameter: torch.Tensor) -> bool:
    """Whether a parameter holds scales that each 128 rows of the stored weight share."""
    return bool(getattr(parameter, _BLOCKS, False))


def format_of(parameter: torch.Tensor) -> Format:
    """The format of the weight that a parameter is, or is a part of."""
    format = getattr(parameter, _FORMAT, PLAIN)
    assert isinstance(format, Format)
    return format


def packed_bytes(parameter: torch.Tensor) -> int:
    """Bytes of a parameter once it is loaded: blocks of rows then share their scales, and where our kernels run, values
    fill whole tiles."""
    return int(getattr(parameter, _PACKED_BYTES, parameter.numel() * parameter.element_size()))


def _group(format: Format) -> int:
    """Inputs that stay together."""
    return format.group_size or format.pack_factor


def shardable(format: Format, section: Section, build: Build) -> bool:
    """Whether a rank's share of the inputs `section` is a whole number of groups, so that it can stay quantized."""
    return build.parallel.size == 1 or section.local(build.parallel) % _group(format) == 0


def inner_section(what: str, width: int, formats: Sequence[Format], build: Build) -> Section:
    """The `width` of a feed-forward block, outputs of its first weights and inputs of its last one, as ranks share it
    if all are to stay quantized: whole groups of every format, as evenly as they come, with room for the most that a
    rank gets in whole tiles. Where there are fewer groups than ranks, equal shares; raises ValueError, with the name
    `what`, if there are none."""
    unit, ranks = math.lcm(*map(_group, formats)), build.parallel.size
    units = cdiv(width, unit)
    if ranks == 1 or unit == 1 or units < ranks:
        build.parallel.shard(what, width)
        return Section("", width, 1)
    tile = math.lcm(unit, _TILE_OUTPUTS)
    return Section("", width, unit, cdiv(cdiv(units, ranks) * unit, tile) * tile)


def pop_weights(module: nn.Module, name: str, format: Format) -> StoredWeight:
    """The loaded weight `name`; the module gives its parameters up."""
    endings = ("",) if format is PLAIN else (VALUES, SCALES)
    tensors = [module.get_parameter(name + ending).data for ending in endings]
    for ending in endings:
        delattr(module, name + ending)
    return PlainWeight(tensors[0]) if format is PLAIN else QuantizedWeight(format, *tensors)
