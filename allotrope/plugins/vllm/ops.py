"""One custom operator per family: what compilers and graphs see of our attention.

    allotrope::FAMILY(inputs, outputs, pools, cache, layer) -> ()

`inputs`: the family's tensors in the order of its function. `outputs`: written whole. `pools`: the cache memory of the
layer, which is read and written; empty until there is any. `cache`, `layer`: names by which the step's plan is found.
An operator is opaque, so it can be a split point of piecewise compilation under its name. Where the step's plan is at
hand nothing is being compiled, and the layer calls its family as our engine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.family import CacheViews, Spec
from allotrope.attention.registry import FAMILIES
from allotrope.plugins.vllm.cache import HostedCache

SPLIT_POINTS = tuple(f"allotrope::{name}" for name in FAMILIES)


class HostedLayer:
    """One layer's attention: its own or another layer's `caches`, and the `backend` that our library chose for it."""

    def __init__(self, name: str, spec: Spec, backend: AttentionBackend, caches: dict[str, HostedCache]) -> None:
        self.name, self.spec, self.backend, self.caches = name, spec, backend, caches
        self.home = next(iter(caches.values()))
        self.home.readers[name] = self
        self.op = getattr(torch.ops.allotrope, spec.family)
        self._names: tuple[str | None, ...] = ()
        self._scales: dict[str, float] = {}

    @property
    def views(self) -> CacheViews:
        """As the family reads its caches; empty until vLLM has allocated them."""
        return {name: cache.views or {} for name, cache in self.caches.items()}

    @property
    def pools(self) -> dict[tuple[str, str], torch.Tensor]:
        """(cache, field) -> memory; empty until vLLM has allocated it."""
        return {(name, field): pool for name, fields in self.views.items() for field, pool in fields.items()}

    def run(self, spec: Spec, plan: object, caches: CacheViews, *args: Any, **named: Any) -> Any:
        """The family's function; without a `plan` through its operator, which finds this step's by itself.

        Scales of FP8 rows are numbers, the same in every step: the layer keeps them, and operators see tensors alone.
        """
        if plan is not None:
            return self.backend.run(spec, plan, caches, *args, **named)
        self._scales = {name: value for name, value in named.items() if isinstance(value, float)}
        tensors = [(name, value) for name, value in named.items() if name not in self._scales]
        given = [(None, tensor) for tensor in args] + tensors
        self._names = tuple(name for name, _ in given)
        inputs = [tensor for _, tensor in given]
        first = next(tensor for tensor in inputs if tensor is not None)
        outputs = [
            first.new_empty(first.shape[0], *shape, dtype=first.dtype if dtype is None else dtype)
            for shape, dtype in FAMILIES[spec.family].output_shapes(spec)
        ]
        self.op(inputs, outputs, list(self.pools.values()), self.home.name, self.name)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def compute(
        self,
        plan: object,
        inputs: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor],
        pools: Sequence[torch.Tensor],
    ) -> None:
        """What the operator does where there is a plan."""
        caches: dict[str, dict[str, torch.Tensor]] = {}
        for (cache, field), pool in zip(self.pools, pools, strict=True):
            caches.setdefault(cache, {})[field] = pool
        pairs = list(zip(self._names, inputs, strict=True))
        args = [tensor for name, tensor in pairs if name is None]
        named = {name: tensor for name, tensor in pairs if name is not None}
        found = self.backend.run(self.spec, plan, caches, *args, **named, **self._scales)
        if len(outputs) == 1:
            outputs[0].copy_(found)
            return
        outputs[0].copy_(found[0])
        # Fewer columns than the most that can be picked, where no request is that long.
        outputs[1].fill_(-1)[:, : found[1].shape[1]].copy_(found[1])


def _attend(
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    pools: Sequence[torch.Tensor],
    cache: str,
    layer: str,
) -> None:
    context = get_forward_context()
    if context.attn_metadata is None:
        # vLLM measures memory before there are caches.
        for output in outputs:
            output.fill_(0 if output.is_floating_point() else -1)
        return
    found = context.no_compile_layers[cache].readers[layer]
    found.compute(context.attn_metadata[cache].plans[layer], inputs, outputs, pools)


def _define() -> torch.library.Library:
    library = torch.library.Library("allotrope", "FRAGMENT")
    for name in FAMILIES:
        library.define(
            f"{name}(Tensor?[] inputs, Tensor(a!)[] outputs, Tensor(b!)[] pools, str cache, str layer) -> ()"
        )
        library.impl(name, _attend, "CompositeExplicitAutograd")
        torch.library.register_fake(f"allotrope::{name}", lambda *args: None, lib=library)
    return library


# Operators live as long as their library object.
_LIBRARY = _define()
