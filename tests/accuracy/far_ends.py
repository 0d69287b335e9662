"""One layer whose sequences lie twice in one large pool: in its lowest pages, and in its highest.

Owns: the pool, which is never filled; the pages of both ends; the steps that both take; what the reference makes of
them. Must not know: which kernels run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, BatchTensors, CacheIndex, PageIndex, SlotIndex, index_pages
from allotrope.attention.cache_layout import (
    PLANE_ALIGNMENT,
    CacheLayout,
    StateSlots,
    page_bytes,
    page_views,
    pool_bytes,
    views,
)
from allotrope.attention.check import Case
from allotrope.attention.csa import indexer as csa_indexer
from allotrope.attention.csa import reference as csa_reference
from allotrope.attention.csa.rotary import rotate_tail
from allotrope.attention.dsa import indexer as dsa_indexer
from allotrope.attention.dsa import reference as dsa_reference
from allotrope.attention.registry import FAMILIES

BYTES, ELEMENTS = 2**32, 2**31
"""Offsets that numbers of 32 bits cannot hold: of bytes, and of elements where they have a sign."""

Pools = dict[str, dict[str, torch.Tensor]]
ENDS = ("near", "far")
FP8 = torch.float8_e4m3fn
# Linux's; Python has it from 3.13 on.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def make_pool(size: int, device: torch.device) -> torch.Tensor:
    """[size] uint8, unwritten. A CPU's takes memory only where it is touched. Raises OSError where it is refused."""
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, device=device)
    reserved = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(reserved, dtype=torch.uint8)


class Member(NamedTuple):
    """`count` tokens of a sequence from `begin` on, as a request of a step. `base`: the sequence's token that the
    request takes for its first."""

    sequence: int
    begin: int
    count: int
    base: int = 0


class TooSmall(Exception):
    """The pool has no room for both ends."""


