"""y = x W^T + b, sharded by output (columns) or by input (rows)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from allotrope.kernels.backend import Backend
from allotrope.layers.build import Build
from allotrope.layers.parallel import Placement, Section
from allotrope.layers.weights import WeightMatmul, create_weights, kept_names, pop_weights, shardable
from allotrope.ops.matmul import MATMUL, MatmulSpec
from allotrope.ops.matmul.plain import PLAIN
from allotrope.ops.matmul.weight import Format, Weight


class Linear(nn.Module):
    """Output-sharded or replicated: each rank computes its share of every section of the output.

    `sections`: the outputs that are computed in one product, such as q, k and v. Those that stay quantized have a
    product of their own. `weights`: of each product, once loading has finished; `weight`: the only one, and until then
    the parameter of the plain ones. `quantized_from`: the number of rows from which a product wants them quantized as
    they were written, None for never.
    """

    weight: torch.Tensor | Weight | None

    def __init__(self, inputs: int, sections: tuple[Section, ...], build: Build, *, bias: bool = False) -> None:
        super().__init__()
        self.sizes = [section.local(build.parallel) for section in sections]
        formats = [build.format("weight", section.name) or PLAIN for section in sections]
        # Neighbours of one format: the format, and their outputs.
        self.products: list[tuple[Format, int]] = []
        for format, size in zip(formats, self.sizes, strict=True):
            if self.products and self.products[-1][0] == format:
                size += self.products.pop()[1]
            self.products.append((format, size))
        self.matmuls = [
            WeightMatmul(MATMUL, MatmulSpec(format, build.dtype, size, inputs), build) for format, size in self.products
        ]
        self.quantized_from = fewest(one.quantized_from for one in self.matmuls)
        self.weight = None
        self.weights: tuple[Weight, ...] = ()
        names = kept_names("weight")
        self._names = {format: "weight" if format is PLAIN else next(names) for format in dict.fromkeys(formats)}
        for format, name in self._names.items():
            mine = tuple(section for section, own in zip(sections, formats, strict=True) if own == format)
            shape = (sum(size for own, size in self.products if own == format), inputs)
            matmul = next(one for one in self.matmuls if one.format == format)
            if format is PLAIN:
                del self.weight
            create_weights(self, name, matmul, shape, Placement(mine), build)
        whole = Placement(sections)
        self.bias = build.parameter((sum(self.sizes),), whole) if bias else None

    def finish_loading(self) -> None:
        """Pack the weights for their backends."""
        stored = {format: pop_weights(self, name, format) for format, name in self._names.items()}
        first = dict.fromkeys(stored, 0)
        packed = []
        for (format, size), matmul in zip(self.products, self.matmuls, strict=True):
            packed.append(matmul.pack(stored[format][first[format] : first[format] + size]))
            first[format] += size
        self.weights = tuple(packed)
        self.weight = packed[0] if len(packed) == 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [T, inputs]. Returns [T, outputs of this rank]."""
        if len(self.weights) == 1:
            whole: torch.Tensor = self.matmuls[0].run(x, self.weights[0], self.bias)
            return whole
        y = x.new_empty(len(x), sum(self.sizes))
        start = 0
        for matmul, weight, (_, size) in zip(self.matmuls, self.weights, self.products, strict=True):
            bias = None if self.bias is None else self.bias[start : start + size]
            matmul.run(x, weight, bias, out=y[:, start : start + size])
            start += size
        return y


class RowLinear(nn.Module):
    """Input-sharded: each rank multiplies its share of the inputs, which makes a part of the sum over the ranks.

    `weight`: the parameter of a plain one, and packed for its backend once loading has finished. `quantized_from`: as
    of `Linear`.
    """

    weight: torch.Tensor | Weight

    def __init__(self, section: Section, outputs: int, build: Build, *, bias: bool = False) -> None:
        super().__init__()
        self.parallel = build.parallel
        inputs, placement = section.local(build.parallel), Placement((section,), dim=1)
        self.format = build.format("weight", section.name) or PLAIN
        if not shardable(self.format, section, build):
            self.format = PLAIN
        self.matmul = WeightMatmul(MATMUL, MatmulSpec(self.format, build.dtype, outputs, inputs), build)
        self.quantized_from = self.matmul.quantized_from
        create_weights(self, "weight", self.matmul, (outputs, inputs), placement, build)
        whole = Placement((Section("", outputs),))
        self.bias = build.parameter((outputs,), whole) if bias else None

    def finish_loading(self) -> None:
        """Pack the weight for its backend."""
        self.weight = self.matmul.pack(pop_weights(self, "weight", self.format))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [T, inputs of this rank]. Returns [T, outputs], this rank's part of the sum: rank 0 adds the bias."""
        bias = self.bias if self.parallel.rank == 0 else None
        part: torch.Tensor = self.matmul.run(x, self.weight, bias)
        return part


def fewest(wanted: Iterable[int | None]) -> int | None:
    """The least of `quantized_from` of several that read the same rows."""
    return min((one for one in wanted if one is not None), default=None)


def quantizing(backend: Backend, quantized_from: int | None) -> Callable[..., Any]:
    """`run` of a norm or a gate whose result products read, which want its rows quantized from so many on."""
    if not backend.quantizes or quantized_from is None:
        return backend.run
    return functools.partial(backend.run, quantized_from=quantized_from)
