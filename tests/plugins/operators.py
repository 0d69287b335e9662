"""Calls of the plugin's operators as vLLM's steps make them, without an engine around."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from vllm.forward_context import ForwardContext, override_forward_context

from allotrope.attention.batch import BatchLayout, SlotIndex, index_pages
from allotrope.attention.cache_layout import StateSlots, page_bytes
from allotrope.attention.check import cases
from allotrope.attention.registry import FAMILIES
from allotrope.plugins.vllm.cache import HostedCache, HostedStep
from allotrope.plugins.vllm.ops import HostedLayer


def calls() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """(family, operator, arguments), within a forward context that knows the layer and has a plan for it."""
    device = torch.device("cpu")
    for name, family in FAMILIES.items():
        case = next(iter(cases(name).values()))
        backend = next(backend for backend in family.backends if not backend.rejects(case.spec, device))
        batch = BatchLayout((1, 7), (5, 7), device)
        caches, index = {}, {}
        for key, layout in case.spec.caches().items():
            size = 128 if not isinstance(layout, StateSlots) else 1
            cache = HostedCache(f"layers.0.{key}", layout, (layout,), False)
            rows = page_bytes(layout, size)
            cache.kv_cache = torch.zeros(3, 1, 1, rows, dtype=torch.uint8)
            caches[key] = cache
            state = isinstance(layout, StateSlots)
            index[key] = SlotIndex(torch.tensor([1, 2])) if state else index_pages(batch, size, [[1], [2]])
        layer = HostedLayer("layers.0", case.spec, backend, caches)
        step = HostedStep(None, None, {layer.name: backend.plan(case.spec, batch, index)})
        context = ForwardContext({cache.name: cache for cache in caches.values()}, {layer.home.name: step}, {})
        inputs = case.inputs(0)
        named = {key: value[:8] for key, value in inputs.tokens.items()} | inputs.layer
        made: list[tuple[Any, ...]] = []
        keep = made.append
        with override_forward_context(context):
            operator = layer.op.default
            with mock.patch.object(layer, "op", lambda *arguments, keep=keep: keep(arguments)):
                layer.run(case.spec, None, {}, **named)
            yield name, operator, made[0]
