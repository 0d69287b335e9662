"""Mixture of experts: y = sum over the chosen experts e of w_e * expert_e(x), and perhaps a shared expert.

Owns the work of experts. Tokens are grouped by expert: each expert that was chosen multiplies all of its
tokens at once, and a token's sum does not depend on the tokens beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from allotrope.kernels.side_stream import overlap
from allotrope.layers.build import Build
from allotrope.layers.linear import Linear
from allotrope.layers.mlp import MlpSpec
from allotrope.layers.parallel import Placement, Section, parameter
from allotrope.layers.router import Router, RouterSpec
from allotrope.layers.step import LayerStep
from allotrope.layers.weights import WeightMatmul, create_weights, pop_weights, shardable
from allotrope.ops.device_kernels import device_kernels
from allotrope.ops.gated_activation import GATED_ACTIVATION, GatedActivation, GatedActivationSpec
from allotrope.ops.grouped_matmul import GROUPED_MATMUL
from allotrope.ops.grouped_matmul.reference import TileTables
from allotrope.ops.matmul import MatmulSpec
from allotrope.ops.matmul.onednn import small_reasons
from allotrope.ops.matmul.plain import PLAIN, PlainWeight
from allotrope.ops.matmul.weight import Format, Weight
from allotrope.ops.moe_route.cpu import expert_functions

# Pairs of token and expert up to which sorting them by expert costs more than reading an expert's weights for each.
FEW_PAIRS = 32


Added = tuple[torch.Tensor | None, torch.Tensor | None]
"""What every token gets beside its experts', [T, hidden], and a gate [T, 1] whose sigmoid that is multiplied by."""


