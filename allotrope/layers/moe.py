"""Mixture of experts: y = sum over the chosen experts e of w_e * expert_e(x), plus the shared expert, if there is one.

Owns the products of experts. Tokens are grouped by expert: each expert that was chosen multiplies all of its
tokens at once, and a token's sum does not depend on the tokens beside it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from allotrope.kernels.side_stream import overlap
from allotrope.layers.build import Build
from allotrope.layers.linear import Linear, fewest
from allotrope.layers.mlp import MlpSpec
from allotrope.layers.parallel import Parallel, Placement, Section
from allotrope.layers.router import Router, RouterSpec
from allotrope.layers.step import LayerStep
from allotrope.layers.weights import WeightMatmul, create_weights, inner_section, pop_weights, shardable
from allotrope.ops.gated_activation import GATED_ACTIVATION, GatedActivation, GatedActivationSpec
from allotrope.ops.grouped_matmul import GROUPED_MATMUL
from allotrope.ops.matmul import MatmulSpec
from allotrope.ops.matmul.onednn import small_reasons
from allotrope.ops.matmul.plain import PLAIN, PlainWeight
from allotrope.ops.matmul.tile_tables import TileTables
from allotrope.ops.matmul.weight import Format, Weight
from allotrope.ops.moe_combine import MOE_COMBINE, CombineSpec, add_shared
from allotrope.ops.moe_experts import MOE_EXPERTS, MoeExpertsBackend, MoeExpertsSpec
from allotrope.ops.moe_group import MOE_GROUP, GroupSpec, TokenGroups

SharedOutput = tuple[torch.Tensor | None, torch.Tensor | None]
"""The output of the shared expert [T, hidden], and the gate [T, 1] whose sigmoid it is multiplied by; None: there is
none."""


class Experts(nn.Module):
    """The routed experts of a layer. Tensor parallel: ranks share the width of every expert. Expert parallel: each rank
    holds whole experts.

    `gate_up`: [E, 2 * width, hidden], sections "gate" and "up". `down`: [E, hidden, width]. `bias`: both products have
    one. Plain weights are parameters until loading has finished; then they are packed for their backends. `slots`: see
    `ExpertPlacement.slots`. `load`: [experts] tokens of each expert so far, where they are counted.
    """

    gate_up: torch.Tensor | Weight
    down: torch.Tensor | Weight
    slots: torch.Tensor
    load: torch.Tensor | None

    def __init__(
        self, count: int, hidden: int, width: int, gating: GatedActivation, build: Build, *, bias: bool
    ) -> None:
        super().__init__()
        holders, rank = build.expert_placement(count), build.parallel.rank
        held = None if holders is None else holders.held[rank]
        self.rank = rank
        if holders is not None:
            # Each expert is whole.
            build = dataclasses.replace(build, parallel=Parallel())
            self.register_buffer("slots", holders.slots(rank).to(build.device), persistent=False)
        self.count, self.gating = count if held is None else len(held), gating
        counts = torch.zeros(count, dtype=torch.int64, device=build.device) if build.counts_experts else None
        self.register_buffer("load", counts, persistent=False)
        # With expert parallel, the number of all experts of the layer; else 0.
        self.experts_of_layer = 0 if held is None else count
        self._activate = build.chooser.choose(GATED_ACTIVATION, GatedActivationSpec(gating, build.dtype)).run
        kind = build.dtype
        formats = build.format("gate_up", "gate") or PLAIN, build.format("down", "") or PLAIN
        if PLAIN in formats or build.format("gate_up", "up") != build.format("gate_up", "gate"):
            formats = PLAIN, PLAIN
        section = inner_section("moe_intermediate_size", width, formats, build)
        if not all(shardable(format, section, build) for format in formats):
            formats = PLAIN, PLAIN
        self.formats: tuple[Format, Format] = formats
        local = section.local(build.parallel)
        gates = tuple(dataclasses.replace(section, name=name) for name in ("gate", "up"))
        inner = Placement(gates, experts=count, held=held)
        outer = Placement((section,), dim=1, experts=count, held=held)
        shapes = (self.count, 2 * local, hidden), (self.count, hidden, local)
        specs = [
            MatmulSpec(format, kind, *shape[1:], self.count, self.experts_of_layer)
            for format, shape in zip(formats, shapes, strict=True)
        ]
        self.matmuls = tuple(WeightMatmul(GROUPED_MATMUL, spec, build) for spec in specs)
        self.quantized_from = self.matmuls[0].quantized_from
        for name, matmul, shape, placement in zip(
            ("gate_up", "down"), self.matmuls, shapes, (inner, outer), strict=True
        ):
            create_weights(self, name, matmul, shape, placement, build)
        self.gate_up_bias = self.down_bias = None
        if bias:
            whole = Placement((Section("", hidden),), experts=count, held=held)
            self.gate_up_bias = build.parameter((self.count, 2 * local), inner)
            self.down_bias = build.parameter((self.count, hidden), whole)
        # On a CPU, plain weights have kernels of their own, and small ones are kept unpacked as well, for few rows.
        self.plain_on_cpu = PLAIN in formats and build.chooser.chip.vendor == "cpu"
        self.reads_stored = self.plain_on_cpu and held is None and all(small_reasons(spec) for spec in specs)
        self.stored: tuple[torch.Tensor, ...] = ()
        chooser = build.chooser
        # With expert parallel, one group more: choices of experts that other ranks hold.
        self._groups = self.count + (held is not None)
        self._group = chooser.choose(MOE_GROUP, GroupSpec(self._groups)).run
        self._combine = chooser.choose(MOE_COMBINE, CombineSpec(hidden, kind)).run
        self._whole_experts: MoeExpertsBackend | None = None
        if self.reads_stored:
            self._whole_experts = chooser.choose(MOE_EXPERTS, MoeExpertsSpec(hidden, local, kind))

    def copied_bytes(self) -> int:
        """Bytes that loading adds: on a CPU, small plain weights are kept both packed and unpacked."""
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
        shared: Callable[[], SharedOutput] = lambda: (None, None),
    ) -> torch.Tensor:
        """`x`: [T, hidden]. `weights` fp32, `experts`: [T, k]. `shared`: returns this rank's part of the shared
        expert's output, and is called last. Returns [T, hidden], this rank's part of the sum over the ranks.
        """
        held = None
        if self.experts_of_layer:
            experts, held = self._slots_of(experts), self.count
        # Where ranks share the width of an expert, one of them adds its bias.
        down_bias = self.down_bias if self.rank == 0 or held is not None else None
        y = self._run_ungrouped(x, weights, experts, down_bias)
        if y is not None:
            return add_shared(y, *shared())
        groups = self.grouped(experts)
        results = self._run_grouped(x, groups)
        sums = (results, weights, groups.inverse, experts, x.dtype, down_bias, *shared())
        part: torch.Tensor = self._combine(*sums, held)
        return part

    def record_load(self, experts: torch.Tensor, ctx: LayerStep) -> None:
        """Add the tokens of each expert to `load`, if there is one, without padding rows. `experts`: [T, k]."""
        if self.load is not None:
            counted = ctx.step.counted[:, None].expand_as(experts)
            self.load.scatter_add_(0, experts.flatten(), counted.flatten())

    def _slots_of(self, experts: torch.Tensor) -> torch.Tensor:
        """`experts`: [T, k] of the layer. Returns the rank's own number of each, and `count` for one that another rank
        serves."""
        slots: torch.Tensor = self.slots
        if len(slots) == 1:
            return slots[0][experts]
        # Tokens take the copies of redundant experts in turn.
        turns = torch.arange(len(experts), device=experts.device) % len(slots)
        return slots[turns[:, None], experts]

    def grouped(self, experts: torch.Tensor) -> TokenGroups:
        """`experts`: [T, k]. The pairs of token and choice sorted by expert. Those of other ranks' experts come last,
        behind the last offset."""
        groups: TokenGroups = self._group(experts, self._groups)
        if not self.experts_of_layer:
            return groups
        groups = groups._replace(expert_offsets=groups.expert_offsets[:-1])
        if experts.device.type == "cpu":
            # On a GPU this would wait for the device, and kernels skip the rows behind the last offset by themselves.
            rows = int(groups.expert_offsets[-1])
            groups = groups._replace(
                sorted_token_ids=groups.sorted_token_ids[:rows], expert_ids=groups.expert_ids[:rows]
            )
        return groups

    def _run_grouped(self, x: torch.Tensor, groups: TokenGroups) -> torch.Tensor:
        """The experts' outputs [pairs, hidden], in the order of `groups`."""
        gate_up, down = self.matmuls
        offsets, token_ids = groups.expert_offsets, groups.sorted_token_ids
        results: torch.Tensor
        if self.plain_on_cpu:
            inner = gate_up.run(x, self.gate_up, offsets, token_ids, self.gate_up_bias, expert_ids=groups.expert_ids)
            results = down.run(self._activate(inner, self.gating), self.down, offsets)
        else:
            tables: TileTables = {}
            inner = self.run_gate_up(x, offsets, token_ids, tables)
            results = down.run(inner, self.down, offsets, tile_tables=tables)
        return results

    def run_gate_up(
        self,
        x: torch.Tensor,
        expert_offsets: torch.Tensor,
        sorted_token_ids: torch.Tensor,
        tile_tables: TileTables | None = None,
    ) -> torch.Tensor:
        """The first product with its gated activation: [pairs, width], in the order of experts."""
        inner: torch.Tensor = self.matmuls[0].run(
            x,
            self.gate_up,
            expert_offsets,
            sorted_token_ids,
            self.gate_up_bias,
            self.gating,
            tile_tables=tile_tables,
        )
        return inner

    def _run_ungrouped(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, down_bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The weighted sum over each token's experts, where they are too few to be worth grouping; else None."""
        backend = self._whole_experts
        if backend is None or not self.stored or experts.numel() > backend.max_pairs:
            return None
        pairs = ((self.stored[0], self.gate_up_bias), (self.stored[1], down_bias))
        y: torch.Tensor = backend.run(x, weights, experts, *pairs, self.gating)
        return y


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
        self.quantized_from = fewest(one.quantized_from for one in (self.experts, self.shared) if one is not None)
        self.shared_gate = None
        if spec.shared_gate:
            self.shared_gate = Linear(spec.hidden, (Section("", 1),), build.at("shared_gate"))

    def forward(self, x: torch.Tensor, ctx: LayerStep) -> torch.Tensor:
        """`x`: [T, hidden]. Returns the same shape, this rank's part of the sum over the ranks."""
        shared: Callable[[], SharedOutput] = functools.partial(self._run_shared, x, ctx)
        if self.shared is not None:
            shared = overlap(shared, x)
        weights, experts = self.router(x, ctx.step.ids if self.router.table is None else ctx.step.all_ids)
        self.experts.record_load(experts, ctx)
        return self.experts(x, weights, experts, shared)

    def _run_shared(self, x: torch.Tensor, ctx: LayerStep) -> SharedOutput:
        shared = self.shared(x, ctx) if self.shared is not None else None
        return shared, self.shared_gate(x) if self.shared_gate is not None else None
