"""One custom operator per family: what compilers and graphs see of our attention.

    allotrope::FAMILY(inputs, outputs, pools, cache, layer) -> ()

`inputs`: the tensors of the family's inputs in their order. `outputs`: written whole. `pools`: the cache memory of the
layer, which is read and written; empty until there is any. `cache`, `layer`: names by which the step's plan is found.
An operator is opaque, so it can be a split point of piecewise compilation under its name. Where the step's plan is at
hand nothing is being compiled, and the layer calls its family as our engine does.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.family import CacheViews, Spec
from allotrope.attention.registry import FAMILIES
from allotrope.plugins.vllm.cache import CacheMember

SPLIT_POINTS = tuple(f"allotrope::{name}" for name in FAMILIES)


class HostedLayer:
    """One layer's attention: its own or another layer's `caches`, and the `backend` that our library chose for it.

    `first_cache`: the cache under whose name vLLM's forward context has the step and the plan of this layer.
    """

    def __init__(self, name: str, spec: Spec, backend: AttentionBackend, caches: dict[str, CacheMember]) -> None:
        self.name, self.spec, self.backend, self.caches = name, spec, backend, caches
        self.first_cache = next(iter(caches.values())).cache
        self.first_cache.readers[name] = self
        self.op = getattr(torch.ops.allotrope, spec.family)
        self._inputs: Unflatten

    @property
    def views(self) -> CacheViews:
        """As the family reads its caches; empty until vLLM has allocated them."""
        return {name: cache.views for name, cache in self.caches.items()}

    @property
    def pools(self) -> dict[tuple[str, str], torch.Tensor]:
        """(cache, field) -> memory; empty until vLLM has allocated it."""
        return {(name, field): pool for name, fields in self.views.items() for field, pool in fields.items()}

    def run(self, spec: Spec, plan: object, caches: CacheViews, inputs: Any) -> Any:
        """The family's function; without a `plan` through its operator, which finds this step's by itself.

        Operators see tensors alone: the layer keeps how the family's inputs are made of them.
        """
        if plan is not None:
            return self.backend.run(spec, plan, caches, inputs)
        tensors: list[torch.Tensor] = []
        self._inputs = _flatten(inputs, tensors)
        first = tensors[0]
        outputs = [
            first.new_empty(first.shape[0], *shape, dtype=first.dtype if dtype is None else dtype)
            for shape, dtype in FAMILIES[spec.family].output_shapes(spec)
        ]
        self.op(tensors, outputs, list(self.pools.values()), self.first_cache.name, self.name)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def compute(
        self,
        plan: object,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        pools: Sequence[torch.Tensor],
    ) -> None:
        """What the operator does where there is a plan."""
        caches: dict[str, dict[str, torch.Tensor]] = {}
        for (cache, field), pool in zip(self.pools, pools, strict=True):
            caches.setdefault(cache, {})[field] = pool
        found = self.backend.run(self.spec, plan, caches, self._inputs(inputs))
        if len(outputs) == 1:
            outputs[0].copy_(found)
            return
        outputs[0].copy_(found[0])
        # Fewer columns than the most that can be chosen, where no request is that long.
        outputs[1].fill_(-1)[:, : found[1].shape[1]].copy_(found[1])


Unflatten = Callable[[Sequence[torch.Tensor]], Any]


def _flatten(value: Any, tensors: list[torch.Tensor]) -> Unflatten:
    """Append the tensors of a family's inputs to `tensors`. Returns what makes inputs of such tensors again, and holds
    none itself."""
    if isinstance(value, torch.Tensor):
        number = len(tensors)
        tensors.append(value)
        return operator.itemgetter(number)
    kind: Any = type(value)
    if dataclasses.is_dataclass(value):
        # Fields of the value: compilers do not trace those of its class.
        fields = {one.name: _flatten(getattr(value, one.name), tensors) for one in dataclasses.fields(value)}
        return lambda given: kind(**{name: made(given) for name, made in fields.items()})
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        items = [_flatten(item, tensors) for item in value]
        return lambda given: kind(*(made(given) for made in items))
    return functools.partial(_constant, value)


def _constant(value: Any, given: Sequence[torch.Tensor]) -> Any:
    return value


def _attend(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    pools: Sequence[torch.Tensor],
    cache: str,
    layer: str,
) -> None:
    context = get_forward_context()
    if context.attn_metadata is None:
        # vLLM measures memory before there are caches; heads are normed and rotated in memory of their own.
        torch.empty_like(inputs[0])
        for output in outputs:
            output.fill_(0 if output.is_floating_point() else -1)
        return
    found = context.no_compile_layers[cache].readers[layer]
    found.compute(context.attn_metadata[cache].plans[layer], inputs, outputs, pools)


def _define() -> torch.library.Library:
    library = torch.library.Library("allotrope", "FRAGMENT")
    for name in FAMILIES:
        library.define(f"{name}(Tensor[] inputs, Tensor(a!)[] outputs, Tensor(b!)[] pools, str cache, str layer) -> ()")
        library.impl(name, _attend, "CompositeExplicitAutograd")
        torch.library.register_fake(f"allotrope::{name}", lambda *args: None, lib=library)
    return library


# Operators live as long as their library object.
_LIBRARY = _define()