class Experts(nn.Module):
    """All routed experts of a layer. Ranks share the width of every expert.

    `gate_up`: [E, 2 * width, hidden], sections "gate" and "up". `down`: [E, hidden, width]. With `bias`, of both. Plain
    ones are parameters until loading has finished; then both are packed for their backends.
    """

    gate_up: torch.Tensor | Weight
    down: torch.Tensor | Weight

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
        formats = build.format("gate_up", "gate") or PLAIN, build.format("down", "") or PLAIN
        if PLAIN in formats or not all(shardable(format, outer.sections[0], build) for format in formats):
            formats = PLAIN, PLAIN
        self.formats: tuple[Format, Format] = formats
        shapes = (count, 2 * local, hidden), (count, hidden, local)
        specs = [MatmulSpec(format, kind, *shape[1:], count) for format, shape in zip(formats, shapes, strict=True)]
        self.matmuls = tuple(WeightMatmul(GROUPED_MATMUL, spec, build) for spec in specs)
        for name, matmul, shape, placement in zip(
            ("gate_up", "down"), self.matmuls, shapes, (inner, outer), strict=True
        ):
            create_weights(self, name, matmul, shape, placement, build)
        self.gate_up_bias = self.down_bias = None
        if bias:
            whole = Placement((Section("", hidden),), experts=count)
            self.gate_up_bias = parameter((count, 2 * local), inner, kind, device)
            self.down_bias = parameter((count, hidden), whole, kind, device)
        # Plain weights on a CPU have a way of their own; small ones another for a few rows, as they are stored.
        self.plain_on_cpu = PLAIN in formats and build.chooser.chip.vendor == "cpu"
        self.reads_stored = self.plain_on_cpu and all(small_reasons(spec) for spec in specs)
        self.stored: tuple[torch.Tensor, ...] = ()
        self.numbers = torch.arange(count, device=device)

    def copied_bytes(self) -> int:
        """Bytes that loading adds: small plain experts are there in two orders on a CPU."""
        if not self.reads_stored:
            return 0
        weights = zip(self.matmuls, (self.gate_up, self.down), strict=True)
        return sum(one.backend.copy_bytes(w.shape, w.dtype) for one, w in weights if isinstance(w, torch.Tensor))

    def finish_loading(self) -> None:
        """Pack the weights for their backends."""
        for name, format, matmul in zip(("gate_up", "down"), self.formats, self.matmuls, strict=True):
            weight = pop_weights(self, name, format)
            if self.reads_stored and isinstance(weight, PlainWeight):
                self.stored = (*self.stored, weight.values)
            setattr(self, name, matmul.pack(weight))

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
        if self.plain_on_cpu:
            y = self._on_cpu(x, weights, experts, down_bias)
        else:
            routing = device_kernels("moe_route", x.device)
            ends, source, place = self.grouped(experts)
            tables: TileTables = {}
            inner = self.first(x, ends, source, tables)
            results = self.matmuls[1].run(inner, self.down, ends, tile_tables=tables)
            if routing is not None and self.parallel.size == 1:
                shared, gate = added()
                # One launch for all that is left to add.
                summed: torch.Tensor = routing.combine(
                    results, weights, place, x.dtype, shared=shared, gate=gate, bias=down_bias, experts=experts
                )
                return summed
            y = self._combine(results, weights, experts, place, down_bias).to(x.dtype)
        y = self.parallel.all_reduce(y)
        shared, gate = added()
        if shared is None:
            return y
        return y + (shared if gate is None else shared * torch.sigmoid(gate))

    def grouped(self, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`experts`: [T, k]. Where each expert's rows end [E], each row's token, and the row of each pair."""
        grouping = device_kernels("moe_group", experts.device)
        if grouping is None or self.count > grouping.MOST_EXPERTS:
            ends, source, _, place = self._group(experts)
        else:
            ends, source, _, place = grouping.group(experts, self.count)
        return ends, source, place

    def first(
        self, x: torch.Tensor, ends: torch.Tensor, source: torch.Tensor, tables: TileTables | None = None
    ) -> torch.Tensor:
        """What the chosen experts hold between their two products: rows in the order of experts."""
        inner: torch.Tensor = self.matmuls[0].run(
            x, self.gate_up, ends, source, self.gate_up_bias, self.gating, tile_tables=tables
        )
        return inner

    def _on_cpu(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, down_bias: torch.Tensor | None
    ) -> torch.Tensor:
        compiled = expert_functions(x.dtype, x.device)
        few = compiled is not None and experts.numel() <= FEW_PAIRS
        if compiled is not None and few and self.stored:
            pairs = ((self.stored[0], self.gate_up_bias), (self.stored[1], down_bias))
            return compiled.mix(x, weights, experts, *pairs, self.gating.compiled)
        ends, source, owner, place = self._group(experts)
        gate_up, down = self.matmuls
        inner = gate_up.run(x, self.gate_up, ends, source, self.gate_up_bias, expert_ids=owner)
        results = down.run(self._activate(inner, self.gating), self.down, ends)
        if compiled is not None:
            return compiled.combine(results, weights, place, experts, down_bias)
        return self._combine(results, weights, experts, place, down_bias).to(x.dtype)

    def _combine(
        self,
        results: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        place: torch.Tensor,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, hidden] fp32. Reading rows in another order is several times faster than writing them so."""
        back = results.index_select(0, place)
        summed = torch.bmm(weights[:, None], back.float().unflatten(0, experts.shape)).squeeze(1)
        if down_bias is not None:
            # Each token's mix of the biases of its experts.
            shares = weights.new_zeros(len(weights), self.count).scatter_add_(1, experts, weights)
            summed += shares @ down_bias.float()
        return summed

    def _group(self, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where each expert's rows end, each row's token and expert, and the row of each pair of token and choice."""
        compiled = expert_functions(torch.float32, experts.device)
        if compiled is not None:
            return compiled.group(experts, self.count)
        owner, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(owner, self.numbers, right=True, out_int32=True)
        return ends, order // experts.shape[1], owner, order.argsort()


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
            added = overlap(added, x)
        weights, experts = self.router(x, here.step.ids)
        return self.experts(x, weights, experts, added)

    def _added(self, x: torch.Tensor, here: LayerStep) -> Added:
        shared = self.shared(x, here) if self.shared is not None else None
        return shared, self.shared_gate(x) if self.shared_gate is not None else None
