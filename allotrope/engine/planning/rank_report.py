"""The report on tensor parallelism: what each rank holds, what ranks exchange in a decode step, and the allowed sizes.

Owns the figures by rank that `allotrope plan` shows. They come from the placements of the model's parameters (made
without memory) and from the cache layouts, never from a formula of its own. Must not read a weight or start a rank.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from allotrope.attention.cache_layout import CacheLayout, Field
from allotrope.config import EngineConfig
from allotrope.engine.async_scheduling import uses_async_scheduling
from allotrope.engine.load_plan import LoadPlan, LoadPlans
from allotrope.engine.planning.report_text import size_text, table
from allotrope.errors import ModelError
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.layers.embedding import Embedding, Head
from allotrope.layers.hyper_connection import HyperConnection, HyperHead
from allotrope.layers.linear import Linear, RowLinear
from allotrope.layers.mixers.csa import GroupedLinear
from allotrope.layers.mixers.mixer import attention_of
from allotrope.layers.mixers.mla import LatentProjection
from allotrope.layers.moe import Experts, Moe
from allotrope.layers.norm import AllHeadsNorm, RMSNorm
from allotrope.layers.parallel import Parallel, parallel_of, placement_of
from allotrope.layers.router import Router
from allotrope.layers.weights import format_of, packed_bytes
from allotrope.loading.kv_scales import attention_specs
from allotrope.ops.matmul.plain import PLAIN

SIZES = (*range(1, 17), 32, 64)
"""The numbers of ranks that a plan tries."""

EMBEDDING, NORMS, HYPER, OTHER = "embedding and head", "norms", "hyper-connections", "other"
PROJECTIONS, LATENTS = "attention projections", "latents, indexers, compressors"
ATTENTION = "convolutions, sinks, others"
FEED_FORWARD, SHARED, EXPERTS, ROUTERS = "dense feed-forward", "shared experts", "routed experts", "routers"
# All weights of a draft model but those that it shares.
DRAFT = "draft model"
KINDS = (
    EMBEDDING, PROJECTIONS, LATENTS, ATTENTION, FEED_FORWARD, SHARED, EXPERTS, ROUTERS, NORMS, HYPER, OTHER, DRAFT,
)  # fmt: skip

# A module has the kind of its class, else that of the module it is part of.
_KIND_OF: tuple[tuple[type[nn.Module], str], ...] = (
    (Embedding, EMBEDDING),
    (Head, EMBEDDING),
    (Router, ROUTERS),
    (Experts, EXPERTS),
    (Moe, SHARED),
    (RMSNorm, NORMS),
    (AllHeadsNorm, NORMS),
    (HyperConnection, HYPER),
    (HyperHead, HYPER),
)


@dataclass(frozen=True)
class WeightShare:
    """Bytes of weights on a rank. `sharded`: no other rank has them. `copied`: heads that several ranks have, because
    there are fewer of them than ranks. `replicated`: every rank has them."""

    sharded: int = 0
    copied: int = 0
    replicated: int = 0

    @property
    def bytes(self) -> int:
        return self.sharded + self.copied + self.replicated

    def __add__(self, other: WeightShare) -> WeightShare:
        return WeightShare(self.sharded + other.sharded, self.copied + other.copied, self.replicated + other.replicated)


@dataclass(frozen=True)
class CacheShare:
    """One field of a cache group's entries (or states). `bytes`: of it in one entry of all `layers` layers together, on
    a rank; `model_bytes`: in the whole model. `copies`: how many ranks have each of these, in the mean."""

    group: str
    field: str
    layers: int
    bytes: int
    model_bytes: int
    copies: float

    def holders(self, ranks: int) -> str:
        """Who has each number of an entry, for people."""
        if self.copies == 1:
            return "one rank"
        # Heads of one kind may be copied, and those of another not.
        return "every rank" if self.copies == ranks else f"{self.copies:.3g} ranks"


@dataclass(frozen=True)
class Collective:
    """`count` collectives of a decode step, to each of which a rank gives `bytes`. `of`: whose results they join."""

    name: str
    of: str
    count: int
    bytes: int


@dataclass(frozen=True)
class RankSize:
    """A number of ranks that the model allows, and the bytes of each one's weights. `dequantized`: kinds of weights of
    which some are quantized on one rank, and plain on so many."""

    ranks: int
    weight_bytes: int
    replicated_bytes: int
    dequantized: tuple[str, ...]


@dataclass(frozen=True)
class RefusedSizes:
    """Numbers of ranks that the model does not allow, and why."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What each of `ranks` ranks has, and what it exchanges in a decode step: `requests` requests, `drafts` drafts.

    `weights`: by kind. `sizes`, `refused`: the numbers of ranks that the model allows, and those that it does not.
    """

    ranks: int
    requests: int
    drafts: int
    weights: dict[str, WeightShare]
    caches: tuple[CacheShare, ...]
    collectives: tuple[Collective, ...]
    sizes: tuple[RankSize, ...]
    refused: tuple[RefusedSizes, ...]

    def lines(self) -> list[str]:
        """The same for people, one line each; of one rank, which has everything, the other numbers alone."""
        return (self._share_lines() if self.ranks > 1 else []) + self._size_lines()

    def _share_lines(self) -> list[str]:
        rows = [(f"weights of each of {self.ranks} ranks", "sharded", "copied heads", "replicated")]
        for kind, share in (*self.weights.items(), ("all", sum(self.weights.values(), WeightShare()))):
            rows.append((kind, size_text(share.sharded), size_text(share.copied), size_text(share.replicated)))
        text = table(rows)
        entries = [("entries of caches", "layers", "on a rank", "in the model", "held by")]
        for one in self.caches:
            sizes = size_text(one.bytes), size_text(one.model_bytes)
            entries.append((f"{one.group}: {one.field}", str(one.layers), *sizes, one.holders(self.ranks)))
        text += table(entries)
        drafts = f" and {self.drafts} drafts" if self.drafts else ""
        joined = [(f"a decode step of {self.requests} requests{drafts} joins", "by", "times", "bytes of a rank")]
        joined += [(one.of, one.name, str(one.count), size_text(one.bytes)) for one in self.collectives]
        return text + table(joined)

    def _size_lines(self) -> list[str]:
        rows = [("ranks", "weights of each", "replicated", "no longer quantized")]
        for one in self.sizes:
            sizes = size_text(one.weight_bytes), size_text(one.replicated_bytes)
            rows.append((str(one.ranks), *sizes, ", ".join(one.dequantized) or "-"))
        return table(rows) + [f"refused for {_ranges(one.ranks)} ranks: {one.reason}" for one in self.refused]


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, with neighbours joined: 3, 5-7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def report_ranks(config: EngineConfig, load_plans: LoadPlans | None = None) -> RankReport:
    """The report of the ranks that `config` asks for. `load_plans`: those of its model.

    Raises ModelError or ConfigError if the model cannot have so many, or cannot be served at all.
    """
    load_plans = load_plans or LoadPlans(config)
    load_plan = load_plans.of(config.layout)
    sizes, refused = rank_sizes(config, load_plans)
    async_scheduling = uses_async_scheduling(config, load_plan.build.device.type, observed=False)
    return RankReport(
        ranks=load_plan.build.parallel.size,
        requests=load_plan.max_num_seqs,
        drafts=sum(drafts_of_step(load_plan)),
        weights=_weights(load_plan),
        caches=cache_shares(load_plan),
        collectives=collectives(load_plan, async_scheduling=async_scheduling),
        sizes=sizes,
        refused=refused,
    )


def rank_sizes(
    config: EngineConfig, load_plans: LoadPlans | None = None
) -> tuple[tuple[RankSize, ...], tuple[RefusedSizes, ...]]:
    """Which of `SIZES` a model allows, and for the others why not. `load_plans`: those of its model. Raises ModelError
    if it cannot be served at all."""
    load_plans = load_plans or LoadPlans(config)
    allowed: list[RankSize] = []
    refused: dict[str, list[int]] = {}
    on_one_rank: dict[str, str] = {}
    for ranks in SIZES:
        try:
            load_plan = load_plans.of(dataclasses.replace(config.layout, tensor=ranks))
        except ModelError as error:
            if ranks == 1:
                raise
            reason = "; ".join(error.reasons).replace(f"tensor_parallel_size={ranks}", "tensor_parallel_size")
            refused.setdefault(reason, []).append(ranks)
            continue
        quantized = quantized_modules(load_plan.meta_model)
        if (draft := load_plan.meta_draft()) is not None:
            quantized |= {f"draft.{name}": DRAFT for name in quantized_modules(draft)}
        on_one_rank = quantized if ranks == 1 else on_one_rank
        plain = {kind for name, kind in on_one_rank.items() if name not in quantized}
        replicated = sum(share.replicated for share in _weights(load_plan).values())
        kinds = tuple(kind for kind in KINDS if kind in plain)
        allowed.append(RankSize(ranks, load_plan.weight_bytes, replicated if ranks > 1 else 0, kinds))
    return tuple(allowed), tuple(RefusedSizes(tuple(ranks), reason) for reason, ranks in refused.items())


def drafts_of_step(load_plan: LoadPlan) -> tuple[int, ...]:
    """The drafts of each of `max_num_seqs` requests in a decode step of as many rows as there may be."""
    requests = load_plan.max_num_seqs
    drafts = min(requests * load_plan.max_drafts, load_plan.max_decodes - requests)
    return tuple(drafts // requests + (i < drafts % requests) for i in range(requests))


def _weights(load_plan: LoadPlan) -> dict[str, WeightShare]:
    """Bytes by kind of a model, and of the draft model beside it."""
    found, draft = weight_shares(load_plan.meta_model), load_plan.meta_draft()
    return found if draft is None else found | {DRAFT: sum(weight_shares(draft).values(), WeightShare())}


def weight_shares(model: Decoder | DraftModel) -> dict[str, WeightShare]:
    """Bytes of a rank's weights by kind, in the order of `KINDS`. `model`: made without memory for this rank."""
    found: dict[str, WeightShare] = {}
    seen: set[int] = set()
    for _, module, kind in modules_by_kind(model):
        if isinstance(module, Experts):
            found[kind] = found.get(kind, WeightShare()) + WeightShare(sharded=module.copied_bytes())
        elif isinstance(module, Head) and (copied := module.copied_bytes()):
            share = WeightShare(replicated=copied) if module.whole else WeightShare(sharded=copied)
            found[kind] = found.get(kind, WeightShare()) + share
        for parameter in module.parameters(recurse=False):
            # A head may share the table of an embedding.
            if id(parameter) not in seen:
                seen.add(id(parameter))
                for part, share in _parameter_shares(module, kind, parameter):
                    found[part] = found.get(part, WeightShare()) + share
    return {kind: found[kind] for kind in KINDS if kind in found}


