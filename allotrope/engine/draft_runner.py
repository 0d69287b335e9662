"""One rank's draft model: its first pass on the rows of the target's step, and its passes on one row a sequence.

Owns what the next step takes of this one on the device: the last token of each sequence, the number of its accepted
drafts, and its new drafts. Must not know what the host makes of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from allotrope.attention.batch import BatchLayout, BatchTensors, CacheIndex, PageIndex, VerifyRows, VerifyTensors
from allotrope.engine.decode_buffers import DecodeBuffers
from allotrope.engine.inputs import Inputs, StepFacts
from allotrope.engine.layer_plans import LayerPlans, Plans
from allotrope.graphs.captured import DecodeGraphs
from allotrope.graphs.static_rows import StaticRows
from allotrope.kernels.backend import Chooser
from allotrope.layers.data_parallel import RankRows, gather_selected
from allotrope.layers.draft import DraftModel
from allotrope.layers.parallel import Parallel
from allotrope.ops.draft_rows import (
    ADVANCE_CHAIN,
    COUNT_ACCEPTED,
    PLACE_SAMPLED,
    AcceptedDrafts,
    ChainRows,
    DraftRowsSpec,
    PagedSlots,
)


@dataclass(frozen=True)
class FirstPass:
    """What chains begin with. `hidden`: [T, W] states, or the tokens [T, 1] behind the rows of a model that reads these
    alone. `topk_indices`: [T, K] that later passes reuse, where they do."""

    hidden: torch.Tensor
    topk_indices: torch.Tensor | None = None


AdvanceChain = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Sequence[PagedSlots]], ChainRows]
"""`ADVANCE_CHAIN`."""


class DraftRunner:
    """`layers`: of `model`. `max_drafts`: most of a sequence in a step. `chooser`: of the operations on rows. `data`:
    the data-parallel ranks, which run their passes together; None: there is one.

    `next_tokens`: [S + passes * S] the last token of each sequence of the step, then its drafts, pass by pass; None
    before the first step. `accepted`: [S] its accepted drafts. Both are those of all data-parallel ranks.
    """

    def __init__(
        self,
        model: DraftModel,
        layers: LayerPlans,
        max_drafts: int,
        chooser: Chooser,
        data: Parallel | None = None,
    ) -> None:
        self.model, self.layers, self.max_drafts, self.data = model, layers, max_drafts, data
        spec = DraftRowsSpec(max_drafts)
        self.place_sampled = chooser.choose(PLACE_SAMPLED, spec).run
        self.advance_chain: AdvanceChain = chooser.choose(ADVANCE_CHAIN, spec).run
        self._count_accepted = chooser.choose(COUNT_ACCEPTED, spec).run
        self._static: _StaticPasses | None = None
        self.next_tokens: torch.Tensor | None = None
        self.accepted: torch.Tensor | None = None

    def make_static(self, buffers: DecodeBuffers, sequences: int, *, capture: bool, alone: bool) -> None:
        """Run the passes of decode steps on static buffers, as graphs once they are captured. `buffers`: the target's.
        `sequences`: most of a step."""
        self._static = _StaticPasses(self, buffers, sequences, capture=capture, alone=alone)

    @property
    def graphs(self) -> tuple[DecodeGraphs, ...]:
        """Those of the static passes."""
        return () if self._static is None else self._static.graphs

    def keep(self, features: torch.Tensor) -> None:
        """Keep the target's `features` [n, F] of a decode step on static buffers: a part of its graph."""
        assert self._static is not None
        self._static.features.copy_in(features)

    def run_static(self, sampled: torch.Tensor, size: int, facts: StepFacts) -> None:
        """The passes behind a decode step that ran at `size`. `sampled`: [n] tokens behind its rows that were sampled.
        `facts`: of the step."""
        assert self._static is not None
        self._static.start(self._own(sampled, facts), size, store_only=not facts.passes)
        self.next_tokens, self.accepted = self._static.draft(facts.sequences, facts)

    def run(
        self, features: torch.Tensor, sampled: torch.Tensor, inputs: Inputs, plans: Plans, facts: StepFacts
    ) -> None:
        """The passes behind any other step. `features`: [T, F]. `sampled`: as in `run_static`. `inputs`, `plans`,
        `facts`: of the step."""
        assert inputs.next_ids is not None and inputs.sequences is not None
        next_ids = self.place_sampled(inputs.next_ids, self._own(sampled, facts))
        last, accepted, tokens = self.count_accepted(inputs.ids, next_ids, inputs.sequences)
        reserved = inputs.sequences[2]
        counts = sequences_of_ranks(facts)
        chains = bool(facts.passes and sum(counts))
        rows = self.rank_rows([one.tokens for one in facts.of_ranks])
        first = self.run_first(features, next_ids, inputs, plans, rows, store_only=not chains)
        if not chains:
            self.next_tokens, self.accepted = self.of_all_ranks(last, accepted, counts)
            return
        if self._static is not None:
            self._static.take(first, inputs, tokens, reserved, last, accepted)
            self.next_tokens, self.accepted = self._static.draft(len(tokens), facts)
            return
        if not len(tokens):
            # Other ranks have sequences: a pass of this one's first row, which stores nothing, goes with theirs.
            tokens = reserved = tokens.new_zeros(1)
        rows = self.rank_rows([max(1, count) for count in counts])
        drafts = self.run_chain(first, inputs, tokens, reserved, facts.passes, rows=rows)
        if rows is not None:
            drafts = selected_columns(drafts, rows.counts, counts)
        last, self.accepted = self.of_all_ranks(last, accepted, counts)
        self.next_tokens = torch.cat([last, drafts.flatten()])

    def _own(self, sampled: torch.Tensor, facts: StepFacts) -> torch.Tensor:
        """Those of the tokens of all data-parallel ranks that are this one's."""
        if self.data is None:
            return sampled
        counts = [one.sampled for one in facts.of_ranks]
        start = sum(counts[: self.data.rank])
        return sampled[start : start + counts[self.data.rank]]

    def rank_rows(self, counts: Sequence[int]) -> RankRows | None:
        """`counts` rows on each data-parallel rank; None where there is one."""
        return None if self.data is None else RankRows(self.data, tuple(counts))

    def of_all_ranks(
        self, last: torch.Tensor, accepted: torch.Tensor, counts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`last` and `accepted` of the sequences of all data-parallel ranks, `counts` of each."""
        if self.data is None:
            return last, accepted
        both = gather_selected(self.data, torch.stack([last, accepted], dim=1), counts)
        return both[:, 0].contiguous(), both[:, 1].contiguous()

    def run_first(
        self,
        features: torch.Tensor,
        next_ids: torch.Tensor,
        inputs: Inputs,
        plans: Plans,
        rows: RankRows | None,
        *,
        store_only: bool,
    ) -> FirstPass:
        """The first pass. `next_ids`: [T] as for `count_accepted`. `rows`: of each data-parallel rank. `store_only`: no
        chain follows."""
        model = self.model
        if model.reads_tokens_alone:
            model.store(features, self.layers.step(inputs.ids, inputs, plans, rows))
            return FirstPass(next_ids[:, None])
        step, hidden = self.layers.step(next_ids.clamp(min=0), inputs, plans, rows), model.from_target(features)
        if store_only:
            model.store(hidden, step)
            return FirstPass(hidden)
        found = model(hidden, step)
        if model.shared_topk is None:
            return FirstPass(found)
        # As wide as those of the longest context: later passes see more tokens.
        missing = model.shared_topk - step.topk_indices.shape[1]
        return FirstPass(found, F.pad(step.topk_indices, (0, missing), value=-1))

    def count_accepted(self, ids: torch.Tensor, next_ids: torch.Tensor, sequences: torch.Tensor) -> AcceptedDrafts:
        """As `COUNT_ACCEPTED`. `ids`, `next_ids`: [T] of the step. `sequences`: [4, S] as in `Inputs`."""
        counted: AcceptedDrafts = self._count_accepted(ids, next_ids, sequences, self.max_drafts)
        return counted

    def run_chain(
        self,
        first: FirstPass,
        inputs: Inputs,
        tokens: torch.Tensor,
        reserved: torch.Tensor,
        passes: int,
        context: int | None = None,
        rows: RankRows | None = None,
    ) -> torch.Tensor:
        """The passes behind the first one. `inputs`: of the step that `first` ran on.

        `tokens`: [S] index of the last token of each sequence that counts, -1 for a padding row. `reserved`: [S] its
        tokens that have pages: later passes stay at the last of these. `context`: most tokens of a sequence, in steps
        that can be captured. `rows`: the sequences of each data-parallel rank. Returns the drafts [passes, S], those of
        all data-parallel ranks.
        """
        model = self.model
        hidden = first.hidden[tokens.clamp(min=0)]
        every: Callable[[torch.Tensor], torch.Tensor] = (lambda one: one) if rows is None else rows.gather
        # Token j stands j + 1 behind that of `tokens`. The sampled one is no draft.
        sampled = int(model.reads_tokens_alone)
        drafts = [every(hidden[:, 0]) if sampled else model.greedy(every(hidden))]
        if len(drafts) == passes + sampled:
            return torch.stack(drafts)
        last = _rows_at(inputs, tokens, context, self.layers.groups)
        topk_indices = first.topk_indices
        if topk_indices is not None:
            # A padding row has no pages.
            topk_indices = topk_indices[tokens.clamp(min=0)].masked_fill((tokens < 0)[:, None], -1)
        room = (reserved - 1 - last.batch.tensors.positions).clamp(min=0)
        on_host = None if context is not None else room.tolist()
        while len(drafts) < passes + sampled:
            moved = self._advanced(last, room, len(drafts), on_host)
            own = drafts[-1] if rows is None else rows.own_of(drafts[-1])
            step = self.layers.step(own.clamp(min=0), moved, {}, rows)
            step.topk_indices, step.reuses_topk = topk_indices, topk_indices is not None
            hidden = model(hidden, step)
            drafts.append(model.greedy(every(hidden)))
        return torch.stack(drafts[sampled:])

    def _advanced(self, rows: Inputs, room: torch.Tensor, by: int, on_host: Sequence[int] | None) -> Inputs:
        """Decode rows `by` tokens further, or as many as a row has `room` [S] for; one without so much stores nothing,
        not over the row of its last token. `on_host`: `room`, None in steps that can be captured."""
        batch, tensors = rows.batch, rows.batch.tensors
        pages = [i for i, one in enumerate(rows.index) if isinstance(one, PageIndex) and i in self.layers.groups]
        index, paged = list(rows.index), []
        for i in pages:
            one = index[i]
            assert isinstance(one, PageIndex)
            paged.append(PagedSlots(one.page_size, one.table, one.slots))
        moved = self.advance_chain(tensors.positions, tensors.seq_lens, room, by, paged)
        for i, slots in zip(pages, moved.slots, strict=True):
            index[i] = replace(index[i], slots=slots)
        of_rows = replace(tensors, positions=moved.positions, seq_lens=moved.seq_lens)
        lens = batch.seq_lens
        if on_host is not None:
            lens = tuple(length + min(by, free) for length, free in zip(lens, on_host, strict=True))
        return replace(rows, batch=replace(batch, seq_lens=lens, static_tensors=of_rows), index=index)


def sequences_of_ranks(facts: StepFacts) -> list[int]:
    """The sequences that each data-parallel rank samples from."""
    return [one.sequences for one in facts.of_ranks] or [facts.sequences]


def selected_columns(x: torch.Tensor, counts: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """Of `x` [n, sum of counts], the first `wanted` columns of each run of `counts`."""
    parts = x.split(list(counts), dim=1)
    return torch.cat([part[:, :count] for part, count in zip(parts, wanted, strict=True)], dim=1)


def _rows_at(inputs: Inputs, tokens: torch.Tensor, context: int | None, groups: frozenset[int]) -> Inputs:
    """Decode steps of the requests of `tokens` [S], at these. `groups`: that a draft model's layers read."""
    of, count, device = inputs.batch.tensors, len(tokens), tokens.device
    padding, at = tokens < 0, tokens.clamp(min=0)
    positions, requests = of.positions[at].masked_fill(padding, 0), of.request_of_token[at]
    seq_lens = (positions + 1).masked_fill(padding, 0)
    alone = torch.arange(count + 1, device=device)
    of_rows = BatchTensors(seq_lens.to(torch.int32), alone.to(torch.int32), positions, alone[:-1])
    each = alone[:-1].to(torch.int32)
    verify = VerifyTensors(each, torch.ones_like(each), torch.zeros_like(each))
    if context is None:
        on_host = VerifyRows(tuple(range(count)), (1,) * count, (0,) * count)
        batch = BatchLayout((1,) * count, tuple(seq_lens.tolist()), device, of_rows, on_host, verify)
    else:
        batch = BatchLayout((1,) * count, (context,) * count, device, of_rows, static_verify=verify)
    index: list[CacheIndex] = []
    for group, one in enumerate(inputs.index):
        if group in groups:
            if isinstance(one, PageIndex):
                table = one.table[requests].masked_fill(padding[:, None], -1)
                one = replace(one, table=table, slots=torch.full_like(tokens, -1))
            else:
                one = replace(one, slots=one.slots[requests].masked_fill(padding, 0))
        index.append(one)
    return replace(inputs, batch=batch, index=index)


class _StaticPasses:
    """The passes of decode steps. `features`: of the target's rows. They read the target's buffers, which hold its last
    step, or the rows of one on tensors of its own that `take` put there."""

    def __init__(
        self, runner: DraftRunner, buffers: DecodeBuffers, sequences: int, *, capture: bool, alone: bool
    ) -> None:
        self._runner, self._buffers, self._sequences = runner, buffers, sequences
        device, max_drafts = buffers.device, runner.max_drafts
        self.features, self._first, self._topk_indices = (StaticRows(buffers.size) for _ in range(3))
        self._next_ids = torch.zeros(buffers.size, dtype=torch.int64, device=device)
        # The token that counts as the last of each sequence, its row, and its tokens that have pages.
        self._last, self._tokens, self._reserved = torch.zeros(3, sequences, dtype=torch.int64, device=device)
        self._accepted = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._data_ranks = 1 if runner.data is None else runner.data.size
        self._drafts = torch.zeros(max_drafts, sequences * self._data_ranks, dtype=torch.int64, device=device)
        kinds: dict[str, Any] = {"capture": capture, "alone": alone}
        self._first_graphs = DecodeGraphs(
            *(self._run_first, buffers.clear, buffers.size, device), **kinds, name="first draft passes"
        )
        # The same behind steps that no chain follows.
        self._store_graphs = self._first_graphs
        if runner.model.stores_alone:
            self._store_graphs = DecodeGraphs(
                *(self._run_store, buffers.clear, buffers.size, device), **kinds, name="first draft passes, stored only"
            )
        # A chain of each length, the longest first.
        self._chains = {
            passes: DecodeGraphs(
                *(functools.partial(self._run_chain, passes), self._clear, sequences, device),
                **kinds,
                name=f"chains of {passes} drafts",
            )
            for passes in range(max_drafts, 0, -1)
        }
        stores = () if self._store_graphs is self._first_graphs else (self._store_graphs,)
        self.graphs = (self._first_graphs, *self._chains.values(), *stores)

    def start(self, sampled: torch.Tensor, size: int, *, store_only: bool) -> None:
        known = self._buffers.next_ids
        assert known is not None
        self._next_ids[:size].copy_(self._runner.place_sampled(known[:size], sampled))
        (self._store_graphs if store_only else self._first_graphs).run(size)

    def take(
        self,
        first: FirstPass,
        inputs: Inputs,
        tokens: torch.Tensor,
        reserved: torch.Tensor,
        last: torch.Tensor,
        accepted: torch.Tensor,
    ) -> None:
        """Make the rows of the static buffers those of `tokens` [S] of another step than a decode."""
        count = len(tokens)
        self._buffers.take(inputs, tokens)
        self._keep_first(first, tokens)
        self._tokens.fill_(-1)[:count] = torch.arange(count, device=tokens.device)
        # A padding row with tokens left over from a former step would read keys.
        self._reserved.zero_()[:count] = reserved
        for own, values in ((self._last, last), (self._accepted, accepted)):
            own[:count] = values

    def draft(self, sequences: int, facts: StepFacts) -> tuple[torch.Tensor, torch.Tensor]:
        """`next_tokens` and `accepted` of `DraftRunner`. `sequences`: of this rank."""
        counts, passes = sequences_of_ranks(facts), facts.passes
        # Not the static buffers themselves, which a capture may overwrite.
        own = self._last[:sequences].clone(), self._accepted[:sequences].clone()
        last, accepted = self._runner.of_all_ranks(*own, counts)
        if not (passes and sum(counts)):
            return last, accepted
        graphs = self._chains[passes]
        size = graphs.padded(max(counts))
        graphs.run(size)
        drafts = self._drafts[:passes, : size * len(counts)]
        return torch.cat([last, selected_columns(drafts, (size,) * len(counts), counts).flatten()]), accepted

    def _clear(self) -> None:
        self._buffers.clear()
        self._tokens.fill_(-1)

    def _keep_first(self, first: FirstPass, rows: torch.Tensor | slice) -> None:
        self._first.copy_in(first.hidden[rows])
        if first.topk_indices is not None:
            self._topk_indices.copy_in(first.topk_indices[rows])

    def _run_first(self, size: int) -> None:
        self._keep_first(self._pass_first(size, store_only=False), slice(None))

    def _run_store(self, size: int) -> None:
        self._pass_first(size, store_only=True)

    def _pass_first(self, size: int, *, store_only: bool) -> FirstPass:
        """The first pass, once the accepted drafts are counted. As `DraftRunner.run_first`."""
        inputs, _ = self._buffers.inputs(size)
        features, sequences = self.features.rows, self._buffers.sequences
        assert features is not None and sequences is not None, "no decode step has run"
        count, next_ids = min(size, self._sequences), self._next_ids[:size]
        own = sequences[:, :count]
        counted = self._runner.count_accepted(inputs.ids, next_ids, own)
        kept = (self._last, self._accepted, self._tokens)
        for buffer, values in zip((*kept, self._reserved), (*counted, own[2]), strict=True):
            buffer[:count].copy_(values)
        rows = self._runner.rank_rows((size,) * self._data_ranks)
        return self._runner.run_first(features[:size], next_ids, inputs, {}, rows, store_only=store_only)

    def _run_chain(self, passes: int, size: int) -> None:
        inputs, _ = self._buffers.inputs(self._buffers.size)
        assert self._first.rows is not None, "no first pass has run"
        drafts = self._runner.run_chain(
            FirstPass(self._first.rows, self._topk_indices.rows),
            *(inputs, self._tokens[:size], self._reserved[:size], passes),
            context=self._buffers.context,
            rows=self._runner.rank_rows((size,) * self._data_ranks),
        )
        self._drafts[:passes, : drafts.shape[1]].copy_(drafts)
