"""What each rank of a layout holds and does: weights by kind, cache groups, the work of a step, what it exchanges.

Owns how a model's parts are counted for one rank of each pipeline stage. They come from the model that the rank would
load (made without memory), and from the cache layouts. Must not know times and chips.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import nn

from allotrope.attention.cost import Lengths, StepCost
from allotrope.attention.registry import FAMILIES
from allotrope.cache.groups import CacheGroup, group_caches
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.planning.exchange import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND, Exchange
from allotrope.engine.planning.rank_report import KINDS, has_part_of_sum, modules_by_kind, quantized_modules
from allotrope.engine.planning.step_cost import EXPERTS, Counted, LayersCost, StepWork, counted_modules
from allotrope.layers.embedding import Embedding
from allotrope.layers.moe import Experts
from allotrope.layers.norm import AllHeadsNorm
from allotrope.layers.stage import cut
from allotrope.layers.weights import packed_bytes
from allotrope.rank_layout import RankLayout


@dataclass(frozen=True)
class StepRows:
    """The rows of a step on one rank. `query_lens`, `seq_lens`: of its own requests. `gathered`: rows of feed-forward
    blocks, those of all data-parallel ranks. `logits`: tokens that are sampled, over all data-parallel ranks."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    gathered: int
    logits: int

    @property
    def own(self) -> int:
        return sum(self.query_lens)

    @staticmethod
    def decode(requests: int, context: int, data: int) -> StepRows:
        """A token of each of `requests` requests, on the data-parallel rank that has most of them. The rows of the
        others are padded to as many."""
        own = -(-requests // data)
        return StepRows((1,) * own, (context,) * own, own * data, own * data)

    @staticmethod
    def prompts(tokens: int, context: int, data: int) -> StepRows:
        """`tokens` tokens of prompts of `context` tokens, shared out among the data-parallel ranks: whole prompts, or
        the middle of one."""
        own = max(1, tokens // data)
        if own >= context:
            lens = (context,) * (own // context)
            return StepRows(lens, lens, sum(lens) * data, len(lens) * data)
        return StepRows((own,), ((context + own) // 2,), own * data, data)


@dataclass(frozen=True)
class HostLayout:
    """How many hosts the groups of a layout are spread over; of a pipeline, those of the last send of a stage."""

    of_tensor: int
    of_data: int
    of_stage: int
    of_pipeline: int


def host_layout(layout: RankLayout, per_host: int) -> HostLayout:
    """How ranks in order lie on hosts of `per_host` GPUs. Raises ValueError where a group begins within one host and
    ends within another."""
    for name, size in (("tensor_parallel_size", layout.tensor), ("ranks of a stage", layout.stage_size)):
        if layout.size > per_host and per_host % size and size % per_host:
            raise ValueError(f"{name}={size} is neither a divisor nor a multiple of the {per_host} GPUs of a host")
    tensor, stage = max(1, layout.tensor // per_host), max(1, layout.stage_size // per_host)
    # A data-parallel group has one rank of each tensor-parallel group.
    return HostLayout(tensor, min(layout.data, stage), stage, 1 if layout.size <= per_host else 2)


class RankModel:
    """The parts of the model that a rank would load with all layers, read once. `load_plan`: its plan. `sums`: by
    layer, what of it is summed over ranks. `quantized`: the kind of each module with a quantized weight, by name."""

    def __init__(self, load_plan: LoadPlan) -> None:
        model = load_plan.meta_model
        self.load_plan = load_plan
        self.counted = counted_modules(model)
        self.head_cut = not model.head.whole
        # Of tables whose rows the ranks share.
        embeddings = (part for part in model.modules() if isinstance(part, Embedding))
        self.embedded = Counter(part.hidden for part in embeddings if not part.whole)
        self.sums = [_sums(layer) for layer in model.layers]
        self.quantized = quantized_modules(model)
        # Numbers of a token that pass to a stage that begins with a layer.
        self.border_widths = [model.border_width(layer) for layer in range(len(self.sums))]
        # What no layer has goes with the first one, or with the last.
        end = len(self.sums) - 1
        last = {id(module) for name, module in model.named_modules() if name.partition(".")[0] in model.last_parts}
        self._goes_with = {
            id(one.module): one.layer if one.layer is not None else end if id(one.module) in last else 0
            for one in self.counted
        }
        # Module, kind and bytes of weights; a head may share the table of an embedding.
        self._weights: list[tuple[nn.Module, str, int]] = []
        seen = set[int]()
        for _, module, kind in modules_by_kind(model):
            own = [one for one in module.parameters(recurse=False) if id(one) not in seen]
            seen |= {id(one) for one in own}
            self._weights.append((module, kind, sum(packed_bytes(one) for one in own)))

    def of_stage(self, layers: range) -> list[Counted]:
        """The modules of a pipeline stage with these layers."""
        return [one for one in self.counted if self._goes_with[id(one.module)] in layers]

    def weights(self, layers: range) -> dict[str, int]:
        """Bytes of the weights of such a stage by kind, in the order of `KINDS`."""
        found = Counter[str]()
        for module, kind, size in self._weights:
            found[kind] += size if self._goes_with[id(module)] in layers else 0
        return {kind: found[kind] for kind in KINDS if found[kind]}

    def stages(self, count: int) -> list[range]:
        """The layers of `count` pipeline stages, as ranks cut them if this is the model of one rank. Raises ValueError
        where it cannot be cut so."""
        layer_of = {id(one.module): one.layer for one in self.counted}
        sizes: dict[int | None, int] = Counter()
        for module, _, size in self._weights:
            sizes[layer_of[id(module)]] += size
        of_layers = [sizes[layer] for layer in range(len(self.sums))]
        return [range(one.first, one.last) for one in cut(self.load_plan.spec.layers, of_layers, sizes[None], count)]


class StageCost:
    """What a rank of one pipeline stage holds and does. `layers`: those of the stage. `weights`: bytes by kind."""

    def __init__(self, model: RankModel, layers: range, layout: RankLayout, page_size: int) -> None:
        self.layers, self.layout = layers, layout
        load_plan, count = model.load_plan, len(model.sums)
        self.first, self.last = layers.start == 0, layers.stop == count
        self._item = load_plan.build.dtype.itemsize
        self._hidden = load_plan.spec.hidden * self._item
        self.weights = model.weights(layers)
        self.groups = _groups(load_plan, layers, page_size)
        modules = model.of_stage(layers)
        self._cost = LayersCost([load_plan.specs[i] for i in layers], modules, self._item)
        # Experts of a layer on this rank, and the share of them that a row chooses.
        self._experts = {
            (one.module.count, one.router.topk / one.router.experts)
            for one in modules
            if isinstance(one.module, Experts) and one.router is not None
        }
        self._sent = 0 if self.last else model.border_widths[layers.stop]
        self._embedded, self._head_cut = model.embedded if self.first else Counter[int](), self.first and model.head_cut
        self._sums = sum((model.sums[i] for i in layers), Counter[str]())
        self._specs = Counter(load_plan.specs[i] for i in layers)

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    def work(self, rows: StepRows) -> StepWork:
        """What the rank of most requests does in a step; with expert parallel, the one of whose experts most are
        chosen, where every choice is as likely as every other."""
        found = self._cost(rows.query_lens, rows.seq_lens, rows.logits, rows.gathered)
        if not self.layout.expert_parallel or not self._experts:
            return found
        factor = max(_of_most(count, share, rows.gathered, self.layout.stage_size) for count, share in self._experts)
        classes = found.classes | {EXPERTS: _times(found.classes[EXPERTS], factor)}
        return dataclasses.replace(found, classes=classes)

    def exchanges(self, rows: StepRows, hosts: HostLayout) -> tuple[Exchange, ...]:
        """What the rank exchanges in a step."""
        layout, data = self.layout, self.layout.data
        own, gathered = rows.own * self._hidden, rows.gathered * self._hidden
        lengths, gathered_by_attention = Lengths.of(rows.query_lens, rows.seq_lens, self._item), Counter[int]()
        for spec, count in self._specs.items():
            gathered_by_attention[FAMILIES[spec.family].gathered(spec, lengths)] += count
        groups = {
            "tensor": (layout.tensor, hosts.of_tensor),
            "data": (data, hosts.of_data),
            "stage": (layout.stage_size, hosts.of_stage),
        }
        found: list[tuple[str, str, int, int, str]] = [
            *(
                (ALL_REDUCE, "embeddings", n, rows.own * width * self._item, "tensor")
                for width, n in self._embedded.items()
            ),
            (ALL_REDUCE, "mixers", self._sums["mixer"], own, "tensor"),
            *((ALL_GATHER, "attention", n, size, "tensor") for size, n in gathered_by_attention.items() if size),
            (ALL_REDUCE, "norms over all heads", self._sums["norm"], rows.own * torch.float32.itemsize, "tensor"),
            (ALL_REDUCE, "feed-forward blocks", self._sums["ffn"], own, "tensor"),
            (ALL_REDUCE, "tokens", int(self._head_cut), rows.logits * torch.int64.itemsize, "stage"),
            # Every data-parallel rank has all rows before a feed-forward block, and its own ones after it.
            (ALL_GATHER, "rows for feed-forward blocks", self._sums["layer"], gathered, "data"),
            (REDUCE_SCATTER, "rows of feed-forward blocks", self._sums["layer"], gathered, "data"),
            (ALL_GATHER, "rows to sample", int(self.last), rows.logits * self._hidden, "data"),
        ]
        exchanges = [
            Exchange(name, of, count, size, *groups[group])
            for name, of, count, size, group in found
            if count and groups[group][0] > 1
        ]
        if layout.pipeline > 1:
            # The residual stream; behind the last stage, the rows to sample alone, of all data-parallel ranks.
            size = rows.logits * self._hidden if self.last else rows.own * self._sent * self._item
            exchanges.append(Exchange(SEND, "rows to the next stage", 1, size, 2, hosts.of_pipeline))
        return tuple(exchanges)


def _sums(layer: nn.Module) -> Counter[str]:
    """Whether the mixer and the feed-forward blocks of a layer make parts of a sum over ranks, and how many of its
    norms need one."""
    parts = {name for name, child in layer.named_children() if has_part_of_sum(child)}
    norms = sum(isinstance(part, AllHeadsNorm) for part in layer.modules())
    return Counter(layer=1, mixer=int("mixer" in parts), ffn=int(bool(parts - {"mixer"})), norm=norms)


def _of_most(count: int, share: float, rows: int, ranks: int) -> float:
    """How many more experts are chosen on the rank that has most of them than in the mean of `ranks` ranks. `count`:
    of a rank. `share`: that a row chooses.

    The number of a rank's experts that are chosen is nearly normal; the largest of n such is expected at the quantile
    (n - 0.375) / (n + 0.25) (Blom, Statistical Estimates and Transformed Beta-Variables, 1958).
    """
    chosen = 1 - (1 - share) ** rows
    mean, deviation = count * chosen, math.sqrt(count * chosen * (1 - chosen))
    largest = mean + deviation * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return min(largest, count) / mean


def _times(cost: StepCost, factor: float) -> StepCost:
    return StepCost(*(round(factor * value) for value in (cost.bytes, cost.flops, cost.fp8)))


def _groups(load_plan: LoadPlan, layers: range, page_size: int) -> tuple[CacheGroup, ...]:
    """The cache groups of a stage."""
    caches = [{} if i in load_plan.shares else load_plan.specs[i].caches() for i in layers]
    groups = group_caches(caches, page_size)
    if len(caches) == len(load_plan.specs):
        return groups
    return tuple(group.of_layers(range(len(caches))) for group in groups)