def _parameter_shares(module: nn.Module, kind: str, parameter: nn.Parameter) -> Iterator[tuple[str, WeightShare]]:
    """Kind and bytes of each section of a parameter: of what quantized sections share, each has its part by rows."""
    placement, parallel, size = placement_of(parameter), parallel_of(parameter), packed_bytes(parameter)
    rows, before, start = placement.local(parallel), 0, 0
    for section in placement.sections:
        before += section.local(parallel)
        end = size * before // rows
        part = kind
        if kind == PROJECTIONS and isinstance(module, Linear) and not section.unit:
            part = LATENTS
        if placement.held is not None:
            share = WeightShare(sharded=end - start)
        elif not section.unit:
            share = WeightShare(replicated=end - start)
        elif not section.room and section.size // section.unit < parallel.size:
            share = WeightShare(copied=end - start)
        else:
            share = WeightShare(sharded=end - start)
        yield part, share
        start = end


def modules_by_kind(model: Decoder | DraftModel) -> Iterator[tuple[str, nn.Module, str]]:
    """Every module with its name and the kind of its own parameters."""
    roots = {f"layers.{i}.mixer": ATTENTION for i in range(len(model.layers))}
    roots |= {f"layers.{i}.ffn": FEED_FORWARD for i in range(len(model.layers))}
    kinds: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = roots.get(name) or kinds.get(name.rpartition(".")[0], OTHER)
        kind = next((own for type_, own in _KIND_OF if isinstance(module, type_)), kind)
        if kind == ATTENTION and isinstance(module, Linear | RowLinear | GroupedLinear | LatentProjection):
            kind = PROJECTIONS
        kinds[name] = kind
        yield name, module, kind


