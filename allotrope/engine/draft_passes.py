"""The passes of one rank's draft model: the first one on the rows of the target's step, and those of a chain on one row
a sequence.

Must not know which steps run on static buffers, or what the next step takes of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from allotrope.attention.batch import BatchLayout, BatchTensors, CacheIndex, PageIndex
from allotrope.engine.inputs import Inputs, StepFacts
from allotrope.engine.layer_plans import LayerPlans, Plans
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
    """What the first pass leaves for a chain. `hidden`: [T, W] hidden states; for a model that reads tokens alone, the
    token [T, 1] behind each row. `topk_indices`: [T, K] those that later passes reuse; None where they make their own.
    """

    hidden: torch.Tensor
    topk_indices: torch.Tensor | None = None


AdvanceChain = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Sequence[PagedSlots]], ChainRows]
"""The signature of `ADVANCE_CHAIN`."""


class DraftPasses:
    """`layers`: of `model`. `max_drafts`: most drafts of a sequence in a step. `chooser`: chooses the operations on
    rows. `data`: the data-parallel ranks, which run their passes together; None: there is one.
    """

    def __init__(
        self, model: DraftModel, layers: LayerPlans, max_drafts: int, chooser: Chooser, data: Parallel | None
    ) -> None:
        self.model, self.layers, self.max_drafts, self.data = model, layers, max_drafts, data
        spec = DraftRowsSpec(max_drafts)
        self.place_sampled = chooser.choose(PLACE_SAMPLED, spec).run
        self.advance_chain: AdvanceChain = chooser.choose(ADVANCE_CHAIN, spec).run
        self._count_accepted = chooser.choose(COUNT_ACCEPTED, spec).run

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
    lens = tuple(seq_lens.tolist()) if context is None else (context,) * count
    batch = BatchLayout((1,) * count, lens, device, of_rows)
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
