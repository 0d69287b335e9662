"""One rank's draft model in each step: on static buffers behind decode steps, on tensors of the step's own otherwise.

Owns what the next step reads of this one on the device: the last token of each sequence, the number of its accepted
drafts, and its new drafts. Must not know what the host makes of them.
"""

from __future__ import annotations

import torch

from allotrope.engine.decode_buffers import DecodeBuffers
from allotrope.engine.draft_passes import DraftPasses, selected_columns, sequences_of_ranks
from allotrope.engine.inputs import Inputs, StepFacts
from allotrope.engine.layer_plans import LayerPlans, Plans
from allotrope.engine.static_draft_passes import StaticDraftPasses
from allotrope.graphs.captured import DecodeGraphs
from allotrope.kernels.backend import Chooser
from allotrope.layers.draft import DraftModel
from allotrope.layers.parallel import Parallel


class DraftRunner:
    """Arguments as in `DraftPasses`.

    `next_tokens`: [S + passes * S] the last token of each sequence of the step, then its drafts, pass by pass; None
    before the first step. `accepted`: [S] the number of its accepted drafts. Both are those of all data-parallel ranks.
    """

    def __init__(
        self,
        model: DraftModel,
        layers: LayerPlans,
        max_drafts: int,
        chooser: Chooser,
        data: Parallel | None = None,
    ) -> None:
        self.passes = DraftPasses(model, layers, max_drafts, chooser, data)
        self._static: StaticDraftPasses | None = None
        self.next_tokens: torch.Tensor | None = None
        self.accepted: torch.Tensor | None = None

    def make_static(self, buffers: DecodeBuffers, sequences: int, *, capture: bool, alone: bool) -> None:
        """Run the passes of decode steps on static buffers, as graphs once they are captured. Arguments as in
        `StaticDraftPasses`."""
        self._static = StaticDraftPasses(self.passes, buffers, sequences, capture=capture, alone=alone)

    @property
    def graphs(self) -> tuple[DecodeGraphs, ...]:
        """Those of the static passes."""
        return () if self._static is None else self._static.graphs

    def keep(self, features: torch.Tensor) -> None:
        """Keep the target's `features` [n, F] of a decode step on static buffers: a part of its graph."""
        assert self._static is not None
        self._static.features.copy_in(features)

    def run_static(self, sampled: torch.Tensor, size: int, facts: StepFacts) -> None:
        """The passes behind a decode step that ran at `size`. `sampled`: [n] tokens that were sampled behind its rows,
        on all data-parallel ranks. `facts`: of the step."""
        assert self._static is not None
        self._static.run_first(self._of_this_rank(sampled, facts), size, store_only=not facts.passes)
        self.next_tokens, self.accepted = self._static.run_chain(facts.sequences, facts)

    def run(
        self, sampled: torch.Tensor, features: torch.Tensor, inputs: Inputs, plans: Plans, facts: StepFacts
    ) -> None:
        """The passes behind any other step. `sampled`: as in `run_static`. `features`: [T, F]. `inputs`, `plans`,
        `facts`: of the step."""
        assert inputs.next_ids is not None and inputs.sequences is not None
        passes = self.passes
        next_ids = passes.place_sampled(inputs.next_ids, self._of_this_rank(sampled, facts))
        last, accepted, tokens = passes.count_accepted(inputs.ids, next_ids, inputs.sequences)
        reserved = inputs.sequences[2]
        counts = sequences_of_ranks(facts)
        chains = bool(facts.passes and sum(counts))
        rows = passes.rank_rows([one.tokens for one in facts.of_ranks])
        first = passes.run_first(features, next_ids, inputs, plans, rows, store_only=not chains)
        if not chains:
            self.next_tokens, self.accepted = passes.of_all_ranks(last, accepted, counts)
            return
        if self._static is not None:
            self._static.copy_rows(first, inputs, tokens, reserved, last, accepted)
            self.next_tokens, self.accepted = self._static.run_chain(len(tokens), facts)
            return
        if not len(tokens):
            # Other ranks have sequences: a pass of this one's first row, which stores nothing, goes with theirs.
            tokens = reserved = tokens.new_zeros(1)
        rows = passes.rank_rows([max(1, count) for count in counts])
        drafts = passes.run_chain(first, inputs, tokens, reserved, facts.passes, rows=rows)
        if rows is not None:
            drafts = selected_columns(drafts, rows.counts, counts)
        last, self.accepted = passes.of_all_ranks(last, accepted, counts)
        self.next_tokens = torch.cat([last, drafts.flatten()])

    def _of_this_rank(self, sampled: torch.Tensor, facts: StepFacts) -> torch.Tensor:
        """The tokens of this data-parallel rank, among those of all."""
        data = self.passes.data
        if data is None:
            return sampled
        counts = [one.sampled for one in facts.of_ranks]
        start = sum(counts[: data.rank])
        return sampled[start : start + counts[data.rank]]
