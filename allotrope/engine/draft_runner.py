"""One rank's draft model: its first pass on the rows of the target's step, and its passes on one row a sequence.

Owns the hidden states between passes. Must not know which drafts are verified.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from allotrope.cache.groups import CacheGroup
from allotrope.engine.decode_buffers import DecodeBuffers
from allotrope.engine.graphs import DecodeGraphs
from allotrope.engine.inputs import DraftChain, Inputs, StepFacts, advanced, pack, unpack
from allotrope.engine.layer_plans import LayerPlans, Plans
from allotrope.engine.packed_step import PackedStep
from allotrope.layers.draft import DraftModel
from allotrope.layers.step import Step


class DraftRunner:
    """`layers`: of `model`. `verify`: as in `ModelRunner`."""

    def __init__(
        self,
        model: DraftModel,
        layers: LayerPlans,
        groups: Sequence[CacheGroup],
        device: torch.device,
        *,
        verify: bool,
    ) -> None:
        self.model, self._layers = model, layers
        self._groups, self._device, self._verify = groups, device, verify
        # Hidden states of the first pass, one row for each of its tokens; and the drafts of all passes.
        self._first: torch.Tensor | None = None
        self._drafted: torch.Tensor | None = None
        self._static: _StaticPasses | None = None

    def make_static(
        self, buffers: DecodeBuffers, sequences: int, max_drafts: int, *, capture: bool, alone: bool
    ) -> None:
        """Run the passes of decode steps on static buffers, as graphs once they are captured. `buffers`: the target's.
        `sequences`: most of a step. `max_drafts`: of each."""
        self._static = _StaticPasses(
            *(self.model, self._layers, buffers, sequences, max_drafts), capture=capture, alone=alone
        )

    @property
    def graphs(self) -> tuple[DecodeGraphs, ...]:
        """Those of the static passes."""
        return () if self._static is None else self._static.graphs

    def tokens(self) -> torch.Tensor | None:
        """What `draft` returned since the first pass, None if nothing."""
        return self._drafted

    def keep(self, features: torch.Tensor) -> None:
        """Keep the target's `features` [n, F] of a decode step on static buffers: a part of its graph."""
        assert self._static is not None
        self._static.features.copy_in(features)

    def start_static(self, sampled: torch.Tensor, size: int, *, store_only: bool) -> None:
        """The first pass behind a decode step that ran at `size`. `sampled`: [n] tokens behind its first rows.
        `store_only`: no chain follows."""
        assert self._static is not None
        self._drafted = None
        self._first = self._static.start(sampled, size, store_only=store_only)

    def start(
        self, features: torch.Tensor, sampled: torch.Tensor, inputs: Inputs, plans: Plans, *, store_only: bool
    ) -> None:
        """The first pass behind any other step. `features`: [T, F]. `sampled`: [n] tokens behind the rows that were
        sampled. `inputs`, `plans`: of the step. `store_only`: no chain follows."""
        assert inputs.next_ids is not None
        self._drafted = None
        next_ids = inputs.next_ids.masked_scatter(inputs.next_ids < 0, sampled).clamp(min=0)
        step = self._layers.step(next_ids, inputs, plans)
        hidden = self.model.from_target(features)
        self._first = None
        if store_only:
            self.model.store(hidden, step)
        else:
            self._first = self.model(hidden, step)

    def pack(self, chain: DraftChain) -> PackedStep:
        """Passes as integers for the ranks."""
        facts = StepFacts.of_chain(chain)
        if self._static is not None:
            return self._static.rows.pack(chain.rows, facts)
        return pack(chain.rows, facts, self._groups, pinned=self._device.type == "cuda", verify=self._verify)

    def draft(self, packed: PackedStep, facts: StepFacts) -> torch.Tensor:
        """Run the passes of a chain behind the first one. Returns the drafts [passes * n], pass by pass."""
        assert self._first is not None, "no pass has run"
        if self._static is not None:
            drafts = self._static.draft(packed, facts, self._first)
        else:
            inputs = unpack(packed, facts, self._groups, self._device)
            drafts = run_chain(self.model, self._layers, self._first, inputs, facts.passes)
        # Not the static buffer itself, which a capture may overwrite.
        self._drafted = drafts.flatten().clone()
        return self._drafted


