"""From a step plan of plain integers to one forward pass.

A `StepPlan` holds everything that ranks need to know and nothing that they could decide differently: it can be sent to
other processes as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from allotrope.attention.family import Spec
from allotrope.cache.arena import Arena
from allotrope.cache.groups import CacheGroup
from allotrope.engine.decode import DecodeBuffers
from allotrope.engine.graphs import DecodeGraphs
from allotrope.engine.inputs import Inputs, StepPlan, known_ids, pack
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


class Runner:
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
        # Per layer: its spec, its backend and the group of each of its caches; then the layers that share one plan.
        homes: list[dict[str, int]] = [{} for _ in specs]
        for index, group in enumerate(groups):
            for member in group.members:
                homes[member.layer][member.name] = index
        for layer, owner in shares.items():
            homes[layer] = homes[owner]
        self._layers = list(zip(specs, model.backends, homes, strict=True))
        self.buffers: DecodeBuffers | None = None
        self.graphs: DecodeGraphs | None = None
        if decode is not None:
            self._make_static(decode)

    def _make_static(self, decode: DecodeShape) -> None:
        dtype = self.model.embedding.weight.dtype
        buffers = DecodeBuffers(self.groups, decode.size, decode.context, self.model.spec.hidden, dtype, self.device)

        def body(size: int) -> None:
            buffers.hidden[:size].copy_(self._hidden(*buffers.inputs(size)))

        self.buffers = buffers
        self.graphs = DecodeGraphs(
            body, lambda: buffers.refresh((), None), decode.size, self.device, capture=decode.capture
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Run one step. `chosen`: [m] tokens that the step before chose, where rows follow them.

        Returns [n, vocabulary] fp32 logits of the scored tokens, row after row.
        """
        if plan.copies:
            self.arena.copy_pages(plan.copies)
        scored = plan.scored
        if self.buffers is not None and self.graphs is not None and plan.decodes_only:
            size = self.graphs.padded(len(plan.rows))
            self.buffers.refresh(plan.rows, chosen, size)
            self.graphs.run(size)
            # The rows that fill up stay: the same product runs whether or not a graph came before it.
            logits = self.model.logits(self.buffers.hidden[:size])[: len(plan.rows)]
            return logits if len(scored) == len(plan.rows) else logits[self._places(scored)]
        hidden = self._hidden(pack(plan.rows, self.groups, self.device), chosen)
        if len(scored) != len(hidden):
            hidden = hidden[self._places(scored)]
        return self.model.logits(hidden)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture the graph of one more size. Returns whether there was one to capture."""
        return self.graphs is not None and self.graphs.capture_next()

    def close(self) -> None:
        """Let go of graphs and buffers."""
        if self.graphs is not None:
            self.graphs.close()

    def _hidden(self, inputs: Inputs, chosen: torch.Tensor | None) -> torch.Tensor:
        ids = inputs.ids
        if inputs.follows is not None and chosen is not None:
            ids = known_ids(ids, inputs.follows, chosen)
        hidden: torch.Tensor = self.model(self._step(ids, inputs))
        return hidden

    def _step(self, ids: torch.Tensor, inputs: Inputs) -> Step:
        """One family plan per kind of layer."""
        made: dict[object, object] = {}
        layers = []
        for (spec, backend, homes), caches in zip(self._layers, self.arena.layers, strict=True):
            key = (spec.plan_key, backend.name, tuple(homes.items()))
            if key not in made:
                named = {name: inputs.index[group] for name, group in homes.items()}
                made[key] = backend.plan(spec, inputs.batch, named)
            layers.append(LayerStep(made[key], caches))
        return Step(ids, inputs.batch, layers, self._tables)

    def _places(self, scored: Sequence[int]) -> torch.Tensor:
        places = torch.tensor(scored, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return places.to(self.device, non_blocking=True)


def decode_shape(model: Decoder, size: int, context: int, device: torch.device, *, capture: bool) -> DecodeShape | None:
    """How decode steps run on `device`; None, with a line in the log that says why, where they are like any other."""
    if device.type != "cuda":
        return None
    reasons = uncaptured(model)
    if reasons:
        log.info("decode steps run without CUDA graphs: %s", "; ".join(reasons))
        return None
    return DecodeShape(size, context, capture)
