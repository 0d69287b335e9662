"""From a step plan of plain integers to one forward pass.

A `PackedStep` holds everything that ranks need to know and nothing that they could decide differently: rank 0 packs it,
and every rank runs it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from allotrope.attention.family import Spec
from allotrope.cache.arena import Arena
from allotrope.cache.groups import CacheGroup
from allotrope.engine.decode_buffers import DecodeBuffers
from allotrope.engine.draft_runner import DraftRunner
from allotrope.engine.graphs import DecodeGraphs
from allotrope.engine.inputs import Inputs, StepFacts, StepPlan, known_ids, pack, unpack
from allotrope.engine.layer_plans import LayerPlans, Plans
from allotrope.engine.packed_step import PackedStep, Words
from allotrope.engine.recorded_steps import RecordedSteps
from allotrope.layers.backend_report import uncaptured
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.ops.rope import RopeTables

log = logging.getLogger("allotrope.engine")


@dataclass(frozen=True)
class DecodeShape:
    """Decode steps of up to `size` requests of up to `context` tokens run on static buffers; `capture`: as graphs.
    `sequences`: most of a step; its requests may be more where drafts are verified, `max_drafts` of each."""

    size: int
    context: int
    sequences: int
    max_drafts: int
    capture: bool


class ModelRunner:
    """One rank's model, caches and plans. `specs`: per layer, its attention as this rank sees it.

    `decode`: None keeps every step's tensors its own, with exact lengths. `record`: such decode steps may be recorded.
    `max_drafts`: rows of a sequence that may be drafts. `draft_model`: its caches are those of the layers behind the
    model's own.
    """

    def __init__(
        self,
        model: Decoder,
        specs: Sequence[Spec],
        groups: Sequence[CacheGroup],
        arena: Arena,
        shares: Mapping[int, int],
        device: torch.device,
        decode: DecodeShape | None = None,
        *,
        record: bool = False,
        max_drafts: int = 0,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.model, self.arena, self.device, self._verify = model, arena, device, max_drafts > 0
        self.groups = groups
        tables = RopeTables(device, model.chooser)
        attention = list(zip(specs, model.backends, strict=True))
        self._layers = LayerPlans(attention, 0, groups, arena, shares, tables)
        self.drafts: DraftRunner | None = None
        if draft_model is not None:
            layers = LayerPlans(draft_model.attention, len(specs), groups, arena, shares, tables)
            self.drafts = DraftRunner(draft_model, layers, max_drafts)
        self.buffers: DecodeBuffers | None = None
        self.graphs: DecodeGraphs | None = None
        self.recorded: RecordedSteps | None = None
        if record and decode is None and draft_model is None and not self._verify and device.type == "cpu":
            self.recorded = RecordedSteps(model)
        # Of the last step, for the draft model: its facts, and its size on static buffers, or its features, inputs and
        # plans.
        self._last: tuple[StepFacts, int | tuple[torch.Tensor, Inputs, Plans]] | None = None
        if decode is not None:
            self._make_static(decode)

    def _make_static(self, decode: DecodeShape) -> None:
        dtype = self.model.embedding.dtype
        buffers = DecodeBuffers(
            *(self.groups, decode.size, decode.context, self.model.spec.hidden, dtype, self.device),
            verify=self._verify,
            most_sampled=(1 + decode.max_drafts) * decode.sequences,
            sequences=decode.sequences,
        )
        drafts, alone = self.drafts, self.model.embedding.parallel.size == 1

        def body(size: int) -> None:
            if self._verify:
                buffers.advance(size)
            inputs, prev_sampled = buffers.inputs(size)
            hidden, features = self._run(inputs, prev_sampled, {})
            buffers.hidden[:size].copy_(hidden)
            if drafts is not None:
                drafts.keep(features)

        self.buffers = buffers
        self.graphs = DecodeGraphs(body, buffers.clear, decode.size, self.device, capture=decode.capture, alone=alone)
        if drafts is not None:
            drafts.make_static(buffers, decode.sequences, capture=decode.capture, alone=alone)

    def pack(self, plan: StepPlan) -> PackedStep:
        """The plan as integers for the ranks."""
        facts = StepFacts.of(plan)
        if self.buffers is not None and plan.decodes_only:
            return self.buffers.pack(plan.rows, facts, plan.sequences)
        pinned = self.device.type == "cuda"
        next_ids = self.drafts is not None
        return pack(plan, facts, self.groups, pinned=pinned, verify=self._verify, next_ids=next_ids)

    @torch.inference_mode()
    def run(self, packed: PackedStep, prev_sampled: torch.Tensor | None = None) -> torch.Tensor:
        """Run one step. `prev_sampled`: [m] tokens that the step before sampled, where rows are placeholders; with a
        draft model these are for its `next_tokens`.

        Returns the logits at the plan's `logits_indices`, see `Decoder.logits`, or their greedy tokens where the plan
        says so.
        """
        facts = StepFacts.read(packed)
        indices, requests = facts.logits_indices, facts.requests
        if self.drafts is not None:
            prev_sampled = self.drafts.next_tokens
        if len(facts.copies):
            self.arena.copy_pages(facts.copies.tolist())
        scored = self.model.greedy if facts.greedy else self.model.logits
        if self.buffers is not None and self.graphs is not None and facts.decodes_only:
            size = self.graphs.padded(requests)
            self.buffers.refresh(packed, requests, prev_sampled, size)
            if self.drafts is not None and (accepted := self.drafts.accepted) is not None:
                self.buffers.accepted[: len(accepted)].copy_(accepted)
            self.graphs.run(size)
            self._last = facts, size
            # The padding rows stay: the same product runs whether or not a graph came before it.
            out = scored(self.buffers.hidden[:size])[:requests]
            return out if len(indices) == requests else out[self._on_device(indices)]
        inputs, plans = unpack(packed, facts, self.groups, self.device), Plans()
        if inputs.prev_sampled_indices is not None and prev_sampled is not None:
            ids = known_ids(inputs.ids, inputs.prev_sampled_indices, prev_sampled)
            inputs = replace(inputs, ids=ids, prev_sampled_indices=None)
        if self.recorded is not None and facts.decodes_only:
            hidden = features = self.recorded.run(self._layers.step(inputs.ids, inputs, plans))
        else:
            hidden, features = self._run(inputs, None, plans)
        if self.drafts is not None:
            self._last = facts, (features, inputs, plans)
        if len(indices) != len(hidden):
            hidden = hidden[self._on_device(indices)]
        return scored(hidden)

    @torch.inference_mode()
    def run_drafts(self, sampled: torch.Tensor) -> None:
        """The passes of the draft model that the last plan asks for. `sampled`: [n] tokens that came of it, in order of
        the rows that they follow."""
        assert self.drafts is not None and self._last is not None
        facts, step = self._last
        if isinstance(step, int):
            self.drafts.run_static(sampled, step, facts.sequences, facts.passes)
        else:
            features, inputs, plans = step
            self.drafts.run(features, sampled, inputs, plans, facts.passes)
        self._last = None

    @property
    def _all_graphs(self) -> Sequence[DecodeGraphs]:
        if self.graphs is None:
            return ()
        return (self.graphs,) if self.drafts is None else (self.graphs, *self.drafts.graphs)

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

    def _run(
        self, inputs: Inputs, prev_sampled: torch.Tensor | None, plans: Plans
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states [T, hidden], and what a draft model reads of them."""
        ids = inputs.ids
        if inputs.prev_sampled_indices is not None and prev_sampled is not None:
            ids = known_ids(ids, inputs.prev_sampled_indices, prev_sampled)
        step = self._layers.step(ids, inputs, plans)
        hidden: torch.Tensor = self.model(step)
        return hidden, hidden if step.features is None else step.features

    def _on_device(self, indices: Words) -> torch.Tensor:
        host = torch.empty(len(indices), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        host.numpy()[:] = indices
        return host.to(self.device, non_blocking=True)


def decode_shape(
    models: Sequence[Decoder | DraftModel],
    size: int,
    context: int,
    sequences: int,
    max_drafts: int,
    device: torch.device,
    *,
    capture: bool,
) -> DecodeShape | None:
    """How decode steps of a model, and of its draft model if there is one, run on `device`; None, with a line in the
    log that says why, where they are like any other."""
    if device.type != "cuda":
        return None
    reasons = uncaptured(layer for model in models for layer in model.attention)
    if reasons:
        log.info("decode steps run without CUDA graphs: %s", "; ".join(reasons))
        return None
    return DecodeShape(size, context, sequences, max_drafts, capture)
