"""The passes of a draft model on static buffers: behind decode steps, and the chains behind any other step.

Owns the buffers that pass from one graph to the next. Must not know what the next step takes of this one.
"""

from __future__ import annotations

import functools

import torch

from allotrope.engine.decode_buffers import DecodeBuffers
from allotrope.engine.draft_passes import DraftPasses, FirstPass, selected_columns, sequences_of_ranks
from allotrope.engine.inputs import Inputs, StepFacts
from allotrope.graphs.captured import DecodeGraphs
from allotrope.graphs.static_rows import StaticRows


class StaticDraftPasses:
    """`buffers`: the target's, which hold its last decode step, or the rows that `copy_rows` took from another step.
    `sequences`: most sequences of a step. `capture`, `alone`: as in `Graphs`.

    `features`: [n, F] of the target's rows.
    """

    def __init__(
        self, passes: DraftPasses, buffers: DecodeBuffers, sequences: int, *, capture: bool, alone: bool
    ) -> None:
        self._passes, self._buffers, self._sequences = passes, buffers, sequences
        device, max_drafts = buffers.device, passes.max_drafts
        self.features, self._first, self._topk_indices = (StaticRows(buffers.size) for _ in range(3))
        self._next_ids = torch.zeros(buffers.size, dtype=torch.int64, device=device)
        # Of each sequence: its last token, the index of that token's row, and the number of its tokens with pages.
        self._last, self._tokens, self._reserved = torch.zeros(3, sequences, dtype=torch.int64, device=device)
        self._accepted = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._data_ranks = 1 if passes.data is None else passes.data.size
        self._drafts = torch.zeros(max_drafts, sequences * self._data_ranks, dtype=torch.int64, device=device)
        graphs = functools.partial(DecodeGraphs, device=device, capture=capture, alone=alone)
        on_rows = functools.partial(graphs, idle=buffers.clear, max_size=buffers.size)
        self._first_graphs = on_rows(self._run_first, name="first draft passes")
        # The first pass behind a step that no chain follows.
        self._store_graphs = self._first_graphs
        if passes.model.stores_alone:
            self._store_graphs = on_rows(self._run_store, name="first draft passes, stored only")
        # By the number of drafts, the longest chain first.
        self._chains = {
            drafts: graphs(
                functools.partial(self._run_chain, drafts),
                idle=self._clear,
                max_size=sequences,
                name=f"chains of {drafts} drafts",
            )
            for drafts in range(max_drafts, 0, -1)
        }
        stores = () if self._store_graphs is self._first_graphs else (self._store_graphs,)
        self.graphs = (self._first_graphs, *self._chains.values(), *stores)

    def run_first(self, sampled: torch.Tensor, size: int, *, store_only: bool) -> None:
        """The first pass behind a decode step that ran at `size`. `sampled`: [n] tokens that were sampled behind its
        rows. `store_only`: no chain follows."""
        known = self._buffers.next_ids
        assert known is not None
        self._next_ids[:size].copy_(self._passes.place_sampled(known[:size], sampled))
        (self._store_graphs if store_only else self._first_graphs).run(size)

    def copy_rows(
        self,
        first: FirstPass,
        inputs: Inputs,
        tokens: torch.Tensor,
        reserved: torch.Tensor,
        last: torch.Tensor,
        accepted: torch.Tensor,
    ) -> None:
        """Copy what a chain reads of a step that did not run on the static buffers. `first`: its first pass. The rest
        as in `DraftPasses.run_chain` and `AcceptedDrafts`."""
        count = len(tokens)
        self._buffers.copy_rows(inputs, tokens)
        self._keep_first(first, tokens)
        self._tokens.fill_(-1)[:count] = torch.arange(count, device=tokens.device)
        # A padding row that kept the tokens of a former step would read keys.
        self._reserved.zero_()[:count] = reserved
        for own, values in ((self._last, last), (self._accepted, accepted)):
            own[:count] = values

    def run_chain(self, sequences: int, facts: StepFacts) -> tuple[torch.Tensor, torch.Tensor]:
        """The chain behind the first pass, if the step wants drafts. `sequences`: of this rank. Returns `next_tokens`
        and `accepted`, as in `DraftRunner`."""
        counts, passes = sequences_of_ranks(facts), facts.passes
        # Not the static buffers themselves, which a capture may overwrite.
        own = self._last[:sequences].clone(), self._accepted[:sequences].clone()
        last, accepted = self._passes.of_all_ranks(*own, counts)
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
        self._keep_first(self._first_pass(size, store_only=False), slice(None))

    def _run_store(self, size: int) -> None:
        self._first_pass(size, store_only=True)

    def _first_pass(self, size: int, *, store_only: bool) -> FirstPass:
        """Count the accepted drafts, then run the first pass, as `DraftPasses.run_first` does."""
        inputs, _ = self._buffers.inputs(size)
        features, sequences = self.features.rows, self._buffers.sequences
        assert features is not None and sequences is not None, "no decode step has run"
        count, next_ids = min(size, self._sequences), self._next_ids[:size]
        own = sequences[:, :count]
        counted = self._passes.count_accepted(inputs.ids, next_ids, own)
        kept = (self._last, self._accepted, self._tokens)
        for buffer, values in zip((*kept, self._reserved), (*counted, own[2]), strict=True):
            buffer[:count].copy_(values)
        rows = self._passes.rank_rows((size,) * self._data_ranks)
        return self._passes.run_first(features[:size], next_ids, inputs, {}, rows, store_only=store_only)

    def _run_chain(self, passes: int, size: int) -> None:
        inputs, _ = self._buffers.inputs(self._buffers.size)
        assert self._first.rows is not None, "no first pass has run"
        drafts = self._passes.run_chain(
            FirstPass(self._first.rows, self._topk_indices.rows),
            inputs,
            self._tokens[:size],
            self._reserved[:size],
            passes,
            context=self._buffers.context,
            rows=self._passes.rank_rows((size,) * self._data_ranks),
        )
        self._drafts[:passes, : drafts.shape[1]].copy_(drafts)
