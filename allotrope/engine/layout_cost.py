"""What each rank of a layout holds and does: weights by kind, cache groups, the work of a step, what it exchanges.

Owns how a model's parts are counted for one rank of each pipeline stage. They come from the model that the rank would
load (made without memory), and from the cache layouts. Must not know times and chips.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import nn

from allotrope.attention.cost import StepCost
from allotrope.cache.groups import CacheGroup, group_caches
from allotrope.engine.exchange import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND, Exchange
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.rank_report import KINDS, has_part_of_sum, modules_by_kind, quantized_modules
from allotrope.engine.step_cost import EXPERTS, LayersCost, StepWork, counted_modules
from allotrope.layers.embedding import Embedding
from allotrope.layers.moe import Experts
from allotrope.layers.norm import AllHeadsNorm, RMSNorm
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
        model = load_plan.meta_model()
        self.load_plan = load_plan
        self.counted = counted_modules(model)
        self.head_cut = not model.head.whole
        # Of tables whose rows the ranks share.
        embeddings = (part for part in model.modules() if isinstance(part, Embedding))
        self.embedded = Counter(part.hidden for part in embeddings if not part.whole)
        self.sums = [_sums(layer) for layer in model.layers]
        self.quantized = quantized_modules(model)
        # Module, layer, kind and bytes of weights; a head may share the table of an embedding.
        self.weights: list[tuple[nn.Module, int | None, str, int]] = []
        seen = set[int]()
        for name, module, kind in modules_by_kind(model):
            parts = name.split(".")
            layer = int(parts[1]) if parts[0] == "layers" and len(parts) > 1 else None
            own = [one for one in module.parameters(recurse=False) if id(one) not in seen]
            seen |= {id(one) for one in own}
            if own:
                self.weights.append((module, layer, kind, sum(packed_bytes(one) for one in own)))

    def layer_bytes(self) -> tuple[list[int], int]:
        """Bytes of each layer's weights, and of embedding and head."""
        sizes, extra = [0] * len(self.sums), 0
        for module, layer, _, size in self.weights:
            if layer is not None:
                sizes[layer] += size
            elif not isinstance(module, RMSNorm):
                extra += size
        return sizes, extra


class StageCost:
    """What a rank of one pipeline stage holds and does. `layers`: those of the stage. `weights`: bytes by kind."""

    def __init__(self, model: RankModel, layers: range, layout: RankLayout, page_size: int) -> None:
        self.layers, self.layout = layers, layout
        load_plan, count = model.load_plan, len(model.sums)
        self.first, self.last = layers.start == 0, layers.stop == count
        self._item = load_plan.build.dtype.itemsize
        self._hidden = load_plan.spec.hidden * self._item
        weights = Counter[str]()
        for module, layer, kind, size in model.weights:
            weights[kind] += size if _of_stage(module, layer, layers, count) else 0
        self.weights = {kind: weights[kind] for kind in KINDS if weights[kind]}
        self.groups = _groups(load_plan, layers, page_size)
        modules = [one for one in model.counted if _of_stage(one.module, one.layer, layers, count)]
        self._cost = LayersCost([load_plan.specs[i] for i in layers], modules, self._item)
        # Experts of a layer on this rank, and the share of them that a row chooses.
        self._experts = {
            (one.module.count, one.router.topk / one.router.experts)
            for one in modules
            if isinstance(one.module, Experts) and one.router is not None
        }
        self._embedded, self._head_cut = model.embedded if self.first else Counter[int](), self.first and model.head_cut
        self._sums = sum((model.sums[i] for i in layers), Counter[str]())

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
            (ALL_REDUCE, "norms over all heads", self._sums["norm"], rows.own * torch.float32.itemsize, "tensor"),
            (ALL_REDUCE, "feed-forward blocks", self._sums["ffn"], own, "tensor"),
            (ALL_REDUCE, "tokens", int(self._head_cut), rows.logits * torch.int64.itemsize, "stage"),
            # Every data-parallel rank has all rows before a feed-forward block, and its own ones after it.
            (ALL_GATHER, "rows for feed-forward blocks", self._sums["layer"], gathered, "data"),
            (REDUCE_SCATTER, "rows of feed-forward blocks", self._sums["layer"], gathered, "data"),
            (ALL_GATHER, "rows to sample", int(self.first), rows.logits * self._hidden, "data"),
        ]
        exchanges = [
            Exchange(name, of, count, size, *groups[group])
            for name, of, count, size, group in found
            if count and groups[group][0] > 1
        ]
        if layout.pipeline > 1:
            # The residual stream; behind the last stage, the rows to sample alone.
            size = rows.logits // data * self._hidden if self.last else own
            exchanges.append(Exchange(SEND, "rows to the next stage", 1, size, 2, hosts.of_pipeline))
        return tuple(exchanges)


def split_layers(sizes: Sequence[int], extra: int, stages: int) -> list[range]:
    """Runs of layers for `stages` stages with the least bytes on the stage that has most. `sizes`: bytes of each layer.
    `extra`: bytes that the first stage has beside its layers."""
    low, high = max(sizes), sum(sizes) + extra
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(sizes, extra, stages, middle) else (middle + 1, high)
    return _runs(sizes, extra, stages, low)


def _fits(sizes: Sequence[int], extra: int, stages: int, limit: int) -> bool:
    runs = _runs(sizes, extra, stages, limit)
    return len(runs) <= stages and extra + sum(sizes[i] for i in runs[0]) <= limit


def _runs(sizes: Sequence[int], extra: int, stages: int, limit: int) -> list[range]:
    """As many layers a stage as `limit` bytes hold, one at least, and one at least for each later stage."""
    found: list[range] = []
    start, used = 0, extra
    for i, size in enumerate(sizes):
        left = stages - len(found) - 1
        if i > start and (used + size > limit or len(sizes) - i == left):
            found.append(range(start, i))
            start, used = i, 0
        used += size
    return [*found, range(start, len(sizes))]


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


def _of_stage(module: nn.Module, layer: int | None, layers: range, count: int) -> bool:
    """Whether a stage has what belongs to `layer` of `count`. Embedding and head are on the first stage, and the norm
    behind the last layer on the last."""
    if layer is not None:
        return layer in layers
    return layers.stop == count if isinstance(module, RMSNorm) else layers.start == 0


def _groups(load_plan: LoadPlan, layers: range, page_size: int) -> tuple[CacheGroup, ...]:
    """The cache groups of a stage."""
    caches = [{} if i in load_plan.shares else load_plan.specs[i].caches() for i in layers]
    return group_caches(caches, page_size)
