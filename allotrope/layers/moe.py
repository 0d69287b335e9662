"""Mixture of experts: y = sum over the chosen experts e of w_e * expert_e(x), and perhaps a shared expert.

Owns the work of experts. Tokens are grouped by expert: each expert that was chosen multiplies all of its
tokens at once, and a token's sum does not depend on the tokens beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from allotrope.attention.backend import lazily
from allotrope.cpu.experts import expert_functions
from allotrope.cpu.product import PackedStack, packs
from allotrope.layers.build import Build
from allotrope.layers.linear import Linear, Product, worth_packing
from allotrope.layers.mlp import Gating, MlpSpec
from allotrope.layers.parallel import Placement, Section, parameter
from allotrope.layers.router import Router, RouterSpec
from allotrope.layers.step import LayerStep

# Pairs of token and expert up to which sorting them by expert costs more than reading an expert's weights for each.
FEW_PAIRS = 32


# Rows from which torch's grouped product is faster on a GPU: below, ours reads the weights at copy speed.
_TORCH_ROWS = 8192


class StackedProduct:
    """x W_e^T for rows that are sorted by their expert e.

    On a CPU all are multiplied in one call of our own C, or else small ones in one of PyTorch's and large ones one by
    one, each in the form that a `Product` has. On a GPU all go in one call that never asks the device how many rows an
    expert has, so that it can be captured.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        """`weights`: [E, outputs, inputs]; kept as `small` where a CPU reads them as they are."""
        self.weights: torch.Tensor | None = weights
        self.small = weights if weights.device.type == "cpu" and not worth_packing(weights[0]) else None
        self.products: list[Product] | None = None
        self.packed: PackedStack | None = None
        self.outputs, self.least = weights.shape[1], 0
        # Torch's one call wants rows of whole 16-byte words, in and out; on a GPU it knows bf16 only.
        whole_words = all(size * weights.element_size() % 16 == 0 for size in weights.shape[1:])
        if weights.device.type == "cuda":
            self.in_torch = whole_words and weights.dtype == torch.bfloat16 and has_grouped_product(weights.device)
            self.least = _TORCH_ROWS
        elif packs(weights[0]):
            # The weights given are let go, but for what `small` keeps.
            self.packed, self.weights, self.in_torch = PackedStack(weights), None, False
        else:
            self.in_torch = whole_words and self.small is not None
            if not self.in_torch:
                # These may hold the weights in another order: the ones given are let go.
                self.products, self.weights = [Product(weight) for weight in weights], None

    def __call__(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`rows`: [n, inputs]. `ends`: [E] int32, where each expert's rows end. Returns [n, outputs]."""
        if self.packed is not None:
            return self.packed(rows, ends)
        if self.weights is not None and self.in_torch and len(rows) >= self.least:
            return F.grouped_mm(rows, self.weights.transpose(1, 2), offs=ends)
        if self.weights is not None:
            found: torch.Tensor = grouped(rows, self.weights, ends)
            return found
        assert self.products is not None
        results = rows.new_empty(len(rows), self.outputs)
        start = 0
        for product, end in zip(self.products, ends.tolist(), strict=True):
            if end > start:
                results[start:end] = product(rows[start:end])
                start = end
        return results


grouped = lazily("allotrope.layers.moe_triton", "grouped")


def has_grouped_product(device: torch.device) -> bool:
    """Whether torch multiplies groups of rows on this GPU without asking it for their sizes."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 9


class Experts(nn.Module):
    """All routed experts of a layer. Ranks share the width of every expert.

    `gate_up`: [E, 2 * width, hidden], sections "gate" and "up". `down`: [E, hidden, width]. With `bias`, of both. The
    weights are given up for their `StackedProduct` once loading has finished.
    """

    def __init__(self, count: int, hidden: int, width: int, gating: Gating, build: Build, *, bias: bool) -> None:
        super().__init__()
        self.count, self.gating, self.parallel = count, gating, build.parallel
        local = build.parallel.shard("moe_intermediate_size", width)
        inner = Placement((Section("gate", width, 1), Section("up", width, 1)), experts=count)
        outer = Placement((Section("", width, 1),), dim=1, experts=count)
        kind, device = build.dtype, build.device
        self.gate_up: torch.Tensor | None = parameter((count, 2 * local, hidden), inner, kind, device)
        self.down: torch.Tensor | None = parameter((count, hidden, local), outer, kind, device)
        self.gate_up_bias = self.down_bias = None
        if bias:
            whole = Placement((Section("", hidden),), experts=count)
            self.gate_up_bias = parameter((count, 2 * local), inner, kind, device)
            self.down_bias = parameter((count, hidden), whole, kind, device)
        self.products: tuple[StackedProduct, StackedProduct] | None = None
        self.numbers = torch.arange(count, device=device)

    def finish_loading(self) -> None:
        """Reorder each expert's weights for the device."""
        assert self.gate_up is not None and self.down is not None
        self.products = (StackedProduct(self.gate_up.data), StackedProduct(self.down.data))
        self.gate_up = self.down = None

    def forward(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """`x`: [T, hidden]. `weights` fp32, `experts`: [T, k]. Returns [T, hidden], summed over the ranks."""
        assert self.products is not None
        gate_up, down = self.products
        compiled = expert_functions(x.dtype, x.device)
        # Once, not on every rank.
        down_bias = self.down_bias if self.parallel.rank == 0 else None
        few = compiled is not None and experts.numel() <= FEW_PAIRS
        if compiled is not None and few and gate_up.small is not None and down.small is not None:
            pairs = ((gate_up.small, self.gate_up_bias), (down.small, down_bias))
            return self.parallel.all_reduce(compiled.mix(x, weights, experts, *pairs, self.gating.compiled))
        ends, source, owner, place = self._group(experts)
        inner = gate_up(x.index_select(0, source), ends)
        if self.gate_up_bias is not None:
            inner += self.gate_up_bias.index_select(0, owner)
        results = down(self.gating(inner), ends)
        if compiled is not None:
            return self.parallel.all_reduce(compiled.combine(results, weights, place, experts, down_bias))
        # Reading rows in another order is several times faster than writing them so.
        back = results.index_select(0, place)
        summed = torch.bmm(weights[:, None], back.float().unflatten(0, experts.shape)).squeeze(1)
        if down_bias is not None:
            # Each token's mix of the biases of its experts.
            shares = weights.new_zeros(len(x), self.count).scatter_add_(1, experts, weights)
            summed += shares @ down_bias.float()
        return self.parallel.all_reduce(summed.to(x.dtype))

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
    gating: Gating = Gating()
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
        self.experts = Experts(count, spec.hidden, spec.width, spec.gating, build, bias=spec.bias)
        self.shared = spec.shared.build(build) if spec.shared is not None else None
        self.shared_gate = Linear(spec.hidden, (Section("", 1),), build) if spec.shared_gate else None

    def forward(self, x: torch.Tensor, here: LayerStep) -> torch.Tensor:
        """`x`: [T, hidden]. Returns the same shape."""
        y = self.experts(x, *self.router(x, here.step.ids))
        if self.shared is None:
            return y
        shared = self.shared(x, here)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(self.shared_gate(x))
        return y + shared
