"""The roofline cost of a step: bytes that must move and operations that must be computed, by class of kernel.

Classes are the families of attention, `experts`, `dense` (all other projections), `head` and `rest`. Counted are
weights, cached rows and states, and what attention is given and returns; not what passes between other kernels, which
could be fused. All that a draft model takes is the class `draft`. Owns which class a module is counted in; families
count their own attention. Must not know models' names, kernels, times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from allotrope.attention.cost import Lengths, StepCost
from allotrope.attention.family import Spec
from allotrope.attention.registry import FAMILIES
from allotrope.engine.load_plan import LoadPlan
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.layers.embedding import Embedding, Head
from allotrope.layers.linear import Linear, RowLinear
from allotrope.layers.mixers.csa import GroupedLinear
from allotrope.layers.moe import Experts
from allotrope.layers.norm import AllHeadsNorm, RMSNorm
from allotrope.layers.parallel import placement_of
from allotrope.layers.router import Router, RouterSpec
from allotrope.layers.weights import SCALES, format_of, packed_bytes

EXPERTS, DENSE, HEAD, REST, DRAFT = "experts", "dense", "head", "rest", "draft"


class ModelCost:
    """The roofline cost of one rank in any step; it reads the model once."""

    def __init__(self, load_plan: LoadPlan) -> None:
        item, model = load_plan.build.dtype.itemsize, load_plan.meta_model()
        self._model = _LayersCost(load_plan.own_specs, modules_by_class(model), _routers(model), item)
        self._draft: _LayersCost | None = None
        # The first pass of its draft model makes no draft.
        self._chains_alone = load_plan.reads_tokens_alone
        if (draft := load_plan.meta_draft(model)) is not None:
            modules = modules_by_class(draft)
            if not any(kind == HEAD for _, kind in modules):
                # It shares that of the model.
                modules.append((model.head, HEAD))
            self._draft = _LayersCost(load_plan.draft_specs, modules, _routers(draft), item)

    def __call__(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], logits: int | None = None
    ) -> dict[str, StepCost]:
        """The cost of a step, by class, without classes that the model lacks.

        `query_lens`, `seq_lens`: per request, new tokens, and tokens visible after the step; drafts that are verified
        are new tokens of their request. `logits`: tokens that are sampled; default: the last of each request. Weights
        are read once, as they are stored; of E experts of which each token takes k, those that T tokens are expected
        to choose, E (1 - (1 - k/E)^T).
        """
        return self._model(query_lens, seq_lens, len(query_lens) if logits is None else logits)

    def drafted(self, context: int, drafts: Sequence[int]) -> dict[str, StepCost]:
        """The cost of verifying `drafts` [B] tokens of requests that see `context` tokens, and of the passes of the
        draft model that make as many. The first pass has the rows of the step, the others one for each draft, but for
        those that the first one makes."""
        lens = tuple(1 + count for count in drafts), tuple(context + count for count in drafts)
        found = self(*lens, sum(lens[0]))
        if self._draft is not None:
            chosen = 0 if self._chains_alone else 1
            found[DRAFT] = _sum(self._draft(*lens, chosen * sum(count > 0 for count in drafts)).values())
            for step in range(1, max(drafts, default=0) + 1 - chosen):
                rows = sum(count >= step + chosen for count in drafts)
                found[DRAFT] += _sum(self._draft((1,) * rows, (context + step,) * rows, rows).values())
        return found


class _LayersCost:
    """The roofline cost of layers of attention and other modules. `routers`: of experts, by their id. `itemsize`:
    bytes of an activation."""

    def __init__(
        self,
        specs: Sequence[Spec],
        modules: Iterable[tuple[nn.Module, str]],
        routers: dict[int, RouterSpec],
        itemsize: int,
    ) -> None:
        # Layers are mostly of few kinds.
        self._specs, self._item = Counter(specs), itemsize
        # By class, and the share of it that a token takes: of weights read whole, and products with one token.
        self._weights: dict[tuple[str, float], StepCost] = {}
        for module, kind in modules:
            router = routers.get(id(module))
            key = (kind, 1.0 if router is None else router.topk / router.experts)
            self._weights[key] = self._weights.get(key, StepCost()) + _weights(module, kind)

    def __call__(self, query_lens: Sequence[int], seq_lens: Sequence[int], logits: int) -> dict[str, StepCost]:
        """As `ModelCost.__call__`."""
        new, kv = (torch.tensor(tuple(lens), dtype=torch.int64) for lens in (query_lens, seq_lens))
        lengths = Lengths(new, kv, self._item)
        classes = [spec.family for spec in self._specs] + [EXPERTS, DENSE, HEAD, REST]
        found = dict.fromkeys(classes, StepCost())
        for spec, count in self._specs.items():
            found[spec.family] += FAMILIES[spec.family].cost(spec, lengths) * count
        for (kind, used), whole in self._weights.items():
            tokens = logits if kind == HEAD else lengths.tokens
            read = round((1 - (1 - used) ** tokens) * whole.bytes)
            found[kind] += StepCost(read, *(round(tokens * used * flops) for flops in (whole.flops, whole.fp8)))
        return {kind: cost for kind, cost in found.items() if cost != StepCost()}


def step_cost(load_plan: LoadPlan, query_lens: Sequence[int], seq_lens: Sequence[int]) -> dict[str, StepCost]:
    """The cost of one step, as `ModelCost` has it."""
    return ModelCost(load_plan)(query_lens, seq_lens)


def _sum(costs: Iterable[StepCost]) -> StepCost:
    return sum(costs, StepCost())


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


def _weights(module: nn.Module, kind: str) -> StepCost:
    """What a module's own parameters take, and their products with one row."""
    total = StepCost()
    if isinstance(module, Embedding):
        # A few rows of it.
        return total
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
            total += StepCost(0, flops, flops if format.name == "fp8" else 0)
    return total