class Layer:
    """A layer of `case`, its caches in equal shares of `pool`, and its sequences at both ends of each.

    The far end has the pages of the near one in the same order. `pools`: cache name -> field name -> view. `stored`:
    cache name -> the same memory as [P, bytes of a page], one tensor for each plane. `held`: end -> cache name ->
    sequence -> its pages, or its one slot. `by_page`: a page holds its rows whole, as a host's does, in place of planes
    of all pages.
    """

    def __init__(self, case: Case, backend: AttentionBackend, pool: torch.Tensor, *, by_page: bool = False) -> None:
        self.case, self.spec, self.backend, self.device = case, case.spec, backend, pool.device
        self.layouts: dict[str, CacheLayout] = case.spec.caches()
        self.page_sizes = {
            name: math.lcm(case.page_size, getattr(at, "stride", 1)) for name, at in self.layouts.items()
        }
        with self.device:
            generator = torch.Generator(self.device).manual_seed(0)
            self.inputs = case.draw(case.spec, sum(case.lengths), generator, case.dtype)
        self.first = [sum(case.lengths[:i]) for i in range(len(case.lengths))]
        self.by_page = by_page
        self.pools: Pools = {}
        self.stored: dict[str, list[torch.Tensor]] = {}
        self.held: dict[str, dict[str, list[list[int]]]] = {end: {} for end in ENDS}
        self.used: dict[str, int] = {}
        share = len(pool) // len(self.layouts) // PLANE_ALIGNMENT * PLANE_ALIGNMENT
        for i, (name, layout) in enumerate(self.layouts.items()):
            self._place(name, layout, pool[i * share : (i + 1) * share])

    def _place(self, name: str, layout: CacheLayout, share: torch.Tensor) -> None:
        """Lay out a cache in `share`; its pages in use hold NaN at first, page 0 zeros."""
        size, is_state = self.page_sizes[name], isinstance(layout, StateSlots)
        counts = [1 if is_state else -(-length // size) for length in self.case.lengths]
        used = self.used[name] = sum(counts)
        pages = (len(share) - PLANE_ALIGNMENT * len(layout.fields)) // page_bytes(layout, size)
        if pages < 1 + 2 * used:
            raise TooSmall(f"cache {name!r}: {pages} pages in {len(share)} bytes, {1 + 2 * used} are needed")
        if self.by_page:
            whole = share[: pages * page_bytes(layout, size)].view(pages, -1)
            self.pools[name], self.stored[name] = page_views(layout, whole), [whole]
        else:
            self.pools[name] = views(layout, size, pages, share[: pool_bytes(layout, size, pages)])
            self.stored[name] = [view.flatten(1).view(torch.uint8) for view in self.pools[name].values()]
        order = list(range(1, used + 1))
        random.Random(used).shuffle(order)
        starts = [sum(counts[:i]) for i in range(len(counts))]
        near = [order[start : start + count] for start, count in zip(starts, counts, strict=True)]
        shift = pages - used - 1
        self.held["near"][name] = near
        self.held["far"][name] = [[page + shift for page in row] for row in near]
        for stored in self.stored[name]:
            stored[0] = 0
            for first in (1, pages - used):
                stored[first : first + used] = 0xFF

    def offsets(self) -> dict[str, tuple[int, int]]:
        """Of each field, where the lowest page of the far end begins in its plane: byte and element."""
        found = {}
        for name, fields in self.pools.items():
            for field, view in fields.items():
                elements = (len(view) - self.used[name]) * view.stride(0)
                found[f"{name}.{field}"] = (elements * view.element_size(), elements)
        return found

    def tokens(self, members: Sequence[Member]) -> dict[str, torch.Tensor]:
        """A step's slice of every per-token input."""
        rows = [slice(self.first[m.sequence] + m.begin, self.first[m.sequence] + m.begin + m.count) for m in members]
        return {name: torch.cat([t[row] for row in rows]) for name, t in self.inputs.tokens.items()}

    def batch(self, members: Sequence[Member]) -> BatchLayout:
        lens = tuple(m.begin + m.count - m.base for m in members)
        return BatchLayout(tuple(m.count for m in members), lens, self.device)

    def index(self, end: str, members: Sequence[Member], batch: BatchLayout) -> dict[str, CacheIndex]:
        """Where the entries of a step lie at one end; decodes have the int32 tables of a host."""
        dtype = torch.int32 if batch.num_decodes == len(members) else torch.int64
        made: dict[str, CacheIndex] = {}
        for name, size in self.page_sizes.items():
            held = self.held[end][name]
            if isinstance(self.layouts[name], StateSlots):
                slots = [held[m.sequence][0] for m in members]
                made[name] = SlotIndex(torch.tensor(slots, dtype=dtype, device=self.device))
            else:
                index = index_pages(batch, size, [held[m.sequence][m.base // size :] for m in members])
                made[name] = PageIndex(size, index.table.to(dtype), index.slots)
        return made

    def step(self, end: str, members: Sequence[Member]) -> tuple[torch.Tensor, ...]:
        """Run one step at one end. Returns its output, and with an indexer its top-k."""
        batch = self.batch(members)
        plan = self.backend.plan(self.spec, batch, self.index(end, members, batch))
        return self.run(plan, self.tokens(members))

    def run(self, plan: object, tokens: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        inputs = FAMILIES[self.spec.family].ready_inputs(self.spec, **tokens, **self.inputs.layer)
        with _topk_of_csa() as topk:
            out = self.backend.run(self.spec, plan, self.pools, inputs)
        return (*(out if isinstance(out, tuple) else (out,)), *topk)

    def difference_of_ends(self) -> list[str]:
        """Where the pages of the far end do not hold the bytes of those of the near one."""
        wrong = []
        for name, planes in self.stored.items():
            used = self.used[name]
            for plane, stored in enumerate(planes):
                near, far = stored[1 : used + 1], stored[len(stored) - used :]
                if not torch.equal(near, far):
                    pages = (near != far).any(1).nonzero().flatten()
                    wrong.append(f"{name}, plane {plane}: {len(pages)} of {used} pages differ, first {int(pages[0])}")
        return wrong

    def snapshot(self) -> Pools:
        """The pages of the near end under their own numbers, widened to fp32 unless they are FP8."""
        wide = _widened(self.spec).caches()
        found: Pools = {}
        for name, used in self.used.items():
            near = {field.name: self.pools[name][field.name][: used + 1] for field in wide[name].fields}
            kept = {field.name: torch.empty(near[field.name].shape, dtype=field.dtype, device=self.device)
                    for field in wide[name].fields}  # fmt: skip
            found[name] = {field: copy.copy_(near[field]) for field, copy in kept.items()}
        return found

    def reference(self, pools: Pools, members: Sequence[Member], topk: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the reference makes of a step in fp32, from `pools`, the snapshot before it.

        `topk`: what the step's own indexer chose. It is held against the reference's scores, and then taken: rounding
        chooses otherwise among scores that are nearly equal.
        """
        batch, spec = self.batch(members), _widened(self.spec)
        family = FAMILIES[spec.family]
        reference = family.backends[-1]
        tokens, layer = _floats(self.tokens(members)), _floats(self.inputs.layer)
        index = {
            name: PageIndex(own.page_size, own.table.long(), own.slots) if isinstance(own, PageIndex) else own
            for name, own in self.index("near", members, batch).items()
        }
        plan = reference.plan(spec, batch, index)
        with _given_topk(topk):
            out = reference.run(spec, plan, pools, family.ready_inputs(spec, **tokens, **layer))
        return out[0] if isinstance(out, tuple) else out


class CapturedDecode:
    """A decode of `size` requests, with static inputs and the int32 tables of a host: a graph on a GPU, eager on a CPU.

    Rows behind the step's own are padding.
    """

    def __init__(self, layer: Layer, size: int) -> None:
        self.layer, device = layer, layer.device
        longest = max(layer.case.lengths)
        self.seq_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        requests = torch.arange(size, device=device)
        starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        tensors = BatchTensors(self.seq_lens, starts, self.positions, requests)
        self.batch_args = ((1,) * size, (longest,) * size, device, tensors)
        self.tokens = {name: t[:size].clone() for name, t in layer.inputs.tokens.items()}
        self.index: dict[str, CacheIndex] = {}
        for name, page_size in layer.page_sizes.items():
            if isinstance(layer.layouts[name], StateSlots):
                self.index[name] = SlotIndex(torch.zeros(size, dtype=torch.int32, device=device))
            else:
                table = torch.full((size, -(-longest // page_size)), -1, dtype=torch.int32, device=device)
                self.index[name] = PageIndex(page_size, table, torch.full((size,), -1, device=device))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: tuple[torch.Tensor, ...] = ()
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            # Once for real: kernels are compiled, and libraries take their workspaces.
            with torch.cuda.stream(stream):
                self._body()
            torch.cuda.current_stream(device).wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._body()

    def _body(self) -> None:
        plan = self.layer.backend.plan(self.layer.spec, BatchLayout(*self.batch_args), self.index)
        self.outputs = self.layer.run(plan, self.tokens)

    def step(self, end: str, members: Sequence[Member]) -> tuple[torch.Tensor, ...]:
        """As `Layer.step`, for requests of one new token. Returns the rows of the requests, and of the padding."""
        batch, count = self.layer.batch(members), len(members)
        self.seq_lens.zero_()[:count] = batch.tensors.seq_lens
        self.positions.zero_()[:count] = batch.positions
        for name, t in self.layer.tokens(members).items():
            self.tokens[name][:count] = t
        for name, given in self.layer.index(end, members, batch).items():
            own = self.index[name]
            if isinstance(own, PageIndex) and isinstance(given, PageIndex):
                own.table.fill_(-1)[:count, : given.table.shape[1]] = given.table
                own.slots.fill_(-1)[:count] = given.slots
            elif isinstance(given, SlotIndex):
                own.slots.zero_()[:count] = given.slots
        if self.graph is None:
            self._body()
        else:
            self.graph.replay()
        return tuple(t.clone() for t in self.outputs)


def difference(near: torch.Tensor, far: torch.Tensor) -> str:
    """How two outputs that should have the same bits differ; empty if they do not."""
    if torch.equal(near, far):
        return ""
    differ = near != far
    first = [int(i) for i in torch.unravel_index(differ.flatten().int().argmax(), differ.shape)]
    error = (near.double() - far.double()).abs().nan_to_num(nan=math.inf).max()
    return f"{int(differ.sum())} of {differ.numel()} differ, by {float(error):.2e} at most, first at {first}"


def _floats(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: t.float() if torch.is_tensor(t) and t.is_floating_point() else t for name, t in tensors.items()}


def _widened(spec: Any) -> Any:
    """The spec with fp32 in place of 16-bit entries."""
    if spec.family == "dsa":
        return dataclasses.replace(spec, mla=_widened(spec.mla))
    if spec.family == "gdn":
        return dataclasses.replace(spec, conv_dtype=torch.float32)
    return spec if spec.kv_dtype == FP8 else dataclasses.replace(spec, kv_dtype=torch.float32)


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[Any]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield before
    finally:
        setattr(module, name, before)


@contextlib.contextmanager
def _topk_of_csa() -> Iterator[list[torch.Tensor]]:
    """Collects the entries that the indexer of compressed sparse attention chooses, which its kernels do not return."""
    from allotrope.attention.csa import triton_index

    topk: list[torch.Tensor] = []
    resolve = triton_index.resolve

    def keeping(paged: PageIndex, per_page: int, requests: torch.Tensor, topk_indices: torch.Tensor) -> torch.Tensor:
        topk.append(topk_indices)
        return resolve(paged, per_page, requests, topk_indices)

    with _replaced(triton_index, "resolve", keeping):
        yield topk


@contextlib.contextmanager
def _given_topk(topk: Sequence[torch.Tensor]) -> Iterator[None]:
    """The references take the given top-k in place of their own."""

    def of_dsa(spec: Any, plan: Any, keys: Any, q: torch.Tensor, weights: torch.Tensor, _: Any) -> torch.Tensor:
        (indices,) = topk
        if "factor" in keys:
            quantized, scale = dsa_indexer.scaled(q)
            q = quantized.float() * scale
        for chunk in plan.chunks:
            hold_topk(dsa_indexer.scores(chunk, keys, q[chunk.tokens], weights[chunk.tokens]), indices[chunk.tokens])
        return indices

    def of_csa(
        spec: Any, plan: Any, keys: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, _: Any
    ) -> torch.Tensor:
        rows = torch.zeros(len(q), spec.topk, dtype=torch.int64, device=q.device)
        rotated = rotate_tail(q, plan.rotation)
        for chunk in plan.chunks:
            (entries,) = topk
            chosen = entries[chunk.tokens]
            hold_topk(csa_indexer.scores(spec, chunk, keys, rotated, weights), chosen)
            rows[chunk.tokens] = chunk.compressed_rows.repeat_interleave(chunk.queries, dim=0).gather(1, chosen)
        return rows

    with _replaced(dsa_reference, "select_topk", of_dsa), _replaced(csa_reference, "select_topk", of_csa):
        yield


# Part of the spread of a query's scores by which rounding may move one of them.
_SCORE_ERROR = 0.02


def hold_topk(scores: torch.Tensor, chosen: torch.Tensor) -> None:
    """Assert that rows of `chosen` [n, K] ascend and have the largest of `scores` [n, m], -inf where masked."""
    topk = chosen.shape[1]
    assert bool((chosen[:, 0] >= 0).all() and (chosen.diff(dim=1) > 0).all()), "the top-k does not ascend"
    seen = scores > -torch.inf
    spread = scores.masked_fill(~seen, 0.0).double()
    count = seen.sum(1, keepdim=True)
    mean = spread.sum(1, keepdim=True) / count
    spread = (((spread - mean).square() * seen).sum(1, keepdim=True) / count).sqrt()
    least = scores.topk(topk, dim=1).values[:, -1:]
    margin = _SCORE_ERROR * spread
    taken = scores.gather(1, chosen)
    short = ((least - taken) / spread).amax(1)
    assert bool((short <= _SCORE_ERROR).all()), (
        f"the top-k of query {int(short.argmax())} has a score {float(short.max()):.2e} spreads below the best {topk}"
    )
    missed = (scores > least + margin).sum(1) - (taken > least + margin).sum(1)
    assert not bool(missed.any()), f"the top-k of query {int(missed.argmax())} lacks {int(missed.max())} of the best"
