"""From a step plan of plain integers to one forward pass.

A `PackedStep` holds everything that ranks need to know and nothing that they could decide differently: rank 0 packs it,
and every rank runs it.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from allotrope.cache.arena import Arena
from allotrope.cache.groups import CacheGroup
from allotrope.engine.decode_buffers import DecodeBuffers
from allotrope.engine.draft_runner import DraftRunner
from allotrope.engine.host_bound import runs_in_pieces
from allotrope.engine.inputs import Inputs, StepFacts, StepPlan, pack, padding_row, unpack
from allotrope.engine.layer_plans import LayerPlans, Plans
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.packed_step import PackedStep, Words
from allotrope.engine.recorded_steps import RecordedSteps
from allotrope.graphs.captured import DecodeGraphs, Graphs
from allotrope.graphs.piecewise_graphs import PiecewiseGraphs, prefill_sizes
from allotrope.graphs.prefill_buffers import PrefillBuffers
from allotrope.layers.backend_report import uncaptured
from allotrope.layers.data_parallel import RankRows, gather_selected
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.layers.step import Step
from allotrope.ops.draft_rows import ADVANCE_ROWS, DraftRowsSpec, known_ids
from allotrope.ops.rope import RopeTables

log = logging.getLogger("allotrope.engine")


@dataclass(frozen=True)
class GraphShapes:
    """The steps that run on static buffers; `capture`: as CUDA graphs.

    Decode steps have up to `max_decodes` rows with one token, of up to `max_num_seqs` sequences of up to
    `max_model_len` tokens: a sequence has a row for its last token and one for each of its drafts, `max_drafts` at
    most. Prefill steps have up to `prefill_tokens` tokens, and their attention runs eagerly; 0: none.
    """

    max_decodes: int
    max_model_len: int
    max_num_seqs: int
    max_drafts: int
    capture: bool
    prefill_tokens: int = 0


class ModelRunner:
    """One rank's model, caches and plans. `groups`: of the caches in `arena`.

    `shapes`: None runs each step on tensors of its own, with exact lengths. `record`: decode steps of these may be
    recorded (`RecordedSteps`). `draft_model`: its caches are those of the layers behind the model's own.
    """

    def __init__(
        self,
        model: Decoder,
        load_plan: LoadPlan,
        groups: Sequence[CacheGroup],
        arena: Arena,
        shapes: GraphShapes | None = None,
        *,
        draft_model: DraftModel | None = None,
        record: bool = False,
    ) -> None:
        specs, shares, max_drafts = load_plan.own_specs, load_plan.shares, load_plan.max_drafts
        device = load_plan.build.device
        self.model, self.arena, self.device, self._verify = model, arena, device, max_drafts > 0
        self.groups = groups
        tables = self._tables = RopeTables(device, model.chooser)
        attention = list(zip(specs, model.backends, strict=True))
        self._layers = LayerPlans(attention, model.stage.first, groups, arena, shares, tables)
        # Links to the other pipeline stages; on the first one, the steps whose hidden states are yet to come back.
        self._links = model.parallel.links
        self._launched: deque[StepFacts] = deque()
        self.drafts: DraftRunner | None = None
        if draft_model is not None:
            layers = LayerPlans(draft_model.attention, len(specs), groups, arena, shares, tables)
            self.drafts = DraftRunner(draft_model, layers, max_drafts, model.chooser, model.parallel.data)
        self.buffers: DecodeBuffers | None = None
        self.graphs: DecodeGraphs | None = None
        self.prefill_buffers: PrefillBuffers | None = None
        self.prefill_graphs: PiecewiseGraphs | None = None
        self.recorded: RecordedSteps | None = None
        alone = model.parallel.layout.size == 1
        if record and alone and shapes is None and not self._verify and device.type == "cpu":
            self.recorded = RecordedSteps(model)
        # Runs the passes of the draft model behind the last step.
        self._draft_passes: Callable[[torch.Tensor], None] | None = None
        if shapes is not None:
            self._make_decode_graphs(shapes)
            if shapes.prefill_tokens and runs_in_pieces(model.parallel.layout):
                self._make_prefill_graphs(shapes)

    def _make_decode_graphs(self, shapes: GraphShapes) -> None:
        model, data_ranks = self.model, self.model.parallel.layout.data
        buffers = DecodeBuffers(
            self.groups,
            size=shapes.max_decodes,
            context=shapes.max_model_len,
            hidden=model.sent_width,
            dtype=model.dtype,
            device=self.device,
            received=model.received_width,
            verify=self._verify,
            max_sampled=(1 + shapes.max_drafts) * shapes.max_num_seqs * data_ranks,
            sequences=shapes.max_num_seqs * data_ranks,
        )
        drafts, alone = self.drafts, self.model.parallel.layout.size == 1
        advance_rows = None
        if self._verify:
            advance_rows = self.model.chooser.choose(ADVANCE_ROWS, DraftRowsSpec(shapes.max_drafts)).run

        def body(size: int) -> None:
            if advance_rows is not None:
                advance_rows(buffers.rows(size), buffers.prev_sampled, buffers.accepted)
            inputs, prev_sampled = buffers.inputs(size)
            received = None if self._links is None or model.stage.is_first else buffers.received[:size]
            hidden, features = self._run(inputs, prev_sampled, {}, self._rank_rows(size), received)
            buffers.hidden[:size].copy_(hidden)
            if drafts is not None:
                drafts.keep(features)

        self.buffers = buffers
        self.graphs = DecodeGraphs(
            body, buffers.clear, shapes.max_decodes, self.device, capture=shapes.capture, alone=alone
        )
        if drafts is not None:
            drafts.make_static(buffers, shapes.max_num_seqs, capture=shapes.capture, alone=alone)

    def _make_prefill_graphs(self, shapes: GraphShapes) -> None:
        model, alone = self.model, self.model.parallel.layout.size == 1
        sizes = prefill_sizes(shapes.prefill_tokens)
        buffers = PrefillBuffers(sizes[-1], self.device, self._tables)

        def idle() -> Step:
            plan = StepPlan((padding_row(self.groups),))
            facts = StepFacts.of(plan)
            packed = pack(plan, facts, self.groups, pinned=self.device.type == "cuda", verify=self._verify)
            inputs = unpack(packed, facts, self.groups, self.device)
            buffers.clear()
            return self._layers.step(inputs.ids, inputs, Plans())

        self.prefill_buffers = buffers
        self.prefill_graphs = PiecewiseGraphs(
            buffers.body(model, len(model.layers)), idle, sizes, self.device, capture=shapes.capture, alone=alone
        )

    def pack(self, plan: StepPlan) -> PackedStep:
        """The plan as integers for the ranks. With several data-parallel ranks, `run` takes the part of one."""
        if not plan.parts:
            return self._pack(plan, StepFacts.of(plan))
        if self.buffers is None or not plan.decodes_only:
            row = padding_row(self.groups)
            plan = replace(plan, parts=tuple(part if part.rows else replace(part, rows=(row,)) for part in plan.parts))
        parts = [self._pack(part, StepFacts.of(part).of_rank(plan)) for part in plan.parts]
        return PackedStep.join(parts, pinned=self.device.type == "cuda")

    def _pack(self, plan: StepPlan, facts: StepFacts) -> PackedStep:
        if self.buffers is not None and facts.decodes_only:
            return self.buffers.pack(plan.rows, facts, plan.sequences)
        pinned = self.device.type == "cuda"
        next_ids = self.drafts is not None
        return pack(plan, facts, self.groups, pinned=pinned, verify=self._verify, next_ids=next_ids)

    def run_on_all_ranks(self, plan: StepPlan) -> torch.Tensor:
        """As `run`, of a step that every data-parallel rank has alike."""
        data = self.model.parallel.data
        if data is None:
            return self.run(self.pack(plan))
        whole = StepPlan.of_ranks((plan,) * data.size)
        whole = replace(whole, sampled=plan.sampled, greedy=plan.greedy, passes=plan.passes)
        return self.run(self.pack(whole).part(data.rank))

    @torch.inference_mode()
    def run(self, packed: PackedStep, prev_sampled: torch.Tensor | None = None) -> torch.Tensor:
        """Run one step. `prev_sampled`: [m] tokens that the step before sampled, where rows are placeholders; with a
        draft model these are for its `next_tokens`.

        Returns the logits at the plan's `logits_indices`, see `Decoder.logits`, or their greedy tokens where the plan
        says so: those of all data-parallel ranks. Nothing on a pipeline stage other than the first.
        """
        if self._links is not None:
            self.launch(packed)
            return self.finish() if self.model.stage.is_first else torch.empty(0, device=self.device)
        facts = StepFacts.read(packed)
        return self._logits(self._forward(packed, facts, prev_sampled), facts)

    @torch.inference_mode()
    def launch(self, packed: PackedStep) -> None:
        """Run this pipeline stage's layers of a step, and send on what comes of them. Does not wait for other stages
        but the one before."""
        links, facts = self._links, StepFacts.read(packed)
        assert links is not None, "a model of one stage runs a step at once"
        hidden = self._forward(packed, facts, None)
        if self._static_size(facts) is not None:
            # The next step writes to the buffers before this one is sent.
            hidden = hidden.clone()
        if self.model.stage.is_last:
            links.send_back(hidden)
        else:
            links.send(hidden)
        if self.model.stage.is_first:
            self._launched.append(facts)

    @torch.inference_mode()
    def finish(self) -> torch.Tensor:
        """On the first stage, as `run`, of the first step that was launched and is yet to be finished."""
        assert self._links is not None, "a model of one stage runs a step at once"
        facts = self._launched.popleft()
        rows = self._static_size(facts) or len(facts.logits_indices)
        if facts.of_ranks:
            rows = sum(one.logits for one in facts.of_ranks)
        hidden = torch.empty(rows, self.model.spec.hidden, dtype=self.model.dtype, device=self.device)
        return self._logits(self._links.receive_back(hidden), facts)

    def _static_size(self, facts: StepFacts) -> int | None:
        """The rows of a step that runs on the static buffers; None: it does not."""
        if self.buffers is None or self.graphs is None or not facts.decodes_only:
            return None
        # Data-parallel ranks exchange rows: all of them run the same size.
        return self.graphs.padded(max(facts.requests, *(one.tokens for one in facts.of_ranks), 1))

    def _logits(self, hidden: torch.Tensor, facts: StepFacts) -> torch.Tensor:
        """Logits or greedy tokens, as `run` returns them. `hidden`: what `_forward` returns on the last stage."""
        out = self.model.greedy(hidden) if facts.greedy else self.model.logits(hidden)
        indices, requests = facts.logits_indices, facts.requests
        if facts.of_ranks or self._static_size(facts) is None:
            return out
        # The padding rows stay: the same product runs whether or not a graph came before it.
        return out[:requests] if len(indices) == requests else out[:requests][self._on_device(indices)]

    def _forward(self, packed: PackedStep, facts: StepFacts, prev_sampled: torch.Tensor | None) -> torch.Tensor:
        """Run the layers. Returns the hidden states at the plan's `logits_indices`, or of all rows of the static
        buffers; on a stage that is not the last, what the next one receives."""
        if len(facts.copies):
            self.arena.copy_pages(facts.copies.tolist())
        if self.drafts is not None:
            prev_sampled = self.drafts.next_tokens
        size = self._static_size(facts)
        if size is not None:
            return self._forward_static(packed, facts, prev_sampled, size)
        return self._forward_own(packed, facts, prev_sampled)

    def _forward_static(
        self, packed: PackedStep, facts: StepFacts, prev_sampled: torch.Tensor | None, size: int
    ) -> torch.Tensor:
        """A decode step on the static buffers, padded to `size` rows."""
        buffers, graphs, drafts = self.buffers, self.graphs, self.drafts
        assert buffers is not None and graphs is not None
        if self._links is not None and not self.model.stage.is_first:
            self._links.receive(buffers.received[:size])
        buffers.refresh(packed, facts.requests, prev_sampled, size)
        if drafts is not None and drafts.accepted is not None:
            buffers.accepted[: len(drafts.accepted)].copy_(drafts.accepted)
        graphs.run(size)
        if drafts is not None:
            self._draft_passes = functools.partial(drafts.run_static, size=size, facts=facts)
        if facts.of_ranks and self.model.stage.is_last:
            return self._gather_for_logits(buffers.hidden, facts)
        return buffers.hidden[:size]

    def _forward_own(self, packed: PackedStep, facts: StepFacts, prev_sampled: torch.Tensor | None) -> torch.Tensor:
        """Any other step, on tensors of its own with exact lengths."""
        model, indices = self.model, facts.logits_indices
        inputs, plans = unpack(packed, facts, self.groups, self.device), Plans()
        if inputs.prev_sampled_indices is not None and prev_sampled is not None:
            ids = known_ids(inputs.ids, inputs.prev_sampled_indices, prev_sampled)
            inputs = replace(inputs, ids=ids, prev_sampled_indices=None)
        received = None
        if self._links is not None and not model.stage.is_first:
            shape = len(inputs.ids), model.received_width
            received = self._links.receive(torch.empty(shape, dtype=model.dtype, device=self.device))
        rows = self._rank_rows(*(one.tokens for one in facts.of_ranks))
        if rows is not None and facts.padding:
            rows = replace(rows, padding=True)
        if self.recorded is not None and facts.decodes_only:
            hidden = features = self.recorded.run(self._layers.step(inputs.ids, inputs, plans))
        elif self.prefill_graphs is not None and len(inputs.ids) <= self.prefill_graphs.sizes[-1]:
            hidden, features = self._run_pieces(self._layers.step(inputs.ids, inputs, plans), inputs)
        else:
            hidden, features = self._run(inputs, None, plans, rows, received)
        if self.drafts is not None:
            self._draft_passes = functools.partial(
                self.drafts.run, features=features, inputs=inputs, plans=plans, facts=facts
            )
        if facts.of_ranks and model.stage.is_last:
            return self._gather_for_logits(hidden, facts)
        if model.stage.is_last and len(indices) != len(hidden):
            hidden = hidden[self._on_device(indices)]
        return hidden

    @torch.inference_mode()
    def run_drafts(self, sampled: torch.Tensor) -> None:
        """Run the passes of the draft model that the last plan asks for. `sampled`: [n] tokens of its step, in order of
        the rows that they follow, on all data-parallel ranks."""
        assert self._draft_passes is not None, "no step has run"
        self._draft_passes(sampled)
        self._draft_passes = None

    @property
    def _all_graphs(self) -> Sequence[Graphs[Any]]:
        drafts = () if self.drafts is None else self.drafts.graphs
        return [one for one in (self.graphs, *drafts, self.prefill_graphs) if one is not None]

    @property
    def graph_replays(self) -> int:
        """Steps that ran as captured graphs so far."""
        return sum(one.replays for one in (self.graphs, self.prefill_graphs) if one is not None)

    @property
    def pending(self) -> bool:
        """Whether there is a graph left to capture."""
        return any(graphs.pending for graphs in self._all_graphs)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture the graph of one more size. Returns whether there was one to capture."""
        # One that fails ends it for all: several ranks capture the same.
        graphs = next((graphs for graphs in self._all_graphs if graphs.pending), None)
        return graphs is not None and graphs.capture_next()

    def stop_capturing(self) -> None:
        """Leave what has no graph eager."""
        for graphs in self._all_graphs:
            graphs.stop_capturing()

    def reset_graphs(self) -> None:
        """Let go of all graphs, and capture them anew: what they read has moved."""
        for graphs in self._all_graphs:
            graphs.reset()
        if self.recorded is not None:
            self.recorded.reset()

    def close(self) -> None:
        """Let go of graphs and buffers."""
        for graphs in self._all_graphs:
            graphs.close()

    def _rank_rows(self, *tokens: int) -> RankRows | None:
        """The rows of each data-parallel rank: `tokens` of each, or as many on all; None where there is one."""
        data = self.model.parallel.data
        if data is None:
            return None
        return RankRows(data, tokens if len(tokens) > 1 else tokens * data.size)

    def _gather_for_logits(self, hidden: torch.Tensor, facts: StepFacts) -> torch.Tensor:
        """The hidden states that logits are computed of, of all data-parallel ranks. `hidden`: of this one."""
        data, indices = self.model.parallel.data, facts.logits_indices
        assert data is not None
        if len(indices) == facts.requests and facts.decodes_only:
            own = hidden[: len(indices)]
        else:
            own = hidden[self._on_device(indices)]
        return gather_selected(data, own, [one.logits for one in facts.of_ranks])

    def _run(
        self,
        inputs: Inputs,
        prev_sampled: torch.Tensor | None,
        plans: Plans,
        rows: RankRows | None,
        received: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states [T, hidden], and what a draft model reads of them. `received`: see `Decoder.forward`."""
        ids = inputs.ids
        if inputs.prev_sampled_indices is not None and prev_sampled is not None:
            ids = known_ids(ids, inputs.prev_sampled_indices, prev_sampled)
        step = self._layers.step(ids, inputs, plans, rows)
        hidden: torch.Tensor = self.model(step, received)
        return hidden, hidden if step.features is None else step.features

    def _run_pieces(self, step: Step, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_run`, on the static buffers of prefill steps."""
        assert self.prefill_buffers is not None and self.prefill_graphs is not None
        tokens = len(inputs.ids)
        size = self.prefill_graphs.padded(tokens)
        self.prefill_buffers.refresh(inputs.ids, inputs.batch.tensors.positions, size)
        self.prefill_graphs.run(size, step)
        return self.prefill_buffers.kept(tokens)

    def _on_device(self, indices: Words) -> torch.Tensor:
        host = torch.empty(len(indices), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        host.numpy()[:] = indices
        return host.to(self.device, non_blocking=True)


def graph_shapes(
    models: Sequence[Decoder | DraftModel], load_plan: LoadPlan, *, capture: bool, prefill_tokens: int
) -> GraphShapes | None:
    """The steps of `models`, a model and perhaps its draft model, that run on static buffers. None where each step has
    tensors of its own: on a CPU, and with backends that cannot be captured, which the log names."""
    if load_plan.build.device.type != "cuda":
        return None
    reasons = uncaptured(layer for model in models for layer in model.attention)
    if reasons:
        log.info("decode and prefill steps run without CUDA graphs: %s", "; ".join(reasons))
        return None
    return GraphShapes(
        max_decodes=load_plan.max_decodes,
        max_model_len=load_plan.max_model_len,
        max_num_seqs=load_plan.max_num_seqs,
        max_drafts=load_plan.max_drafts,
        capture=capture,
        prefill_tokens=prefill_tokens,
    )
