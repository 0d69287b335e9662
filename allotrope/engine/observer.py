"""A look into the engine while it runs: every token's logits, and tokens of one's own choice in place of its."""

from __future__ import annotations

from typing import Protocol

import torch


class Observer(Protocol):
    """What `verify` and tests plug into an engine; serving runs without."""

    def logits(self, request_id: str, index: int, start: int, logits: torch.Tensor) -> None:
        """`logits`: [n, vocabulary] fp32, what follows the tokens at positions `start`, `start + 1`, ..."""
        ...

    def token(self, request_id: str, index: int, chosen: int) -> int:
        """The token to go on with, where the engine chose `chosen`."""
        ...
