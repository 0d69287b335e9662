"""Observers see the logits of every token while the engine runs, and may replace the tokens it samples."""

from __future__ import annotations

from typing import Protocol

import torch


class Observer(Protocol):
    """`verify` and tests give one to an engine; serving runs without."""

    def logits(self, request_id: str, index: int, start: int, logits: torch.Tensor) -> None:
        """`logits`: [n, vocabulary] fp32, those after the tokens at positions `start`, `start + 1`, ..."""
        ...

    def token(self, request_id: str, index: int, chosen: int) -> int:
        """The token to go on with, where the engine sampled `chosen`."""
        ...
