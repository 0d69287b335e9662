"""Static buffers of a prefill step, which captured pieces of it read: tokens and positions, padding rows behind.

Must not know requests: all that attention needs of these it takes from the step itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from allotrope.attention.batch import BatchLayout, BatchTensors
from allotrope.graphs.static_rows import StaticRows
from allotrope.layers.step import Attend, PaddedLayerStep, Step
from allotrope.ops.rope import RopeTables


class PrefillBuffers:
    """Inputs and outputs of steps of up to `size` tokens. `tables`: rotation tables."""

    def __init__(self, size: int, device: torch.device, tables: RopeTables) -> None:
        self._device, self._tables = device, tables
        self._ids, self._positions, self._is_padding = torch.zeros(3, size, dtype=torch.int64, device=device)
        self._rows = torch.arange(size, device=device)
        # The true rows are those of one request, padding rows of another one, without tokens.
        self._seq_lens = torch.tensor([1, 0], dtype=torch.int32, device=device)
        self._query_start = torch.zeros(3, dtype=torch.int32, device=device)
        self._hidden, self._features = StaticRows(size), StaticRows(size)

    def refresh(self, ids: torch.Tensor, positions: torch.Tensor, size: int) -> None:
        """Copy a step into the buffers, padding rows up to `size` behind: all of them one token at position 0."""
        tokens = len(ids)
        for buffer, rows in ((self._ids, ids), (self._positions, positions)):
            buffer[:tokens].copy_(rows)
            if tokens < size:
                buffer[tokens:size].zero_()
        torch.ge(self._rows[:size], tokens, out=self._is_padding[:size])

    def clear(self) -> None:
        """Make all rows padding rows."""
        self._is_padding.fill_(1)

    def body(self, model: Callable[[Step], torch.Tensor], layers: int) -> Callable[[int, Attend], None]:
        """What `PiecewiseGraphs` runs: `model`, which has so many layers, on the first rows of the buffers. What it
        returns is kept, as a part of its graph."""

        def run(size: int, attend: Attend) -> None:
            tensors = BatchTensors(self._seq_lens, self._query_start, self._positions[:size], self._is_padding[:size])
            batch = BatchLayout((size,), (size,), self._device, tensors)
            step = Step(self._ids[:size], batch, [PaddedLayerStep(i, attend) for i in range(layers)], self._tables)
            self._hidden.copy_in(model(step))
            if step.features is not None:
                self._features.copy_in(step.features)

        return run

    def kept(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states [T, hidden] of the last step's tokens, and what a draft model reads of them."""
        hidden, features = self._hidden.rows, self._features.rows
        assert hidden is not None, "no prefill step has run"
        return hidden[:tokens], (hidden if features is None else features)[:tokens]
