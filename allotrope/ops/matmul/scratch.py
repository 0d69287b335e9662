"""Memory of the programs of a product that add up their parts of a tile."""

from __future__ import annotations

import functools

import torch

# Numbers of all parts, and tiles, that there is room for.
PARTS, TILES = 9 << 20, 1 << 13


@functools.cache
def scratch(device: torch.device, overlap: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts, and arrivals, which are 0 between products: these follow each other, but for those that run beside others
    (`overlap`). Of one size for good, for graphs hold on to them.
    """
    return torch.empty(PARTS, device=device), torch.zeros(TILES, dtype=torch.int32, device=device)
