"""The roofline cost of a step: bytes that must move and operations that must be computed, by class of kernel.

Classes are the families of attention, `experts`, `dense` (all other projections), `head` and `rest`. Counted are
weights, cached rows and states, and what attention is given and returns; not what passes between other kernels, which
could be fused. All that a draft model takes is the class `draft`. Owns which class a module is counted in; families
count their own attention. Must not know models' names, kernels, times.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from allotrope.attention.cost import Lengths, StepCost
from allotrope.attention.family import Spec
from allotrope.attention.registry import FAMILIES
from allotrope.engine.load_plan import LoadPlan
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.layers.embedding import Embedding, Head
from allotrope.layers.hyper_connection import HyperConnection
from allotrope.layers.linear import Linear, RowLinear
from allotrope.layers.mixers.csa import GroupedLinear
from allotrope.layers.moe import Experts
from allotrope.layers.norm import AllHeadsNorm, RMSNorm
from allotrope.layers.parallel import placement_of
from allotrope.layers.router import Router, RouterSpec
from allotrope.layers.weights import SCALES, format_of, packed_bytes
from allotrope.ops.matmul.fp8 import Fp8

EXPERTS, DENSE, HEAD, REST, DRAFT = "experts", "dense", "head", "rest", "draft"
# To route, to group, two products, and to combine.
_EXPERT_LAUNCHES = 5
# Rows of the smallest and the largest tile of a product of experts.
_TILES = (16, 128)


@dataclass(frozen=True)
class Counted:
    """A module, and how its own parameters and kernels are counted.

    `layer`: that it belongs to; None for the embedding, the last norm and the head. `router`: who chooses among these
    experts. `in_ffn`: whether it is part of a feed-forward block, whose rows are those of all ranks that share it.
    `launches`: kernels of a step, if they are not one for each of its products.
    """

    module: nn.Module
    kind: str
    layer: int | None
    router: RouterSpec | None = None
    in_ffn: bool = False
    launches: int = 0


@dataclass(frozen=True)
class StepWork:
    """What a rank does in a step. `classes`: the roofline cost, by class. The rest takes time and is no part of that
    cost, since other kernels could do without it: `launches` kernels, `passed` bytes between them, `padding` of tiles
    of experts that have fewer rows."""

    classes: dict[str, StepCost]
    launches: int
    passed: int
    padding: StepCost

    @property
    def cost(self) -> StepCost:
        """The roofline cost of all classes."""
        return _sum(self.classes.values())


class ModelCost:
    """The roofline cost of one rank in any step; it reads the model once."""

    def __init__(self, load_plan: LoadPlan) -> None:
        item, model = load_plan.build.dtype.itemsize, load_plan.meta_model
        self._model = LayersCost(load_plan.own_specs, counted_modules(model), item)
        self._draft: LayersCost | None = None
        # The first pass of its draft model makes no draft.
        self._chains_alone = load_plan.reads_tokens_alone
        if (draft := load_plan.meta_draft()) is not None:
            modules = counted_modules(draft)
            if not any(one.kind == HEAD for one in modules):
                # It shares that of the model.
                modules.append(Counted(model.head, HEAD, None))
            self._draft = LayersCost(load_plan.draft_specs, modules, item)

    def __call__(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], logits: int | None = None
    ) -> dict[str, StepCost]:
        """The cost of a step, by class, without classes that the model lacks.

        `query_lens`, `seq_lens`: per request, new tokens, and tokens visible after the step; drafts that are verified
        are new tokens of their request. `logits`: tokens that are sampled; default: the last of each request. Weights
        are read once, as they are stored; of E experts of which each token takes k, those that T tokens are expected
        to choose, E (1 - (1 - k/E)^T).
        """
        return self.work(query_lens, seq_lens, logits).classes

    def work(self, query_lens: Sequence[int], seq_lens: Sequence[int], logits: int | None = None) -> StepWork:
        """The same, and what else takes time. The arguments are those of `__call__`."""
        return self._model(query_lens, seq_lens, len(query_lens) if logits is None else logits)

    def drafted(self, context: int, drafts: Sequence[int]) -> dict[str, StepCost]:
        """The cost of verifying `drafts` [B] tokens of requests that see `context` tokens, and of the passes of the
        draft model that make as many. The first pass has the rows of the step, the others one for each draft, but for
        those that the first one makes."""
        lens = tuple(1 + count for count in drafts), tuple(context + count for count in drafts)
        found = self(*lens, sum(lens[0]))
        if self._draft is not None:
            chosen = 0 if self._chains_alone else 1
            found[DRAFT] = self._draft(*lens, chosen * sum(count > 0 for count in drafts)).cost
            for step in range(1, max(drafts, default=0) + 1 - chosen):
                rows = sum(count >= step + chosen for count in drafts)
                found[DRAFT] += self._draft((1,) * rows, (context + step,) * rows, rows).cost
        return found


@dataclass(frozen=True)
class _Rows:
    """Which rows of a step some weights multiply: those of the class `kind`, of a feed-forward block or not, and of E
    experts the `topk` that each row takes."""

    kind: str
    in_ffn: bool
    topk: int = 1
    experts: int = 1


@dataclass
class _Weights:
    """Weights with equal rows. `whole`: all of them read once, and their products with one row. `width`: inputs and
    outputs of these products. `groups`: of experts on this rank, over all layers. `launches`: kernels of a step."""

    whole: StepCost = StepCost()
    width: int = 0
    groups: int = 0
    launches: int = 0


class LayersCost:
    """The roofline cost of layers of attention and other modules. `itemsize`: bytes of an activation."""

    def __init__(self, specs: Sequence[Spec], modules: Iterable[Counted], itemsize: int) -> None:
        # Layers are mostly of few kinds.
        self._specs, self._item = Counter(specs), itemsize
        self._weights: dict[_Rows, _Weights] = {}
        for one in modules:
            rows = _Rows(one.kind, one.in_ffn)
            if one.router is not None:
                rows = dataclasses.replace(rows, topk=one.router.topk, experts=one.router.experts)
            found = self._weights.setdefault(rows, _Weights())
            cost, products, width, groups = _weights(one.module, one.kind)
            found.whole += cost
            found.width += width
            found.groups += groups
            found.launches += one.launches or (0 if one.kind == HEAD else products)

    def __call__(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], logits: int, gathered: int | None = None
    ) -> StepWork:
        """As `ModelCost.work`. `gathered`: rows of feed-forward blocks; default: the new tokens."""
        lengths = Lengths.of(query_lens, seq_lens, self._item)
        classes = [spec.family for spec in self._specs] + [EXPERTS, DENSE, HEAD, REST]
        found = dict.fromkeys(classes, StepCost())
        launches = passed = 0
        padding = StepCost()
        for spec, count in self._specs.items():
            found[spec.family] += FAMILIES[spec.family].cost(spec, lengths) * count
            # To store what each cache keeps, to read it, and to finish.
            launches += count * (2 * len(spec.caches()) + 1)
        for rows, weights in self._weights.items():
            tokens = logits if rows.kind == HEAD else lengths.tokens
            if rows.in_ffn and gathered is not None:
                tokens = gathered
            used = rows.topk / rows.experts
            chosen = 1 - (1 - used) ** tokens
            products = StepCost(
                0, *(round(tokens * used * flops) for flops in (weights.whole.flops, weights.whole.fp8))
            )
            found[rows.kind] += StepCost(round(chosen * weights.whole.bytes)) + products
            launches += weights.launches
            # Each row goes to the products of the experts that it takes.
            passed += round(tokens * used * weights.width * self._item)
            if weights.groups and tokens:
                share = _padding(tokens * used, chosen)
                padding += StepCost(0, round(products.flops * share), round(products.fp8 * share))
        return StepWork({kind: cost for kind, cost in found.items() if cost != StepCost()}, launches, passed, padding)


def _padding(rows: float, chosen: float) -> float:
    """Rows of half a tile that each chosen expert computes in vain, for each row that counts. `rows`: of an expert, in
    the mean. `chosen`: the share of experts that have any."""
    tile = min(max(rows / chosen, _TILES[0]), _TILES[1])
    return tile / 2 * chosen / rows


def step_cost(load_plan: LoadPlan, query_lens: Sequence[int], seq_lens: Sequence[int]) -> dict[str, StepCost]:
    """The cost of one step, as `ModelCost` has it."""
    return ModelCost(load_plan)(query_lens, seq_lens)


def _sum(costs: Iterable[StepCost]) -> StepCost:
    return sum(costs, StepCost())


def counted_modules(model: Decoder | DraftModel) -> list[Counted]:
    """Every module of a model, and how it is counted."""
    layers: list[Any] = list(model.layers)
    layer_of = {id(part): i for i, layer in enumerate(layers) for part in layer.modules()}
    in_mixer = {id(part) for layer in layers for part in layer.mixer.modules()}
    in_ffn = {id(part) for layer in layers for block in _feed_forward(layer) for part in block.modules()}
    routers = _routers(model)
    found = []
    for module, kind in modules_by_class(model):
        number, inside = layer_of.get(id(module)), id(module) in in_mixer or id(module) in in_ffn
        launches = 0
        if isinstance(module, Experts):
            launches = _EXPERT_LAUNCHES
        elif isinstance(module, HyperConnection):
            launches = 2
        elif isinstance(module, RMSNorm) and number is not None and not inside:
            # Norms of a mixer are part of the kernels around them.
            launches = 1
        elif number is not None and module is layers[number]:
            launches = 1
        found.append(Counted(module, kind, number, routers.get(id(module)), id(module) in in_ffn, launches))
    return found


def _feed_forward(layer: Any) -> list[nn.Module]:
    """The feed-forward blocks of a layer: some have experts beside a dense one."""
    others = (block for block in layer.children() if block not in (layer.mixer, layer.ffn))
    return [layer.ffn, *(block for block in others if any(isinstance(part, Experts) for part in block.modules()))]


def modules_by_class(model: Decoder | DraftModel) -> list[tuple[nn.Module, str]]:
    """Every module of a model, and the class that its own parameters and kernels are counted in.

    What lies in a mixer beside projections and norms is what the family is given.
    """
    layers: list[Any] = list(model.layers)
    families = {id(part): layer.mixer.spec.family for layer in layers for part in layer.mixer.modules()}
    found = []
    for module in model.modules():
        kind = families.get(id(module), REST)
        if isinstance(module, Linear | RowLinear | GroupedLinear):
            kind = DENSE
        elif isinstance(module, Experts):
            kind = EXPERTS
        elif isinstance(module, Head):
            kind = HEAD
        elif isinstance(module, RMSNorm | AllHeadsNorm):
            kind = REST
        found.append((module, kind))
    return found


def _routers(model: nn.Module) -> dict[int, RouterSpec]:
    """Who chooses among some experts, by their id: the router beside them."""
    found = {}
    for parent in model.modules():
        siblings = {type(child): child for child in parent.children()}
        if Experts in siblings:
            router = siblings[Router]
            assert isinstance(router, Router)
            found[id(siblings[Experts])] = router.spec
    return found


def _weights(module: nn.Module, kind: str) -> tuple[StepCost, int, int, int]:
    """What a module's own parameters take, and their products with one row; how many products, their inputs and
    outputs, and how many experts the module has."""
    total, products, width, groups = StepCost(), 0, 0, 0
    if isinstance(module, Embedding):
        # A few rows of it.
        return total, products, width, groups
    experts = isinstance(module, Experts)
    for name, parameter in module.named_parameters(recurse=False):
        if placement_of(parameter).below:
            # A table to look up a few rows in.
            continue
        total += StepCost(packed_bytes(parameter))
        # A family's formula has the products with its own parameters.
        product = parameter.dim() == (3 if experts else 2) and kind in (EXPERTS, DENSE, HEAD, REST)
        if product and not name.endswith(SCALES):
            format = format_of(parameter)
            flops = 2 * parameter.numel() // format.elements * format.pack_factor
            total += StepCost(0, flops, flops if isinstance(format, Fp8) and format.fp8_activations else 0)
            inputs = parameter.shape[-1] // format.elements * format.pack_factor
            groups = parameter.shape[0] if experts else 0
            products, width = products + 1, width + max(groups, 1) * (inputs + parameter.shape[-2])
    return total, products, width, groups
