"""Calls of the plugin's operators as vLLM's steps make them, without an engine around."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from vllm.forward_context import ForwardContext, override_forward_context

from allotrope.attention.batch import BatchLayout, SlotIndex, index_pages
from allotrope.attention.cache_layout import StateSlots, page_bytes, row_bytes
from allotrope.attention.check import cases
from allotrope.attention.registry import FAMILIES
from allotrope.kernels.chip import chip_of
from allotrope.plugins.vllm.cache import CacheMember, HostedCache, HostedStep
from allotrope.plugins.vllm.ops import HostedLayer
from allotrope.plugins.vllm.pools import Member, Pool


@dataclass(frozen=True)
class Call:
    """A step of a prompt and a decode. `inputs`: the family's."""

    layer: HostedLayer
    plan: Any
    inputs: Any

    def run(self, plan: Any) -> tuple[torch.Tensor, ...]:
        """What the layer answers on empty memory, with the plan at hand or without."""
        for pool in self.layer.pools.values():
            pool.zero_()
        found = self.layer.run(self.layer.spec, plan, self.layer.views, self.inputs)
        return found if isinstance(found, tuple) else (found,)

    def arguments(self) -> tuple[Any, ...]:
        """What the operator is called with."""
        made: list[tuple[Any, ...]] = []
        with mock.patch.object(self.layer, "op", lambda *arguments: made.append(arguments)):
            self.run(None)
        return made[0]


def calls() -> Iterator[Call]:
    """One of each family, within a forward context that knows the layer and has a plan for it."""
    device = torch.device("cpu")
    for name, family in FAMILIES.items():
        case = next(iter(cases(name).values()))
        backend = next(backend for backend in family.backends if not backend.rejects(case.spec, chip_of(device)))
        batch = BatchLayout((1, 7), (5, 7), device)
        caches, index = {}, {}
        for key, layout in case.spec.caches().items():
            size = 128 if not isinstance(layout, StateSlots) else 1
            pool = Pool((Member(0, key, layout),), row_bytes(layout))
            cache = HostedCache(f"layers.0.{key}", pool, (layout,), False)
            rows = page_bytes(layout, size)
            cache.kv_cache = torch.zeros(3, 1, 1, rows, dtype=torch.uint8)
            caches[key] = CacheMember(cache, 0)
            state = isinstance(layout, StateSlots)
            index[key] = SlotIndex(torch.tensor([1, 2])) if state else index_pages(batch, size, [[1], [2]])
        layer = HostedLayer("layers.0", case.spec, backend, caches)
        plan = backend.plan(case.spec, batch, index)
        step = HostedStep(None, None, {layer.name: plan})
        context = ForwardContext(
            {one.cache.name: one.cache for one in caches.values()}, {layer.first_cache.name: step}, {}
        )
        inputs = case.inputs(0)
        named = {key: value[:8] for key, value in inputs.tokens.items()} | inputs.layer
        with override_forward_context(context):
            yield Call(layer, plan, family.ready_inputs(case.spec, **named))