def run_chain(model: DraftModel, layers: LayerPlans, first: torch.Tensor, inputs: Inputs, passes: int) -> torch.Tensor:
    """The passes of a chain. `first`: [T, W] hidden states of the first pass. `inputs`: rows of `DraftChain`. Returns
    the drafts [passes, B]."""
    room = inputs.prev_sampled_indices
    assert room is not None
    # In captured steps the host knows no more than upper bounds.
    captured = inputs.batch.static_tensors is not None and inputs.batch.verify is None
    on_host = None if captured else room.tolist()
    hidden = first[inputs.ids]
    drafts = [model.greedy(hidden)]
    while len(drafts) < passes:
        count = len(drafts)
        by = room.clamp(0, count)
        # A request that has no room any more must not store over the row of its last token.
        lens = None if on_host is None else [max(0, min(count, one)) for one in on_host]
        moved = advanced(inputs, by, lens, room >= count)
        hidden = model(hidden, layers.step(drafts[-1].clamp(min=0), moved, {}))
        drafts.append(model.greedy(hidden))
    return torch.stack(drafts)


class _Rows:
    """A static buffer as wide as the first rows that are copied into it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.rows: torch.Tensor | None = None

    def copy_in(self, values: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            self.rows = values.new_zeros(self._size, values.shape[1])
        return self.rows[: len(values)].copy_(values)


class _StaticPasses:
    """The passes of decode steps. `features`: of the target's rows. `rows`: one a sequence."""

    def __init__(
        self,
        model: DraftModel,
        layers: LayerPlans,
        buffers: DecodeBuffers,
        sequences: int,
        max_drafts: int,
        *,
        capture: bool,
        alone: bool,
    ) -> None:
        self._model, self._layers, self._buffers = model, layers, buffers
        device = buffers.device
        self.features, self._first = _Rows(buffers.size), _Rows(buffers.size)
        self._next_ids = torch.zeros(buffers.size, dtype=torch.int64, device=device)
        self.rows = DecodeBuffers(
            *(buffers.groups, sequences, buffers.context, 0, buffers.hidden.dtype, device), verify=buffers.verify
        )
        self._drafts = torch.zeros(max_drafts, sequences, dtype=torch.int64, device=device)
        kinds: dict[str, Any] = {"capture": capture, "alone": alone}
        self._first_graphs = DecodeGraphs(
            *(self._run_first, buffers.clear, buffers.size, device), **kinds, name="first draft passes"
        )
        # The same behind steps that no chain follows.
        self._store_graphs: DecodeGraphs | None = None
        if model.stores_alone:
            self._store_graphs = DecodeGraphs(
                *(self._run_store, buffers.clear, buffers.size, device), **kinds, name="first draft passes, stored only"
            )
        # A chain of each length, the longest first.
        self._chains = {
            passes: DecodeGraphs(
                *(functools.partial(self._run_chain, passes), self.rows.clear, sequences, device),
                **kinds,
                name=f"chains of {passes} drafts",
            )
            for passes in range(max_drafts, 0, -1)
        }
        stores = () if self._store_graphs is None else (self._store_graphs,)
        self.graphs = (self._first_graphs, *self._chains.values(), *stores)

    def start(self, sampled: torch.Tensor, size: int, *, store_only: bool) -> torch.Tensor | None:
        known = self._buffers.next_ids
        assert known is not None
        self._next_ids[:size].copy_(known[:size].masked_scatter(known[:size] < 0, sampled))
        if store_only and self._store_graphs is not None:
            self._store_graphs.run(size)
            return None
        self._first_graphs.run(size)
        assert self._first.rows is not None
        return self._first.rows

    def draft(self, packed: PackedStep, facts: StepFacts, first: torch.Tensor) -> torch.Tensor:
        """`first`: [T, W] hidden states of the first pass, which may have been that of another step than a decode."""
        graphs, count = self._chains[facts.passes], facts.requests
        size = graphs.padded(count)
        self.rows.refresh(packed, count, None, size)
        if first is not self._first.rows:
            # The rows that the chain reads come to the front of the static buffer.
            ids = self.rows.inputs(count)[0].ids
            self._first.copy_in(first[ids])
            ids.copy_(torch.arange(count, device=ids.device))
        graphs.run(size)
        return self._drafts[: facts.passes, :count]

    def _run_first(self, size: int) -> None:
        self._first.copy_in(self._model(*self._first_inputs(size)))

    def _run_store(self, size: int) -> None:
        self._model.store(*self._first_inputs(size))

    def _first_inputs(self, size: int) -> tuple[torch.Tensor, Step]:
        inputs, _ = self._buffers.inputs(size)
        features = self.features.rows
        assert features is not None, "no decode step has run"
        step = self._layers.step(self._next_ids[:size].clamp(min=0), inputs, {})
        return self._model.from_target(features[:size]), step

    def _run_chain(self, passes: int, size: int) -> None:
        inputs, _ = self.rows.inputs(size)
        assert self._first.rows is not None, "no first pass has run"
        drafts = run_chain(self._model, self._layers, self._first.rows, inputs, passes)
        self._drafts[:passes, :size].copy_(drafts)
