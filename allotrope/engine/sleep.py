"""Frees a device's memory while nothing runs, and fills it again: weights wait in host memory, caches are dropped.

Tensors stay the same objects over a sleep, and views of each other: their storages are emptied and filled. What holds
an address, such as a captured graph, has to be made anew. Must not know requests or steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from allotrope.engine.memory import available_memory
from allotrope.errors import InvalidRequest


class SleepingMemory:
    """The storages of `kept` tensors, whose bytes are in host memory, and of `dropped` ones, whose bytes are nowhere.

    Making the object frees them. Raises `InvalidRequest`, with nothing freed, if host memory lacks room.
    """

    def __init__(self, kept: Iterable[torch.Tensor], dropped: Iterable[torch.Tensor]) -> None:
        keep, drop = _storages(kept), _storages(dropped)
        for address in keep:
            drop.pop(address, None)
        needed, free = sum(one.nbytes() for one in keep.values()), available_memory()
        if needed > free:
            raise InvalidRequest(
                f"the weights have {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB of host memory are free.",
                "level",
            )
        # Everything is copied before anything is freed.
        self._kept = [(one, _bytes_of(one).to("cpu", copy=True)) for one in keep.values()]
        self._dropped = [(one, one.nbytes()) for one in drop.values()]
        self.bytes = needed + sum(size for _, size in self._dropped)
        for storage in (*keep.values(), *drop.values()):
            storage.resize_(0)

    def restore(self) -> None:
        """Fill the storages again: with what was kept, and with zeros."""
        for storage, host in self._kept:
            storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host)
        for storage, size in self._dropped:
            storage.resize_(size)
            _bytes_of(storage).zero_()


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor that the modules of `model` hold: parameters, buffers, and those of packed weights."""
    for module in model.modules():
        yield from _tensors(vars(module), 0)


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module) or depth > 8:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name, None), depth + 1)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages of `tensors` by address."""
    return {storage.data_ptr(): storage for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
