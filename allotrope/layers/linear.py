"""y = x W^T + b, sharded by output (columns) or by input (rows)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.parallel import Placement, Section, parameter


class Linear(nn.Module):
    """Output-sharded or replicated: each rank computes its share of every section of the output.

    `sections`: the outputs that are computed in one product, such as q, k and v.
    """

    def __init__(self, inputs: int, sections: tuple[Section, ...], build: Build, *, bias: bool = False) -> None:
        super().__init__()
        placement = Placement(sections)
        self.sizes = [section.local(build.parallel) for section in sections]
        outputs = sum(self.sizes)
        self.weight = parameter((outputs, inputs), placement, build.dtype, build.device)
        self.bias = parameter((outputs,), placement, build.dtype, build.device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [T, inputs]. Returns [T, outputs of this rank]."""
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """Input-sharded: each rank multiplies its share of the inputs, and the results are summed over the ranks."""

    def __init__(self, section: Section, outputs: int, build: Build, *, bias: bool = False) -> None:
        super().__init__()
        self.parallel = build.parallel
        inputs = section.local(build.parallel)
        self.weight = parameter((outputs, inputs), Placement((section,), dim=1), build.dtype, build.device)
        whole = Placement((Section("", outputs),))
        self.bias = parameter((outputs,), whole, build.dtype, build.device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [T, inputs of this rank]. Returns [T, outputs], whole."""
        if self.parallel.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = self.parallel.all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias
