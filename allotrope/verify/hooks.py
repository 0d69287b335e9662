"""Looking into a stack of layers while it runs: hidden states after each part, and what top-k picked.

Serves both sides of a comparison: ours and the reference's. Must not know which one it looks into.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from allotrope.layers.router import Router

# Where a hidden state is taken, in the order of computation: what goes into the two parts of a layer and comes out of
# them, then what the layer hands on. Before the first layer there is only "embedding".
EMBEDDING = "embedding"
STAGES = ("mixer in", "mixer out", "ffn in", "ffn out", "out")
PARTIAL_STAGES = frozenset({"mixer out", "ffn out"})
"""Stages at which each of several ranks has its own part of a sum."""
Place = tuple[int, str]
"""Layer and stage."""

# What the two parts of a layer are called, here and elsewhere; the first that a layer has.
_MIXERS = ("mixer", "self_attn", "linear_attn", "attn", "attention")
_FFNS = ("ffn", "mlp", "feed_forward", "block_sparse_moe", "moe")


@dataclass(frozen=True)
class TopkSelection:
    """One top-k over `count` scores of each of T tokens.

    `gap`: [T] how far the last pick is above the first that was left, in standard deviations of the scores.
    `chosen`: [T, n * k] the selections, those of each of the n rows of a token in ascending order.
    """

    count: int
    k: int
    gap: torch.Tensor
    chosen: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.count, self.k, self.chosen.shape[1]


class LayerHooks(TorchFunctionMode):
    """Collects the hidden states and selections of the latest forward pass of `layers`.

    `hidden`: place -> the state as the model has it. Use it as a context around what runs, and `close` it at the end.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.hidden: dict[Place, torch.Tensor] = {}
        self._selections: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        self._layer: int | None = None
        self._handles: list[Any] = []
        for index, layer in enumerate(layers):
            self._hook(layer, self._enter(index), self._leave(index))
            for part, names in (("mixer", _MIXERS), ("ffn", _FFNS)):
                module = _part(layer, names)
                if module is not None:
                    self._hook(module, self._note((index, f"{part} in")), self._note((index, f"{part} out")))
                    self._hook_router(index, getattr(module, "router", None))

    def clear(self) -> None:
        """Forget what was seen."""
        self.hidden.clear()
        self._selections.clear()

    def selections(self, tokens: int) -> dict[int, list[TopkSelection]]:
        """Per layer, its top-k calls in order; those that leave nothing out, or have no row for some token, are none.

        `tokens`: in the pass, T.
        """
        return {
            layer: [
                _read_selection(scores, indices, tokens)
                for scores, indices in calls
                if indices.shape[-1] < scores.shape[-1] and scores.shape[:-1].numel() % tokens == 0
            ]
            for layer, calls in self._selections.items()
        }

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, module: nn.Module, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
        def pre(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            before(kwargs.get("hidden_states", (*args, *kwargs.values())))

        def post(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            after(output)

        self._handles.append(module.register_forward_pre_hook(pre, with_kwargs=True))
        self._handles.append(module.register_forward_hook(post))

    def _enter(self, index: int) -> Callable[[Any], None]:
        def note(value: Any) -> None:
            self._layer = index
            if index == 0:
                self._note((0, EMBEDDING))(value)

        return note

    def _leave(self, index: int) -> Callable[[Any], None]:
        def note(value: Any) -> None:
            self._layer = None
            self._note((index, "out"))(value)

        return note

    def _note(self, place: Place) -> Callable[[Any], None]:
        def note(value: Any) -> None:
            found = _first_tensor(value)
            if found is not None:
                self.hidden[place] = found.detach()

        return note

    def _hook_router(self, index: int, router: object) -> None:
        """Note the selections of our own router, where compiled code makes them in place of `topk`."""
        if not isinstance(router, Router):
            return
        experts, topk = router.spec.experts, router.spec.topk
        seen = 0

        def before(value: Any) -> None:
            nonlocal seen
            seen = len(self._selections[index])

        def after(value: Any) -> None:
            chosen = value[1]
            if len(self._selections[index]) == seen and router.table is None:
                # Its scores are not to be had; only how many there are is asked of ours.
                self._selections[index].append((torch.zeros(len(chosen), experts), chosen.reshape(-1, topk)))

        self._hook(router, before, after)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._layer is not None and func in (torch.topk, torch.Tensor.topk):
            self._selections[self._layer].append((args[0].detach(), result.indices))
        return result


def _part(layer: nn.Module, names: Sequence[str]) -> nn.Module | None:
    found = (getattr(layer, name, None) for name in names)
    return next((module for module in found if isinstance(module, nn.Module)), None)


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, tuple | list):
        return next((item for item in value if isinstance(item, torch.Tensor) and item.is_floating_point()), None)
    return None


def _read_selection(scores: torch.Tensor, indices: torch.Tensor, tokens: int) -> TopkSelection:
    """`scores`: [..., count]. `indices`: [..., k] of the largest. `tokens`: T, each with equally many rows."""
    count, k = scores.shape[-1], indices.shape[-1]
    exact = scores.reshape(-1, count).double()
    edge = exact.topk(k + 1, dim=-1).values[:, -2:]
    # Masked entries are -inf or very low; they say nothing about how wide the scores are spread.
    real = exact > -1e30
    number = real.sum(-1, keepdim=True).clamp(min=1)
    mean = exact.where(real, 0.0).sum(-1, keepdim=True) / number
    deviation = ((exact - mean).where(real, 0.0).square().sum(-1, keepdim=True) / number).sqrt()
    gap = (edge[:, :1] - edge[:, 1:]) / deviation.clamp(min=1e-12)
    gap = gap.where(edge[:, 1:] > -1e30, torch.inf)
    chosen = indices.sort(-1).values.reshape(tokens, -1)
    return TopkSelection(count, k, gap.view(tokens, -1).amin(-1).cpu(), chosen.cpu())


@contextmanager
def hooked(layers: Sequence[nn.Module]) -> Iterator[LayerHooks]:
    """Taps on `layers`, taken off at the end."""
    hooks = LayerHooks(layers)
    try:
        with hooks:
            yield hooks
    finally:
        hooks.close()
