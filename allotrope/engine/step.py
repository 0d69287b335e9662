"""From a step plan of plain integers to one forward pass.

A `StepPlan` holds everything that ranks need to know and nothing that they could decide differently: it can be sent to
other processes as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, SlotIndex, index_pages
from allotrope.attention.family import Spec
from allotrope.attention.rope import RopeSpec, RopeTable
from allotrope.cache.arena import Arena
from allotrope.cache.groups import CacheGroup
from allotrope.layers.step import LayerStep, Step
from allotrope.models.decoder import Decoder


@dataclass(frozen=True)
class StepRow:
    """New tokens of one sequence. `ids`: those tokens. `context`: tokens stored before. `pages`: per group, its pages.

    `slots`: per group, its state slot. `scored`: trailing tokens of `ids` whose logits are wanted.
    """

    ids: tuple[int, ...]
    context: int
    pages: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]
    scored: int


@dataclass(frozen=True)
class StepPlan:
    """`rows`: rows with one token first. `copies`: (group, source, target) pages to copy before the pass."""

    rows: tuple[StepRow, ...]
    copies: tuple[tuple[int, int, int], ...] = ()


class Runner:
    """One rank's model, caches and plans. `specs`: per layer, its attention as this rank sees it."""

    def __init__(
        self,
        model: Decoder,
        specs: Sequence[Spec],
        groups: Sequence[CacheGroup],
        arena: Arena,
        shares: Mapping[int, int],
    ) -> None:
        self.model, self.arena = model, arena
        self.groups = groups
        self._tables: dict[RopeSpec, RopeTable] = {}
        # Per layer: its spec, its backend and the group of each of its caches; then the layers that share one plan.
        homes: list[dict[str, int]] = [{} for _ in specs]
        for index, group in enumerate(groups):
            for member in group.members:
                homes[member.layer][member.name] = index
        for layer, owner in shares.items():
            homes[layer] = homes[owner]
        self._layers = list(zip(specs, model.backends, homes, strict=True))

    @torch.inference_mode()
    def run(self, plan: StepPlan, device: torch.device) -> torch.Tensor:
        """Run one step. Returns [n, vocabulary] fp32 logits of the scored tokens, row after row."""
        for group, source, target in plan.copies:
            self.arena.copy_page(group, source, target)
        step = self.make_step(plan, device)
        hidden = self.model(step)
        scored = _scored_tokens(plan)
        if len(scored) != len(hidden):
            hidden = hidden[torch.tensor(scored, dtype=torch.int64, device=device)]
        return self.model.logits(hidden)

    def make_step(self, plan: StepPlan, device: torch.device) -> Step:
        """Batch, page tables and one family plan per kind of layer."""
        rows = plan.rows
        batch = BatchLayout(
            tuple(len(row.ids) for row in rows), tuple(row.context + len(row.ids) for row in rows), device
        )
        index: list[CacheIndex] = [
            SlotIndex(torch.tensor([row.slots[g] for row in rows], device=device))
            if group.kind == "state"
            else index_pages(batch, group.page_size, [row.pages[g] for row in rows])
            for g, group in enumerate(self.groups)
        ]
        made: dict[object, object] = {}
        layers = []
        for (spec, backend, homes), caches in zip(self._layers, self.arena.layers, strict=True):
            key = (spec.plan_key, backend.name, tuple(homes.items()))
            if key not in made:
                named = {name: index[group] for name, group in homes.items()}
                made[key] = backend.plan(spec, batch, named)
            layers.append(LayerStep(made[key], caches))
        ids = torch.tensor([token for row in rows for token in row.ids], device=device)
        return Step(ids, batch, layers, self._tables)


def _scored_tokens(plan: StepPlan) -> list[int]:
    """Places in the batch of the tokens whose logits are wanted."""
    places: list[int] = []
    end = 0
    for row in plan.rows:
        end += len(row.ids)
        places.extend(range(end - row.scored, end))
    return places
