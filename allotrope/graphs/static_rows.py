"""A static buffer whose width is known when something is first written into it."""

from __future__ import annotations

import torch


class StaticRows:
    """A static buffer as wide as the first rows that are copied into it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.rows: torch.Tensor | None = None

    def copy_in(self, values: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            self.rows = values.new_zeros(self._size, values.shape[1])
        return self.rows[: len(values)].copy_(values)