def quantized_modules(model: Decoder | DraftModel) -> dict[str, str]:
    """The modules with a quantized weight: name -> kind."""
    return {
        name: kind
        for name, module, kind in modules_by_kind(model)
        if any(format_of(parameter) is not PLAIN for parameter in module.parameters(recurse=False))
    }


def cache_shares(load_plan: LoadPlan) -> tuple[CacheShare, ...]:
    """The fields of all cache groups, as this rank has them beside one rank that has everything."""
    ranks = load_plan.build.parallel.size
    alone = dataclasses.replace(load_plan.build, parallel=Parallel())
    specs = attention_specs(load_plan.spec, alone, load_plan.checkpoint.source)
    if load_plan.draft is not None:
        specs += tuple(attention_of(layer.mixer, alone) for layer in load_plan.draft.layers)
    whole = [spec.caches() for spec in specs]
    found: dict[tuple[str, str, float], list[tuple[int, Field, Field]]] = {}
    for group in load_plan.groups:
        for member in group.members:
            for own, full in _fields(member.layout, whole[member.layer][member.name]):
                key = (group.label, f"{member.name} {own.name}", ranks * own.bytes / full.bytes)
                found.setdefault(key, []).append((member.layer, own, full))
    return tuple(
        CacheShare(
            group=group,
            field=field,
            layers=len({layer for layer, _, _ in fields}),
            bytes=sum(own.bytes for _, own, _ in fields),
            model_bytes=sum(full.bytes for _, _, full in fields),
            copies=copies,
        )
        for (group, field, copies), fields in found.items()
    )


