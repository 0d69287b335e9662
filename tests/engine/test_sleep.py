"""A sleep frees storages and fills them again, and an engine that has slept answers as before."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from allotrope.engine import sleep
from allotrope.engine.sleep import SleepingMemory, tensors_of
from allotrope.errors import InvalidRequest


@dataclass(frozen=True)
class _Packed:
    values: torch.Tensor
    scales: tuple[torch.Tensor, ...]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(7), requires_grad=False)
        self.weight = _Packed(torch.randn(5, 6), (torch.randn(3),))
        self.register_buffer("table", torch.arange(4))
        self.part = self.weight.values[1:3]


def test_every_tensor_of_a_model_is_found() -> None:
    model = nn.Sequential(_Layer(), _Layer())
    found = {one.data_ptr() for one in tensors_of(model)}
    for layer in model:
        assert isinstance(layer, _Layer)
        held = (layer.bias, layer.weight.values, *layer.weight.scales, layer.get_buffer("table"), layer.part)
        assert {one.data_ptr() for one in held} <= found


def test_tensors_and_their_views_come_back() -> None:
    model = _Layer()
    caches = [torch.randn(8, 8)]
    before = [one.clone() for one in tensors_of(model)]
    asleep = SleepingMemory(tensors_of(model), caches)
    assert asleep.bytes == 7 * 4 + 5 * 6 * 4 + 3 * 4 + 4 * 8 + 8 * 8 * 4
    assert {one.untyped_storage().nbytes() for one in (*tensors_of(model), *caches)} == {0}
    asleep.restore()
    assert all(map(torch.equal, tensors_of(model), before))
    assert not caches[0].any()
    model.weight.values[1, 0] = 5.0
    assert model.part[0, 0] == 5.0


def test_nothing_is_freed_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "available_memory", lambda: 8)
    kept = torch.ones(4)
    with pytest.raises(InvalidRequest, match="host memory") as refused:
        SleepingMemory([kept], [])
    assert refused.value.param == "level"
    assert torch.equal(kept, torch.ones(4))
