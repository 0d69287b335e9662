"""From the inputs of a step to what each layer of a model gets: its family's plan and its caches.

Owns which layers share a plan. Must not know how inputs come to a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.family import Spec
from allotrope.cache.arena import Arena
from allotrope.cache.groups import CacheGroup
from allotrope.engine.inputs import Inputs
from allotrope.layers.data_parallel import RankRows
from allotrope.layers.step import LayerStep, Step
from allotrope.ops.rope import RopeTables

Plans = dict[object, object]


class LayerPlans:
    """The layers of a model, or of its draft model. `attention`: of each. `first`: index of the first in the arena.

    `shares`: layer of the arena -> layer whose caches it reads.
    """

    def __init__(
        self,
        attention: Sequence[tuple[Spec, AttentionBackend]],
        first: int,
        groups: Sequence[CacheGroup],
        arena: Arena,
        shares: Mapping[int, int],
        tables: RopeTables,
    ) -> None:
        # Per layer: its spec, its backend and the group of each of its caches; layers alike share one plan.
        group_ids: list[dict[str, int]] = [{} for _ in arena.layers]
        for index, group in enumerate(groups):
            for member in group.members:
                group_ids[member.layer][member.name] = index
        for layer, owner in shares.items():
            group_ids[layer] = group_ids[owner]
        self._layers = [
            (spec, backend, group_ids[i], arena.layers[i]) for i, (spec, backend) in enumerate(attention, first)
        ]
        self._tables = tables
        # The groups that these layers read.
        self.groups = frozenset(group for _, _, group_ids, _ in self._layers for group in group_ids.values())

    def step(self, ids: torch.Tensor, inputs: Inputs, plans: Plans, rows: RankRows | None = None) -> Step:
        """The step of the model. `plans`: those of the same inputs that were made before; new ones join them. `rows`:
        as in `Step`."""
        layers = []
        for spec, backend, group_ids, caches in self._layers:
            key = (spec.plan_key, backend.name, tuple(group_ids.items()))
            if key not in plans:
                named = {name: inputs.index[group] for name, group in group_ids.items()}
                plans[key] = backend.plan(spec, inputs.batch, named)
            layers.append(LayerStep(plans[key], caches))
        return Step(ids, inputs.batch, layers, self._tables, rows)
