"""y = x W^T + b, sharded by output (columns) or by input (rows)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.kernels.chip import chip_of
from allotrope.kernels.triton_version import triton_reasons
from allotrope.layers.build import Build
from allotrope.layers.parallel import Placement, Section, parameter
from allotrope.ops.matmul.cpu import PackedWeight, packs
from allotrope.ops.matmul.launch import FEW_PLAIN_ROWS
from allotrope.ops.matmul.packed_weight import Prepared, prepare_plain
from allotrope.ops.matmul.product import QuantizedProduct, declare, divides, multiply, taken
from allotrope.ops.matmul.quantized_weight import Format


class Product:
    """x W^T of one loaded weight, in the form that the device multiplies fastest.

    On a CPU a large weight is reordered once, for our own C or else for oneDNN, and then read at memory speed whatever
    the number of rows; the plain product is several times slower there for a few rows. A small weight is not worth
    their start. On a GPU a few rows are multiplied as was measured to be fastest, by PyTorch or by a kernel of ours.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.multiply: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
        self.prepared = prepare_plain(weight) if has_kernel(weight) else None
        if self.prepared is not None:
            self.multiply = partial(_by_triton, self.prepared)
        elif not worth_packing(weight):
            self.multiply = partial(_plain, weight)
        elif packs(weight):
            self.multiply = PackedWeight(weight)
        else:
            self.multiply = partial(_by_onednn, torch.ops.mkldnn._reorder_linear_weight(weight, None))

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x`: [T, inputs]. Returns [T, outputs], in `out` where it is given."""
        y = self.multiply(x, bias)
        return y if out is None else out.copy_(y)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """As a call, in fp32, which on NVIDIA chips nothing was rounded for."""
        if self.prepared is None:
            return self.multiply(x, None).float()
        out = torch.empty(len(x), self.prepared.outputs, dtype=torch.float32, device=x.device)
        found: torch.Tensor = multiply(x, self.prepared, out=out)
        return found


def _plain(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _by_triton(weight: Prepared, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if len(x) > FEW_PLAIN_ROWS:
        return F.linear(x, weight.codes[0], bias)
    found: torch.Tensor = multiply(x, weight, bias=bias)
    return found


def _by_onednn(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _packed_product(x, weight, bias, "none", [], "")


_packed_product = torch.ops.mkldnn._linear_pointwise.default
_PACKABLE = (torch.float32, torch.bfloat16)
SMALLEST_PACKED = 1 << 18


def worth_packing(weight: torch.Tensor) -> bool:
    """Whether `weight` ([outputs, inputs]) is multiplied faster in another order."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _PACKABLE
        and weight.numel() >= SMALLEST_PACKED
        and torch.backends.mkldnn.is_available()
    )


def has_kernel(weight: torch.Tensor) -> bool:
    """Whether a few rows may be multiplied by a kernel of ours, where that is faster than PyTorch's."""
    return (
        weight.device.type == "cuda"
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and not triton_reasons(chip_of(weight.device))
    )


class Linear(nn.Module):
    """Output-sharded or replicated: each rank computes its share of every section of the output.

    `sections`: the outputs that are computed in one product, such as q, k and v. Those that stay quantized have a
    product of their own. Weights are given up for their products once loading has finished.
    """

    def __init__(self, inputs: int, sections: tuple[Section, ...], build: Build, *, bias: bool = False) -> None:
        super().__init__()
        self.sizes = [section.local(build.parallel) for section in sections]
        formats = [build.format("weight", section.name) for section in sections]
        kept = {format for format in formats if format is not None}
        if len(kept) > 1:
            raise ValueError(f"{build.name} has sections of several formats: {sorted(map(str, kept))}")
        # Runs of sections that are alike: their format, and outputs.
        self.runs: list[tuple[Format | None, int]] = []
        for format, size in zip(formats, self.sizes, strict=True):
            if self.runs and self.runs[-1][0] == format:
                size += self.runs.pop()[1]
            self.runs.append((format, size))
        self.weight: torch.Tensor | None = None
        for format in dict.fromkeys(formats):
            mine = tuple(section for section, own in zip(sections, formats, strict=True) if own == format)
            shape, placement = (sum(size for own, size in self.runs if own == format), inputs), Placement(mine)
            if format is None:
                self.weight = parameter(shape, placement, build.dtype, build.device)
            else:
                declare(self, "weight", format, shape, placement, build)
        whole = Placement(sections)
        self.bias = parameter((sum(self.sizes),), whole, build.dtype, build.device) if bias else None
        self.product: Product | QuantizedProduct | None = None
        self.products: list[Product | QuantizedProduct] = []

    def finish_loading(self) -> None:
        """Reorder the weights for the device."""
        plain, self.weight = self.weight, None
        quantized = next((taken(self, "weight", format) for format, _ in self.runs if format is not None), None)
        places = {True: 0, False: 0}
        for format, size in self.runs:
            rows = slice(places[format is None], places[format is None] + size)
            places[format is None] = rows.stop
            if format is None:
                assert plain is not None
                self.products.append(Product(plain.data[rows]))
            else:
                assert quantized is not None
                self.products.append(QuantizedProduct(quantized[rows]))
        if len(self.products) == 1:
            self.product = self.products.pop()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [T, inputs]. Returns [T, outputs of this rank]."""
        if self.product is not None:
            return self.product(x, self.bias)
        y = x.new_empty(len(x), sum(self.sizes))
        start = 0
        for product, (_, size) in zip(self.products, self.runs, strict=True):
            bias = None if self.bias is None else self.bias[start : start + size]
            product(x, bias, out=y[:, start : start + size])
            start += size
        return y


class RowLinear(nn.Module):
    """Input-sharded: each rank multiplies its share of the inputs, and the results are summed over the ranks."""

    def __init__(self, section: Section, outputs: int, build: Build, *, bias: bool = False) -> None:
        super().__init__()
        self.parallel = build.parallel
        inputs, placement = section.local(build.parallel), Placement((section,), dim=1)
        self.format = build.format("weight", section.name)
        if self.format is not None and not divides(self.format, section, build):
            self.format = None
        self.weight: torch.Tensor | None = None
        if self.format is None:
            self.weight = parameter((outputs, inputs), placement, build.dtype, build.device)
        else:
            declare(self, "weight", self.format, (outputs, inputs), placement, build)
        whole = Placement((Section("", outputs),))
        self.bias = parameter((outputs,), whole, build.dtype, build.device) if bias else None
        self.product: Product | QuantizedProduct | None = None

    def finish_loading(self) -> None:
        """Reorder the weight for the device."""
        if self.format is not None:
            self.product = QuantizedProduct(taken(self, "weight", self.format))
            return
        assert self.weight is not None
        self.product, self.weight = Product(self.weight.data), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [T, inputs of this rank]. Returns [T, outputs], whole."""
        assert self.product is not None
        if self.parallel.size == 1:
            return self.product(x, self.bias)
        y = self.parallel.all_reduce(self.product(x))
        return y if self.bias is None else y + self.bias
