"""How many tiles, and how wide: the arithmetic of launches on the host.

Triton's functions of these names serve kernels as well, and take microseconds a call: several of them stand before each
of the hundreds of launches of a step that is not a graph.
"""

from __future__ import annotations


def cdiv(size: int, tile: int) -> int:
    """Tiles that `size` takes."""
    return -(-size // tile)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is not below `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0
