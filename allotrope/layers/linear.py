"""y = x W^T + b, sharded by output (columns) or by input (rows)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.parallel import Placement, Section, parameter


class Product:
    """x W^T of one loaded weight, in the form that the device multiplies fastest.

    On a CPU a large weight is reordered once for oneDNN, which then reads it at memory speed whatever the number of
    rows; the plain product is several times slower there for a few rows. A small weight is not worth oneDNN's start.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.packed = worth_packing(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x`: [T, inputs]. Returns [T, outputs]."""
        if not self.packed:
            return F.linear(x, self.weight, bias)
        return _packed_product(x, self.weight, bias, "none", [], "")


_packed_product = torch.ops.mkldnn._linear_pointwise.default
_PACKABLE = (torch.float32, torch.bfloat16)
_SMALLEST_PACKED = 1 << 18


def worth_packing(weight: torch.Tensor) -> bool:
    """Whether `weight` ([outputs, inputs]) is multiplied faster in oneDNN's own order."""
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
