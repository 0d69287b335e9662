"""The least work of a step: bytes that must move and operations that must be computed, by class of kernel.

Classes are the families of attention, `experts`, `dense` (all other projections), `head` and `rest`. Counted are
weights, cached rows and states, and what attention is given and returns; not what passes between other kernels, which
could be fused. Owns the formulae, and which class a module is counted in. Must not know models' names, kernels, times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from allotrope.attention.cache_layout import row_bytes
from allotrope.attention.csa import CsaSpec
from allotrope.attention.dsa import DsaSpec
from allotrope.attention.gdn import GdnSpec
from allotrope.attention.gdn.spec import KERNEL_CHUNK
from allotrope.attention.mha import MhaSpec
from allotrope.attention.mla import MlaSpec
from allotrope.engine.load_plan import LoadPlan
from allotrope.layers.decoder import Decoder
from allotrope.layers.embedding import Embedding, Head
from allotrope.layers.linear import Linear, RowLinear
from allotrope.layers.mixers.csa import GroupedLinear
from allotrope.layers.moe import Experts
from allotrope.layers.norm import AllHeadsNorm, RMSNorm
from allotrope.layers.parallel import placement_of
from allotrope.layers.router import Router, RouterSpec
from allotrope.layers.weights import SCALES, format_of, packed_bytes

EXPERTS, DENSE, HEAD, REST = "experts", "dense", "head", "rest"


@dataclass(frozen=True)
class Work:
    """`bytes`: read and written. `flops`: floating-point operations, `fp8` of them in products of FP8 numbers."""

    bytes: int = 0
    flops: int = 0
    fp8: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops, self.fp8 + other.fp8)

    def __mul__(self, times: int) -> Work:
        return Work(self.bytes * times, self.flops * times, self.fp8 * times)


@dataclass(frozen=True)
class Lengths:
    """A step's requests. `new`, `seen`: [B] their new tokens, and the tokens that the last of these sees. `item`: bytes
    of a number of the activations."""

    new: torch.Tensor
    seen: torch.Tensor
    item: int

    @property
    def tokens(self) -> int:
        return int(self.new.sum())

    @cached_property
    def visible(self) -> torch.Tensor:
        """[T] tokens that each new token sees, itself included."""
        starts = self.new.cumsum(0) - self.new
        return torch.arange(self.tokens) + 1 + (self.seen - self.new - starts).repeat_interleave(self.new)

    def within(self, window: int) -> int:
        """Rows of the last `window` tokens that the queries read, each row once a request."""
        return int(torch.minimum(self.seen, self.new - 1 + window).sum())


class StepWork:
    """The least work of one rank in any step, drawn from its model once."""

    def __init__(self, load_plan: LoadPlan) -> None:
        # Layers are mostly of few kinds.
        self._specs, self._item = Counter(load_plan.specs), load_plan.build.dtype.itemsize
        model = load_plan.meta_model()
        routers = _routers(model)
        # By class, and the share of it that a token takes: of weights read whole, and products with one token.
        self._weights: dict[tuple[str, float], Work] = {}
        for module, kind in modules_by_class(model):
            router = routers.get(id(module))
            key = (kind, 1.0 if router is None else router.topk / router.experts)
            self._weights[key] = self._weights.get(key, Work()) + _weights(module, kind)

    def __call__(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> dict[str, Work]:
        """The work of a step, by class; classes that the model lacks are left out.

        `query_lens`, `seq_lens`: per request, new tokens, and tokens visible after the step. The last token of each
        request is sampled. Weights are read once, as they are stored; of E experts of which each token takes k, those
        that T tokens are expected to choose, E (1 - (1 - k/E)^T).
        """
        new, seen = (torch.tensor(tuple(lens), dtype=torch.int64) for lens in (query_lens, seq_lens))
        lengths = Lengths(new, seen, self._item)
        found = {spec.family: Work() for spec in self._specs} | {kind: Work() for kind in (EXPERTS, DENSE, HEAD, REST)}
        for spec, count in self._specs.items():
            found[spec.family] += FORMULAE[spec.family](spec, lengths) * count
        for (kind, used), whole in self._weights.items():
            tokens = len(new) if kind == HEAD else lengths.tokens
            read = round((1 - (1 - used) ** tokens) * whole.bytes)
            found[kind] += Work(read, *(round(tokens * used * flops) for flops in (whole.flops, whole.fp8)))
        return {kind: work for kind, work in found.items() if work != Work()}


def step_work(load_plan: LoadPlan, query_lens: Sequence[int], seq_lens: Sequence[int]) -> dict[str, Work]:
    """The work of one step, as `StepWork` has it."""
    return StepWork(load_plan)(query_lens, seq_lens)


def modules_by_class(model: Decoder) -> list[tuple[nn.Module, str]]:
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


def _routers(model: Decoder) -> dict[int, RouterSpec]:
    """Who chooses among some experts, by their id: the router beside them."""
    found = {}
    for parent in model.modules():
        beside = {type(child): child for child in parent.children()}
        if Experts in beside:
            router = beside[Router]
            assert isinstance(router, Router)
            found[id(beside[Experts])] = router.spec
    return found


def _weights(module: nn.Module, kind: str) -> Work:
    """What a module's own parameters take, and their products with one row."""
    total = Work()
    if isinstance(module, Embedding):
        # A few rows of it.
        return total
    experts = isinstance(module, Experts)
    for name, parameter in module.named_parameters(recurse=False):
        if placement_of(parameter).below:
            # A table to look up a few rows in.
            continue
        total += Work(packed_bytes(parameter))
        # A family's formula has the products with its own parameters.
        product = parameter.dim() == (3 if experts else 2) and kind in (EXPERTS, DENSE, HEAD, REST)
        if product and not name.endswith(SCALES):
            format = format_of(parameter)
            flops = 2 * parameter.numel() * format.pack_factor
            total += Work(0, flops, flops if format.name == "fp8" else 0)
    return total


