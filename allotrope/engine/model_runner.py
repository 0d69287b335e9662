"""From a step plan of plain integers to one forward pass.

A `PackedStep` holds everything that ranks need to know and nothing that they could decide differently: rank 0 packs it,
and every rank runs it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from allotrope.attention.family import Spec
from allotrope.cache.arena import Arena
from allotrope.cache.groups import CacheGroup
from allotrope.engine.decode_buffers import DecodeBuffers
from allotrope.engine.graphs import DecodeGraphs
from allotrope.engine.inputs import Inputs, StepFacts, StepPlan, known_ids, pack, unpack
from allotrope.engine.packed_step import PackedStep, Words
from allotrope.layers.backend_report import uncaptured
from allotrope.layers.decoder import Decoder
from allotrope.layers.step import LayerStep, Step
from allotrope.ops.rope import RopeTables

log = logging.getLogger("allotrope.engine")


@dataclass(frozen=True)
class DecodeShape:
    """Decode steps of up to `size` requests of up to `context` tokens run on static buffers; `capture`: as graphs."""

    size: int
    context: int
    capture: bool


class ModelRunner:
    """One rank's model, caches and plans. `specs`: per layer, its attention as this rank sees it.

    `decode`: None keeps every step's tensors its own, with exact lengths.
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
    ) -> None:
        self.model, self.arena, self.device = model, arena, device
        self.groups = groups
        self._tables = RopeTables(device, model.chooser)
        # Per layer: its spec, its backend and the group of each of its caches; layers alike share one plan.
        group_ids: list[dict[str, int]] = [{} for _ in specs]
        for index, group in enumerate(groups):
            for member in group.members:
                group_ids[member.layer][member.name] = index
        for layer, owner in shares.items():
            group_ids[layer] = group_ids[owner]
        self._layers = list(zip(specs, model.backends, group_ids, strict=True))
        self.buffers: DecodeBuffers | None = None
        self.graphs: DecodeGraphs | None = None
        if decode is not None:
            self._make_static(decode)

    def _make_static(self, decode: DecodeShape) -> None:
        dtype = self.model.embedding.weight.dtype
        buffers = DecodeBuffers(self.groups, decode.size, decode.context, self.model.spec.hidden, dtype, self.device)

        def body(size: int) -> None:
            buffers.hidden[:size].copy_(self._hidden(*buffers.inputs(size)))

        self.buffers, alone = buffers, self.model.embedding.parallel.size == 1
        self.graphs = DecodeGraphs(body, buffers.clear, decode.size, self.device, capture=decode.capture, alone=alone)

    def pack(self, plan: StepPlan) -> PackedStep:
        """The plan as integers for the ranks."""
        if self.buffers is not None and plan.decodes_only:
            return self.buffers.pack(plan)
        return pack(plan, self.groups, pinned=self.device.type == "cuda")

    @torch.inference_mode()
    def run(self, packed: PackedStep, prev_sampled: torch.Tensor | None = None) -> torch.Tensor:
        """Run one step. `prev_sampled`: [m] tokens that the step before sampled, where rows end in placeholders.

        Returns the logits at the plan's `logits_indices`, see `Decoder.logits`, or their greedy tokens where the plan
        says so.
        """
        facts = StepFacts.read(packed)
        if len(facts.copies):
            self.arena.copy_pages(facts.copies.tolist())
        indices, requests = facts.logits_indices, facts.requests
        scored = self.model.greedy if facts.greedy else self.model.logits
        if self.buffers is not None and self.graphs is not None and facts.decodes_only:
            size = self.graphs.padded(requests)
            self.buffers.refresh(packed, requests, prev_sampled, size)
            self.graphs.run(size)
            # The padding rows stay: the same product runs whether or not a graph came before it.
            out = scored(self.buffers.hidden[:size])[:requests]
            return out if len(indices) == requests else out[self._on_device(indices)]
        hidden = self._hidden(unpack(packed, facts, self.groups, self.device), prev_sampled)
        if len(indices) != len(hidden):
            hidden = hidden[self._on_device(indices)]
        return scored(hidden)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture the graph of one more size. Returns whether there was one to capture."""
        return self.graphs is not None and self.graphs.capture_next()

    def close(self) -> None:
        """Let go of graphs and buffers."""
        if self.graphs is not None:
            self.graphs.close()

    def _hidden(self, inputs: Inputs, prev_sampled: torch.Tensor | None) -> torch.Tensor:
        ids = inputs.ids
        if inputs.prev_sampled_indices is not None and prev_sampled is not None:
            ids = known_ids(ids, inputs.prev_sampled_indices, prev_sampled)
        hidden: torch.Tensor = self.model(self._step(ids, inputs))
        return hidden

    def _step(self, ids: torch.Tensor, inputs: Inputs) -> Step:
        """The step of the model, with one family plan for all layers of equal spec, backend and cache groups."""
        plans: dict[object, object] = {}
        layers = []
        for (spec, backend, group_ids), caches in zip(self._layers, self.arena.layers, strict=True):
            key = (spec.plan_key, backend.name, tuple(group_ids.items()))
            if key not in plans:
                named = {name: inputs.index[group] for name, group in group_ids.items()}
                plans[key] = backend.plan(spec, inputs.batch, named)
            layers.append(LayerStep(plans[key], caches))
        return Step(ids, inputs.batch, layers, self._tables)

    def _on_device(self, indices: Words) -> torch.Tensor:
        host = torch.empty(len(indices), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        host.numpy()[:] = indices
        return host.to(self.device, non_blocking=True)


def decode_shape(model: Decoder, size: int, context: int, device: torch.device, *, capture: bool) -> DecodeShape | None:
    """How decode steps run on `device`; None, with a line in the log that says why, where they are like any other."""
    if device.type != "cuda":
        return None
    reasons = uncaptured(model)
    if reasons:
        log.info("decode steps run without CUDA graphs: %s", "; ".join(reasons))
        return None
    return DecodeShape(size, context, capture)
