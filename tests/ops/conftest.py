"""What tests of kernels share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for results holds nothing that could pass for one."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def poison(made: torch.Tensor) -> torch.Tensor:
        return made.fill_(torch.nan if made.is_floating_point() else -77)

    def poisoned_empty(*args: object, **named: object) -> torch.Tensor:
        return poison(empty(*args, **named))  # type: ignore[call-overload]

    def poisoned_new_empty(self: torch.Tensor, *args: object, **named: object) -> torch.Tensor:
        return poison(new_empty(self, *args, **named))  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "empty", poisoned_empty)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned_new_empty)