def mha_work(spec: MhaSpec, lengths: Lengths) -> Work:
    """Rows in the window once; logits and weighted sums of the pairs of query and visible key."""
    window = int(lengths.seen.max()) if spec.window is None else spec.window
    width = spec.num_heads * (spec.head_dim + spec.value_dim)
    rows = lengths.within(window) * row_bytes(spec.caches()["kv"])
    pairs = int(lengths.visible.clamp(max=window).sum())
    return Work(rows + lengths.tokens * width * lengths.item, 2 * pairs * width)


def mla_work(spec: MlaSpec, lengths: Lengths) -> Work:
    """Every row once; see `_latent_flops`."""
    new, seen = lengths.new, lengths.seen
    rows = int(seen.sum()) * row_bytes(spec.caches()["latent"])
    flops = int(_latent_flops(spec, _pairs(new, seen), new, seen).sum())
    return Work(rows + lengths.tokens * _latent_width(spec) * lengths.item, flops)


def dsa_work(spec: DsaSpec, lengths: Lengths) -> Work:
    """Queries that see at most `topk` rows are as those of latent attention; for the others all keys are scored, and as
    many rows as they pick are read, in their absorbed form."""
    new, seen, mla = lengths.new, lengths.seen, spec.mla
    near = (spec.topk - (seen - new)).clamp(min=0).minimum(new)
    far = new - near
    flops = _latent_flops(mla, _pairs(near, seen - far), near, torch.where(near > 0, seen - far, 0))
    flops = flops + _latent_flops(mla, far * spec.topk, far, None)
    moved = int(seen.minimum(spec.topk * new).sum()) * row_bytes(mla.caches()["latent"])
    work = Work(moved + lengths.tokens * _latent_width(mla) * lengths.item, int(flops.sum()))
    if spec.indexer is None:
        return work
    width = spec.indexer.num_heads * spec.indexer.head_dim
    scored = 2 * width * int(_pairs(far, seen).sum())
    keys = int(seen[far > 0].sum()) * row_bytes(spec.caches()["index"])
    fp8 = scored if spec.indexer.key_format == "scaled" else 0
    return work + Work(keys + int(far.sum()) * width * lengths.item, scored, fp8)