def _fields(own: CacheLayout, full: CacheLayout) -> Sequence[tuple[Field, Field]]:
    return list(zip(own.fields, full.fields, strict=True))


def collectives(load_plan: LoadPlan, *, async_scheduling: bool) -> tuple[Collective, ...]:
    """What a decode step of `max_num_seqs` requests exchanges where any of them draws its token; greedy ones exchange
    an integer each in place of logits and tokens. `async_scheduling`: whether the ranks learn the sampled tokens on
    their devices. With drafts, the step has those of `drafts_of_step`.

    A rank's weights that are cut along their inputs make a part of a sum: one all-reduce adds up the mixer's, and one
    those of all that follows it in the layer.
    """
    parallel, drafts, model = load_plan.build.parallel, drafts_of_step(load_plan), load_plan.meta_model
    if parallel.size == 1:
        return ()
    rows = load_plan.max_num_seqs + sum(drafts)
    item = load_plan.build.dtype.itemsize
    found = _of_pass(model, load_plan, rows, load_plan.spec.hidden)
    if not model.head.whole:
        logit = item if load_plan.spec.softcap is not None else torch.float32.itemsize
        found["gather", "logits", rows * model.head.outputs * logit] += 1
    draft = load_plan.meta_draft()
    if async_scheduling or draft is not None:
        found["broadcast", "sampled tokens", rows * torch.int64.itemsize] += 1
    if draft is not None:
        found += _of_drafts(draft, load_plan)
    return tuple(Collective(name, of, count, size) for (name, of, size), count in found.items() if count)


def _of_pass(model: Decoder | DraftModel, load_plan: LoadPlan, rows: int, hidden: int) -> Counter[tuple[str, str, int]]:
    """What a pass of `rows` tokens joins up to the hidden states: how often each (collective, joined, bytes)."""
    item = load_plan.build.dtype.itemsize
    found: Counter[tuple[str, str, int]] = Counter()
    for module in model.modules():
        if isinstance(module, Embedding) and not module.whole:
            found["all-reduce", "embeddings", rows * module.hidden * item] += 1
    layers: list[nn.Module] = list(model.layers)
    for layer in layers:
        partial = [name for name, block in layer.named_children() if has_part_of_sum(block)]
        for of, blocks in (("mixers", partial.count("mixer")), ("feed-forward blocks", len({*partial} - {"mixer"}))):
            found["all-reduce", of, rows * hidden * item * blocks] += bool(blocks)
    # Sums of squares in fp32, one for each token.
    norms = sum(isinstance(module, AllHeadsNorm) for module in model.modules())
    found["all-reduce", "norms over all heads", rows * torch.float32.itemsize] += norms
    return found


def _of_drafts(draft: DraftModel, load_plan: LoadPlan) -> Counter[tuple[str, str, int]]:
    """The same of the passes of a draft model, and of the drafts that the ranks choose together."""
    found: Counter[tuple[str, str, int]] = Counter()
    drafts, target = drafts_of_step(load_plan), load_plan.meta_model
    heads = [module for module in draft.modules() if isinstance(module, Head)] or [target.head]
    own = [module for module in draft.modules() if isinstance(module, Embedding)]
    # Where it has no embedding of its own, it is as wide as the model.
    embedding = own[0] if own else target.embedding
    hidden = embedding.hidden
    # Every pass of a chain has a row of each sequence that drafts. The first pass may make none.
    selected = sum(count > 0 for count in drafts)
    chosen = 0 if load_plan.reads_tokens_alone else 1
    for step in range(max(drafts) + 1 - chosen):
        rows = selected if step else load_plan.max_num_seqs + sum(drafts)
        found += _of_pass(draft, load_plan, rows, hidden)
        if not own and not embedding.whole:
            found["all-reduce", "embeddings", rows * hidden * load_plan.build.dtype.itemsize] += 1
        if not heads[0].whole and (step or chosen):
            found["all-reduce", "tokens", selected * torch.int64.itemsize] += 1
    return Counter({(name, f"{of} of the draft model", size): count for (name, of, size), count in found.items()})


def has_part_of_sum(block: nn.Module) -> bool:
    """Whether what `block` returns on this rank is a part of a sum over ranks: some weight is cut along its inputs."""
    placed = [(placement_of(parameter), parallel_of(parameter)) for parameter in block.parameters()]
    cut = ((section, parallel) for one, parallel in placed if one.dim == 1 for section in one.sections)
    held = any(placement.held is not None for placement, _ in placed)
    return held or any(section.is_cut(parallel) for section, parallel in cut)
