"""Products with quantized weights on any device, and the parameters that such weights are loaded into."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.kernels.backend import choose, lazily
from allotrope.kernels.chip import chip_of
from allotrope.kernels.triton_version import triton_reasons
from allotrope.layers.build import Build
from allotrope.layers.parallel import Placement, Section, parameter
from allotrope.ops.gated_activation import GATED_ACTIVATION, GatedActivation, GatedActivationSpec
from allotrope.ops.matmul.packed_weight import TILE_ROWS, WORDS_RUN, Prepared, prepare
from allotrope.ops.matmul.quantized_weight import (
    ACTIVATION_RUN,
    FP4_RUN,
    SHARED_ROWS,
    Format,
    Quantized,
    as_multiplied,
    shared_scales,
)

CODES, SCALES = "_codes", "_scales"
"""What the names of the two parameters of a quantized weight end with."""

# Of scales, on their parameter: whether blocks of rows share them in the stored weight, and still do in this rank's.
_BLOCKS, _SHARES = "scales_of_blocks", "shares_scales"

Tables = dict[int, torch.Tensor]
"""By height: the tiles of rows in the order of experts (`triton_tiles`), which all products of these rows share."""

log = logging.getLogger("allotrope.layers")

multiply = lazily("allotrope.ops.matmul.triton", "multiply")


def declare(
    module: nn.Module, name: str, format: Format, shape: tuple[int, ...], placement: Placement, build: Build
) -> None:
    """Give `module` the parameters of a quantized weight `name`, of `shape` ([E,] outputs, inputs) on this rank."""
    *outer, inputs = shape
    codes = scales = placement
    if placement.dim == 1:
        codes = replace(placement, sections=_counted(placement.sections, format.packed))
        scales = replace(placement, sections=_counted(placement.sections, format.run or 1))
        if not format.run:
            # A row's scale counts for all of its inputs: every rank has it.
            scales = replace(placement, sections=(Section(placement.sections[0].name, outer[-1]),), dim=0)
    outputs = [section.local(build.parallel) for section in placement.sections] if placement.dim == 0 else outer[-1:]
    for ending, width, place, kind in (
        (CODES, inputs // format.packed, codes, format.code_dtype),
        (SCALES, format.runs(inputs), scales, format.scale_dtype),
    ):
        made = parameter((*outer, width), place, kind, build.device)
        setattr(made, _SHARES, ending == SCALES and format.shares(*outputs))
        setattr(made, _BLOCKS, ending == SCALES and format.shares())
        module.register_parameter(name + ending, made)


def _counted(sections: tuple[Section, ...], by: int) -> tuple[Section, ...]:
    """Sections of inputs in runs of `by`."""
    return tuple(replace(s, size=-(-s.size // by), unit=1 if s.unit else 0) for s in sections)


def scales_of_blocks(parameter: torch.Tensor) -> bool:
    """Whether a parameter holds scales that each `SHARED_ROWS` rows of the stored weight share."""
    return bool(getattr(parameter, _BLOCKS, False))


def lasting_bytes(name: str, parameter: torch.Tensor, device: torch.device) -> int:
    """Bytes of a parameter once it is loaded on `device`: blocks of rows then share their FP8 scales, and where Triton
    runs, codes fill whole tiles.
    """
    size = parameter.numel() * parameter.element_size()
    if getattr(parameter, _SHARES, False):
        return size // SHARED_ROWS
    if triton_reasons(chip_of(device)) or not name.endswith((CODES, SCALES)):
        return size
    rows, width = parameter.shape[-2:]
    if parameter.dtype == torch.uint8:
        whole = WORDS_RUN // (2 if name.endswith(CODES) else FP4_RUN)
        return size // (rows * width) * (-(-rows // TILE_ROWS) * TILE_ROWS) * (-(-width // whole) * whole)
    padded = -(-width // ACTIVATION_RUN) * ACTIVATION_RUN
    return size // width * padded if parameter.dtype == torch.float8_e4m3fn else size


def divides(format: Format, section: Section, build: Build) -> bool:
    """Whether a rank's share of the inputs `section` is a whole number of runs, so that it can stay quantized."""
    whole = format.run or format.packed
    return build.parallel.size == 1 or section.local(build.parallel) % whole == 0


def taken(module: nn.Module, name: str, format: Format) -> Quantized:
    """The loaded weight `name`; the module gives its parameters up."""
    codes, scales = (module.get_parameter(name + ending).data for ending in (CODES, SCALES))
    for ending in (CODES, SCALES):
        module.register_parameter(name + ending, None)
    return Quantized(format, codes, scales)


def _prepared(weight: Quantized) -> Prepared | None:
    """The weight as our kernels read it; None, which is said once, where they do not run."""
    reasons = triton_reasons(chip_of(weight.codes.device))
    if not reasons:
        return prepare(weight)
    _say(weight.format.kind, "; ".join(reasons))
    return None


@functools.cache
def _say(kind: str, reasons: str) -> None:
    log.warning("%s weights are dequantized anew for every product: %s", kind, reasons)


class QuantizedProduct:
    """x W^T of one quantized weight. Where Triton does not run, the weight is unpacked for each product."""

    def __init__(self, weight: Quantized) -> None:
        self.prepared = _prepared(weight)
        # What is prepared may be a padded copy: one of the two is enough.
        self.weight = shared_scales(weight) if self.prepared is None else None

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x`: [T, inputs]. Returns [T, outputs], in `out` where it is given."""
        if self.prepared is not None:
            found: torch.Tensor = multiply(x, self.prepared, bias=bias, out=out)
            return found
        assert self.weight is not None
        exact = as_multiplied(x, self.weight.format.kind)
        y = F.linear(exact, self.weight.dequantized(), None if bias is None else bias.float()).to(x.dtype)
        return y if out is None else out.copy_(y)


class QuantizedStack:
    """As `QuantizedProduct`, with a weight per expert, a bias and gates."""

    def __init__(self, weight: Quantized) -> None:
        self.prepared = _prepared(weight)
        # What is prepared may be a padded copy: one of the two is enough.
        self.weight = shared_scales(weight) if self.prepared is None else None

    def __call__(
        self,
        x: torch.Tensor,
        ends: torch.Tensor,
        source: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        gating: GatedActivation | None = None,
        tables: Tables | None = None,
    ) -> torch.Tensor:
        """`x`: [T, inputs]; `source`: [n] its rows in the order of experts, None if x has that. `ends`: [E] int32,
        where each expert's rows end. `bias`: [E, outputs]. `gating`: of the first half of the outputs with the second.
        `tables`: what products of the same ends share, empty before the first. Returns [n, outputs].
        """
        if self.prepared is not None:
            given = {"bias": bias, "ends": ends, "source": source, "gating": gating, "tables": tables}
            found: torch.Tensor = multiply(x, self.prepared, **given)
            return found
        assert self.weight is not None
        rows = x if source is None else x.index_select(0, source)
        exact = as_multiplied(rows, self.weight.format.kind)
        results = exact.new_empty(len(rows), self.weight.shape[1])
        start = 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                weight = Quantized(self.weight.format, self.weight.codes[expert], self.weight.scales[expert])
                offset = None if bias is None else bias[expert].float()
                results[start:end] = F.linear(exact[start:end], weight.dequantized(), offset)
                start = end
        if gating is not None:
            spec = GatedActivationSpec(gating, results.dtype)
            results = choose(GATED_ACTIVATION, spec, chip_of(x.device)).backend.run(results, gating)
        return results.to(x.dtype)