def gdn_work(spec: GdnSpec, lengths: Lengths) -> Work:
    """States read, unless a sequence begins, and written. Single tokens by the recurrence, prompts in chunks."""
    new, dk, dv = lengths.new, spec.k_head_dim, spec.v_head_dim
    states = len(new) + int((new < lengths.seen).sum())
    width = spec.conv_dim + spec.num_v_heads + spec.decay_dim + spec.value_dim
    chunk = new.clamp(max=KERNEL_CHUNK)
    of_token = torch.where(new == 1, 7 * dk * dv, 6 * dk * dv + 2 * chunk * (3 * dk + 2 * dv) + chunk**2)
    return Work(
        states * row_bytes(spec.caches()["state"]) + lengths.tokens * width * lengths.item,
        spec.num_v_heads * int((new * of_token).sum()),
    )


def csa_work(spec: CsaSpec, lengths: Lengths) -> Work:
    """Rows of the window, and the entries that are visible or picked, once each; index keys where there are more than
    are picked; what each token brings to the entries that pool it."""
    new, visible, caches, heads = lengths.new, lengths.visible, spec.caches(), spec.num_heads
    rows, pairs = lengths.within(spec.window), int(visible.clamp(max=spec.window).sum())
    work = Work(2 * lengths.tokens * heads * spec.head_dim * lengths.item)
    if spec.ratio:
        states = row_bytes(caches["state"]) + (row_bytes(caches["index_state"]) if spec.indexer else 0)
        work += Work(lengths.tokens * states)
        entries, existing = visible // spec.ratio, lengths.seen // spec.ratio
        most = int(existing.max()) if spec.indexer is None else spec.indexer.topk
        rows += int(existing.minimum(most * new).sum())
        pairs += int(entries.clamp(max=most).sum())
        if spec.indexer is not None:
            width, scored = spec.indexer.num_heads * spec.indexer.head_dim, entries[entries > most]
            keys = int(existing[existing > most].sum()) * row_bytes(caches["index"])
            work += Work(keys + len(scored) * width * lengths.item, 2 * width * int(scored.sum()))
    return work + Work(rows * row_bytes(caches["window"]), 4 * heads * spec.head_dim * pairs)


FORMULAE: dict[str, Callable[[Any, Lengths], Work]] = {
    "mha": mha_work,
    "mla": mla_work,
    "dsa": dsa_work,
    "gdn": gdn_work,
    "csa": csa_work,
}
"""Of one layer, by family; without parameters."""


def _pairs(new: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """[B] pairs of the last `new` tokens of `seen` ones and what each of them sees."""
    return new * (seen - new) + new * (new + 1) // 2


def _latent_width(spec: MlaSpec) -> int:
    """Numbers of a token's queries and results."""
    return spec.num_heads * (spec.nope_dim + spec.rope_dim + spec.v_head_dim)


def _latent_flops(spec: MlaSpec, pairs: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
    """[B] the fewer of both ways: absorbed, where each query and its result are projected and pairs meet in the latent;
    and plain, where `keys` rows become keys and values of all heads. `keys` None: absorbed."""
    up = 2 * spec.num_heads * spec.latent_dim * (spec.nope_dim + spec.v_head_dim)
    absorbed = 2 * spec.num_heads * pairs * (2 * spec.latent_dim + spec.rope_dim) + queries * up
    if keys is None:
        return absorbed
    return absorbed.minimum(2 * pairs * _latent_width(spec) + keys * up)
