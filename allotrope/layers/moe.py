"""Mixture of experts: y = sum over the chosen experts e of w_e * expert_e(x), and perhaps a shared expert.

Owns the work of experts. Tokens are grouped by expert: each expert that was chosen multiplies all of its
tokens at once, and a token's sum does not depend on the tokens beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.kernels.backend import choose
from allotrope.kernels.chip import chip_of
from allotrope.kernels.side_stream import beside
from allotrope.layers.build import Build
from allotrope.layers.linear import SMALLEST_PACKED, Linear, Product, worth_packing
from allotrope.layers.mlp import MlpSpec
from allotrope.layers.parallel import Placement, Section, parameter
from allotrope.layers.router import Router, RouterSpec
from allotrope.layers.step import LayerStep
from allotrope.ops.gated_activation import GATED_ACTIVATION, GatedActivation, GatedActivationSpec
from allotrope.ops.matmul.cpu import PackedStack, packed_bytes, packs
from allotrope.ops.matmul.packed_weight import prepare_plain
from allotrope.ops.matmul.product import QuantizedStack, Tables, declare, divides, multiply, taken
from allotrope.ops.moe_combine import MOE_COMBINE, CombineSpec, add_shared
from allotrope.ops.moe_experts import MOE_EXPERTS, MoeExpertsBackend, MoeExpertsSpec
from allotrope.ops.moe_group import MOE_GROUP, GroupSpec, TokenGroups

# Rows from which torch's grouped product of plain weights is faster on a GPU than ours.
_TORCH_ROWS = 8192


class StackedProduct:
    """x W_e^T for rows that are sorted by their expert e, on a CPU.

    All are multiplied in one call of our own C, or else small ones in one of PyTorch's and large ones one by one, each
    in the form that a `Product` has.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        """`weights`: [E, outputs, inputs]; kept as `small` where they are read as they are."""
        self.small = weights if not worth_packing(weights[0]) else None
        self.products: list[Product] | None = None
        self.packed: PackedStack | None = None
        self.weights: torch.Tensor | None = None
        self.outputs = weights.shape[1]
        # Torch's one call wants rows of whole 16-byte words, in and out.
        whole_words = all(size * weights.element_size() % 16 == 0 for size in weights.shape[1:])
        # The weights given are let go, but for what `small` keeps.
        if packs(weights[0]):
            self.packed = PackedStack(weights)
        elif whole_words and self.small is not None:
            self.weights = weights
        else:
            self.products = [Product(weight) for weight in weights]

    def __call__(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`rows`: [n, inputs]. `ends`: [E] int32, where each expert's rows end. Returns [n, outputs]."""
        if self.packed is not None:
            return self.packed(rows, ends)
        if self.weights is not None:
            return F.grouped_mm(rows, self.weights.transpose(1, 2), offs=ends)
        assert self.products is not None
        results = rows.new_empty(len(rows), self.outputs)
        start = 0
        for product, end in zip(self.products, ends.tolist(), strict=True):
            if end > start:
                results[start:end] = product(rows[start:end])
                start = end
        return results


class DeviceStack:
    """act(x W_e^T + b_e) on a GPU, in one launch or two, which never ask the device how many rows an expert has."""

    def __init__(self, weights: torch.Tensor) -> None:
        """`weights`: [E, outputs, inputs]."""
        self.prepared = prepare_plain(weights)
        whole_words = all(size * weights.element_size() % 16 == 0 for size in weights.shape[1:])
        self.in_torch = whole_words and weights.dtype == torch.bfloat16 and has_grouped_product(weights.device)

    def __call__(
        self,
        x: torch.Tensor,
        ends: torch.Tensor,
        source: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        gating: GatedActivation | None = None,
        tables: Tables | None = None,
    ) -> torch.Tensor:
        """As `QuantizedStack`."""
        rows = len(x) if source is None else len(source)
        if bias is None and self.in_torch and rows >= _TORCH_ROWS:
            rows_of = x if source is None else x.index_select(0, source)
            y = F.grouped_mm(rows_of, self.prepared.codes.transpose(1, 2), offs=ends)
            if gating is None:
                return y
            spec = GatedActivationSpec(gating, y.dtype)
            activated: torch.Tensor = choose(GATED_ACTIVATION, spec, chip_of(y.device)).backend.run(y, gating)
            return activated
        given = {"bias": bias, "ends": ends, "source": source, "gating": gating, "tables": tables}
        found: torch.Tensor = multiply(x, self.prepared, **given)
        return found


def has_grouped_product(device: torch.device) -> bool:
    """Whether torch multiplies groups of rows on this GPU without asking it for their sizes."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 9


Stack = DeviceStack | QuantizedStack
Added = tuple[torch.Tensor | None, torch.Tensor | None]
"""What every token gets beside its experts', [T, hidden], and a gate [T, 1] whose sigmoid that is multiplied by."""


class Experts(nn.Module):
    """All routed experts of a layer. Ranks share the width of every expert.

    `gate_up`: [E, 2 * width, hidden], sections "gate" and "up". `down`: [E, hidden, width]. With `bias`, of both. The
    weights are given up for their `StackedProduct` once loading has finished.
    """

    def __init__(
        self, count: int, hidden: int, width: int, gating: GatedActivation, build: Build, *, bias: bool
    ) -> None:
        super().__init__()
        self.count, self.gating, self.parallel = count, gating, build.parallel
        self._activate = build.chooser.choose(GATED_ACTIVATION, GatedActivationSpec(gating, build.dtype)).run
        local = build.parallel.shard("moe_intermediate_size", width)
        inner = Placement((Section("gate", width, 1), Section("up", width, 1)), experts=count)
        outer = Placement((Section("", width, 1),), dim=1, experts=count)
        kind, device = build.dtype, build.device
        self.gate_up: torch.Tensor | None = None
        self.down: torch.Tensor | None = None
        self.formats = build.format("gate_up", "gate"), build.format("down", "")
        if not all(format is not None and divides(format, outer.sections[0], build) for format in self.formats):
            self.formats = None, None
        for name, format, size, placement in (
            ("gate_up", self.formats[0], (count, 2 * local, hidden), inner),
            ("down", self.formats[1], (count, hidden, local), outer),
        ):
            if format is None:
                setattr(self, name, parameter(size, placement, kind, device))
            else:
                declare(self, name, format, size, placement, build)
        self.gate_up_bias = self.down_bias = None
        if bias:
            whole = Placement((Section("", hidden),), experts=count)
            self.gate_up_bias = parameter((count, 2 * local), inner, kind, device)
            self.down_bias = parameter((count, hidden), whole, kind, device)
        # On a CPU; and elsewhere, or where weights stay quantized.
        self.products: tuple[StackedProduct, StackedProduct] | None = None
        self.stacks: tuple[Stack, Stack] | None = None
        chooser = build.chooser
        self._group = chooser.choose(MOE_GROUP, GroupSpec(count)).run
        self._combine = chooser.choose(MOE_COMBINE, CombineSpec(hidden, kind, build.parallel.size)).run
        self._whole_experts: MoeExpertsBackend | None = None
        if chooser.chip.vendor == "cpu" and self.formats == (None, None):
            self._whole_experts = chooser.choose(MOE_EXPERTS, MoeExpertsSpec(hidden, local, kind))

    def copied_bytes(self, device: torch.device) -> int:
        """Bytes that loading adds on `device`: small plain experts are there in two orders on a CPU."""
        total = 0
        for weights in (self.gate_up, self.down):
            if weights is None or device.type != "cpu" or weights[0].numel() >= SMALLEST_PACKED:
                continue
            if packs(torch.empty(weights.shape[1:], dtype=weights.dtype)):
                total += packed_bytes(weights)
        return total

    def finish_loading(self) -> None:
        """Put each expert's weights into the form that the device multiplies fastest."""
        first, second = self.formats
        if first is not None and second is not None:
            stacks = QuantizedStack(taken(self, "gate_up", first)), QuantizedStack(taken(self, "down", second))
            self.stacks = stacks
            return
        assert self.gate_up is not None and self.down is not None
        made = DeviceStack if self.gate_up.device.type == "cuda" else StackedProduct
        pair: Any = made(self.gate_up.data), made(self.down.data)
        self.gate_up = self.down = None
        self.products, self.stacks = (None, pair) if made is DeviceStack else (pair, None)

    def forward(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        added: Callable[[], Added] = lambda: (None, None),
    ) -> torch.Tensor:
        """`x`: [T, hidden]. `weights` fp32, `experts`: [T, k]. `added` is asked for last. Returns [T, hidden], summed
        over the ranks.
        """
        # Once, not on every rank.
        down_bias = self.down_bias if self.parallel.rank == 0 else None
        y = self._few(x, weights, experts, down_bias) if self.stacks is None else None
        if y is not None:
            y = self.parallel.all_reduce(y)
            return add_shared(y, *added())
        groups = self.grouped(experts)
        if self.stacks is None:
            results = self._on_cpu(x, groups)
        else:
            expert_offsets, sorted_token_ids = groups.expert_offsets, groups.sorted_token_ids
            tables: Tables = {}
            inner = self.first(x, expert_offsets, sorted_token_ids, tables)
            results = self.stacks[1](inner, expert_offsets, tables=tables)
        combined = (results, weights, groups.inverse, experts, x.dtype, down_bias)
        if self.parallel.size == 1:
            # One launch for all that is left to add.
            summed: torch.Tensor = self._combine(*combined, *added())
            return summed
        y = self.parallel.all_reduce(self._combine(*combined))
        return add_shared(y, *added())

    def grouped(self, experts: torch.Tensor) -> TokenGroups:
        """`experts`: [T, k]. The pairs of token and choice, sorted by expert."""
        groups: TokenGroups = self._group(experts, self.count)
        return groups

    def first(
        self, x: torch.Tensor, ends: torch.Tensor, source: torch.Tensor, tables: Tables | None = None
    ) -> torch.Tensor:
        """What the chosen experts hold between their two products: rows in the order of experts."""
        assert self.stacks is not None
        return self.stacks[0](x, ends, source, self.gate_up_bias, self.gating, tables)

    def _few(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, down_bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The sum over each token's experts where they are too few to be sorted; None where they are not."""
        assert self.products is not None
        gate_up, down = self.products[0].small, self.products[1].small
        backend = self._whole_experts
        if backend is None or experts.numel() > backend.max_pairs or gate_up is None or down is None:
            return None
        pairs = ((gate_up, self.gate_up_bias), (down, down_bias))
        y: torch.Tensor = backend.run(x, weights, experts, *pairs, self.gating)
        return y

    def _on_cpu(self, x: torch.Tensor, groups: TokenGroups) -> torch.Tensor:
        """What the chosen experts make: rows in the order of experts."""
        assert self.products is not None
        gate_up, down = self.products
        inner = gate_up(x.index_select(0, groups.sorted_token_ids), groups.expert_offsets)
        if self.gate_up_bias is not None:
            inner += self.gate_up_bias.index_select(0, groups.expert_ids)
        return down(self._activate(inner, self.gating), groups.expert_offsets)


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """`width`: of each routed expert. `bias`: of the experts' projections. `shared`: an expert that every token takes;
    with `shared_gate`, times sigmoid of a learned product with x.
    """

    hidden: int
    width: int
    router: RouterSpec
    gating: GatedActivation = GatedActivation()
    bias: bool = False
    shared: MlpSpec | None = None
    shared_gate: bool = False

    def build(self, build: Build) -> Moe:
        return Moe(self, build)


class Moe(nn.Module):
    def __init__(self, spec: MoeSpec, build: Build) -> None:
        super().__init__()
        count = spec.router.experts
        self.router = Router(spec.router, spec.hidden, build)
        self.experts = Experts(count, spec.hidden, spec.width, spec.gating, build.at("experts"), bias=spec.bias)
        self.shared = spec.shared.build(build.at("shared")) if spec.shared is not None else None
        self.shared_gate = None
        if spec.shared_gate:
            self.shared_gate = Linear(spec.hidden, (Section("", 1),), build.at("shared_gate"))

    def forward(self, x: torch.Tensor, here: LayerStep) -> torch.Tensor:
        """`x`: [T, hidden]. Returns the same shape."""
        added: Callable[[], Added] = functools.partial(self._added, x, here)
        if self.shared is not None and self.experts.parallel.size == 1:
            # Ranks that talk to each other need one order for all they say.
            added = beside(added, x)
        weights, experts = self.router(x, here.step.ids)
        return self.experts(x, weights, experts, added)

    def _added(self, x: torch.Tensor, here: LayerStep) -> Added:
        shared = self.shared(x, here) if self.shared is not None else None
        return shared, self.shared_gate(x) if self.shared_gate is not None else None
