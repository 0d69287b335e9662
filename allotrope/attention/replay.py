"""Replays a case's sequences through one layer as an engine would, in memory where a wrong read shows.

Owns: pools for one layer, pages and slots in random order. Every byte starts as NaN, page and slot 0 as zeros; the
next owner of a page finds the stale bytes of the one before.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, CacheIndex, SlotIndex, index_pages
from allotrope.attention.cache_layout import PagedRows, StateSlots, WindowRows, pool_bytes, views
from allotrope.attention.check import Case
from allotrope.attention.family import Spec
from allotrope.attention.registry import FAMILIES

Step = Sequence[tuple[int, int]]
"""(sequence, new tokens) in the order of the batch, sequences with one new token first."""


def whole(lengths: Sequence[int]) -> list[Step]:
    """Every sequence at once, in one step."""
    return [in_order((i, n) for i, n in enumerate(lengths))]


def alone(lengths: Sequence[int]) -> list[Step]:
    """One sequence a step, whole."""
    return [[(i, n)] for i, n in enumerate(lengths)]


def in_chunks(lengths: Sequence[int], size: int) -> list[Step]:
    """Every unfinished sequence takes `size` tokens a step."""
    return [
        in_order((i, min(size, n - begin)) for i, n in enumerate(lengths) if n > begin)
        for begin in range(0, max(lengths), size)
    ]


def at_random(lengths: Sequence[int], seed: int, sizes: Sequence[int] = (1, 1, 2, 3, 17, 64, 300)) -> list[Step]:
    """Random chunks of random sequences in random order."""
    choose = random.Random(seed)
    remaining = dict(enumerate(lengths))
    steps: list[Step] = []
    while remaining:
        members = choose.sample(sorted(remaining), choose.randint(1, len(remaining)))
        step = in_order((i, min(remaining[i], choose.choice(sizes))) for i in members)
        steps.append(step)
        remaining = {i: n - dict(step).get(i, 0) for i, n in remaining.items()}
        remaining = {i: n for i, n in remaining.items() if n}
    return steps


def in_order(step: Iterable[tuple[int, int]]) -> Step:
    """The step with its one-token sequences first, otherwise unchanged."""
    return sorted(step, key=lambda member: member[1] != 1)


class Replay:
    """One layer, its pools, and the progress of each sequence of a case.

    `pools`: cache name -> field name -> view. `held`: cache name -> sequence -> its pages (-1: out of the window), or
    its one slot. `outputs`: per sequence, the output of each of its steps.
    """

    def __init__(self, case: Case, backend: AttentionBackend, device: str = "cpu", seed: int = 0) -> None:
        self.case = case
        self.spec: Spec = case.spec
        self.backend = backend
        self.device = torch.device(device)
        self.inputs = case.inputs(seed)
        self.layer = {name: t if t is None else t.to(self.device) for name, t in self.inputs.layer.items()}
        self.begin = [sum(case.lengths[:i]) for i in range(len(case.lengths))]
        self.done = [0] * len(case.lengths)
        self.outputs: list[list[torch.Tensor]] = [[] for _ in case.lengths]
        self.layouts = case.spec.caches()
        self.page_sizes = {name: self._page_size(name) for name in self.layouts}
        self.pools: dict[str, dict[str, torch.Tensor]] = {}
        self.free: dict[str, list[int]] = {}
        self.held: dict[str, list[list[int]]] = {}
        for name, layout in self.layouts.items():
            size = self.page_sizes[name]
            pages = 1 + sum(1 if isinstance(layout, StateSlots) else -(-n // size) for n in case.lengths)
            buffer = torch.full((pool_bytes(layout, size, pages),), 0xFF, dtype=torch.uint8, device=self.device)
            self.pools[name] = views(layout, size, pages, buffer)
            for view in self.pools[name].values():
                view[0] = 0
            self.free[name] = list(range(1, pages))
            random.Random(seed).shuffle(self.free[name])
            self.held[name] = [[] for _ in case.lengths]

    def play(self, steps: Iterable[Step]) -> torch.Tensor:
        """Run all steps; returns [N, ...], every token's output, sequence after sequence."""
        for step in steps:
            self.step(step)
        return torch.cat([output for outputs in self.outputs for output in outputs])

    def step(self, step: Step) -> torch.Tensor:
        """Run one step; returns its [T, ...] output."""
        ends = [self.done[i] + n for i, n in step]
        batch = BatchLayout(tuple(n for _, n in step), tuple(ends), self.device)
        for (i, _), end in zip(step, ends, strict=True):
            self._take_pages(i, end)
        plan = self.plan(batch, {name: self.index(name, batch, [i for i, _ in step]) for name in self.layouts})
        inputs = FAMILIES[self.spec.family].ready_inputs(self.spec, **self.tokens(step), **self.layer)
        result = self.backend.run(self.spec, plan, self.pools, inputs)
        # A layer with an indexer returns its top-k indices as well.
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        for (i, n), start in zip(step, batch.query_start[:-1], strict=True):
            self.outputs[i].append(out[start : start + n])
            self.done[i] += n
            self._free_pages(i)
        return out

    def plan(self, batch: BatchLayout, index: dict[str, CacheIndex]) -> object:
        """The backend's plan of one step."""
        return self.backend.plan(self.spec, batch, index)

    def tokens(self, step: Step) -> dict[str, torch.Tensor]:
        """The step's slice of every per-token input."""
        rows = [slice(self.begin[i] + self.done[i], self.begin[i] + self.done[i] + n) for i, n in step]
        return {name: torch.cat([t[r] for r in rows]).to(self.device) for name, t in self.inputs.tokens.items()}

    def index(self, name: str, batch: BatchLayout, members: Sequence[int]) -> CacheIndex:
        """The index of cache `name` for the sequences of a step."""
        held = [self.held[name][i] for i in members]
        if isinstance(self.layouts[name], StateSlots):
            return SlotIndex(torch.tensor([slot for (slot,) in held], device=self.device))
        return index_pages(batch, self.page_sizes[name], held)

    def _page_size(self, name: str) -> int:
        layout = self.layouts[name]
        return math.lcm(self.case.page_size, layout.stride) if isinstance(layout, PagedRows) else self.case.page_size

    def _take_pages(self, i: int, end: int) -> None:
        for name, layout in self.layouts.items():
            need = 1 if isinstance(layout, StateSlots) else -(-end // self.page_sizes[name])
            held = self.held[name][i]
            held.extend(self.free[name].pop() for _ in range(need - len(held)))

    def _free_pages(self, i: int) -> None:
        """Free the pages that no later query reads, unchanged: the next owner finds stale bytes."""
        for name, layout in self.layouts.items():
            held, size = self.held[name][i], self.page_sizes[name]
            unread = 0
            if self.done[i] == self.case.lengths[i]:
                unread = len(held)
            elif isinstance(layout, WindowRows):
                unread = max(0, self.done[i] + 1 - layout.window) // size
            for k in range(unread):
                if held[k] >= 0:
                    self.free[name].append(held[k])
                    held[k] = -1
