"""y = x W^T + b, sharded by output (columns) or by input (rows)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.cpu.product import PackedWeight, packs
from allotrope.layers.build import Build
from allotrope.layers.parallel import Placement, Section, parameter


class Product:
    """x W^T of one loaded weight, in the form that the device multiplies fastest.

    On a CPU a large weight is reordered once, for our own C or else for oneDNN, and then read at memory speed whatever
    the number of rows; the plain product is several times slower there for a few rows. A small weight is not worth
    their start.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.multiply: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
        if not worth_packing(weight):
            self.multiply = partial(_plain, weight)
        elif packs(weight):
            self.multiply = PackedWeight(weight)
        else:
            self.multiply = partial(_by_onednn, torch.ops.mkldnn._reorder_linear_weight(weight, None))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x`: [T, inputs]. Returns [T, outputs]."""
        return self.multiply(x, bias)


def _plain(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _by_onednn(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _packed_product(x, weight, bias, "none", [], "")


_packed_product = torch.ops.mkldnn._linear_pointwise.default
_PACKABLE = (torch.float32, torch.bfloat16)
_SMALLEST_PACKED = 1 << 18


def worth_packing(weight: torch.Tensor) -> bool:
    """Whether `weight` ([outputs, inputs]) is multiplied faster in another order."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _PACKABLE
        and weight.numel() >= _SMALLEST_PACKED
        and torch.backends.mkldnn.is_available()
    )


class Linear(nn.Module):
    """Output-sharded or replicated: each rank computes its share of every section of the output.

    `sections`: the outputs that are computed in one product, such as q, k and v. The weight is given up for its
    `Product` once loading has finished.
    """

    def __init__(self, inputs: int, sections: tuple[Section, ...], build: Build, *, bias: bool = False) -> None:
        super().__init__()
        placement = Placement(sections)
        self.sizes = [section.local(build.parallel) for section in sections]
        outputs = sum(self.sizes)
        self.weight: torch.Tensor | None = parameter((outputs, inputs), placement, build.dtype, build.device)
        self.bias = parameter((outputs,), placement, build.dtype, build.device) if bias else None
        self.product: Product | None = None

    def finish_loading(self) -> None:
        """Reorder the weight for the device."""
        assert self.weight is not None
        self.product, self.weight = Product(self.weight.data), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [T, inputs]. Returns [T, outputs of this rank]."""
        assert self.product is not None
        return self.product(x, self.bias)


class RowLinear(nn.Module):
    """Input-sharded: each rank multiplies its share of the inputs, and the results are summed over the ranks."""

    def __init__(self, section: Section, outputs: int, build: Build, *, bias: bool = False) -> None:
        super().__init__()
        self.parallel = build.parallel
        inputs, placement = section.local(build.parallel), Placement((section,), dim=1)
        self.weight: torch.Tensor | None = parameter((outputs, inputs), placement, build.dtype, build.device)
        whole = Placement((Section("", outputs),))
        self.bias = parameter((outputs,), whole, build.dtype, build.device) if bias else None
        self.product: Product | None = None

    def finish_loading(self) -> None:
        """Reorder the weight for the device."""
        assert self.weight is not None
        self.product, self.weight = Product(self.weight.data), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [T, inputs of this rank]. Returns [T, outputs], whole."""
        assert self.product is not None
        if self.parallel.size == 1:
            return self.product(x, self.bias)
        y = self.parallel.all_reduce(self.product(x))
        return y if self.bias is None else y + self.bias
