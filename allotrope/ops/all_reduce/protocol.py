"""Which protocol sends a message: the one that is estimated to be the fastest.

    LL        2 (n - 1) m / b
    one-shot    (n - 1) m / b + s
    two-shot  2 (n - 1) m / (n b) + 2 s

for n ranks and m bytes, with b the bytes per second of a rank's links one way and s a fence with the flag that follows.
An estimate, not a table measured when the ranks start: a measurement would have to wait until three kernels are
compiled, and starts would differ from each other. `bench/all_reduce.py` times each protocol beside the chosen one.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from allotrope.kernels.symmetric_memory import Layout
from allotrope.kernels.tiles import cdiv

FLAT_BYTES = 4096
"""Bytes of a row of a sum that no norm follows: it has no rows of its own."""

# NVLink of 18 links, and a fence over it.
BYTES_PER_US = 3.5e5
SYNC_US = 2.5


class Protocol(Enum):
    """How a message is sent; `triton.py` says more."""

    LL = "ll"
    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"


ROWS_PROTOCOLS = (Protocol.LL, Protocol.ONE_SHOT)
"""Of messages that are not summed for all ranks: gathers and reduce-scatters."""


def fits(protocol: Protocol, layout: Layout, rows: int, row_bytes: int) -> bool:
    """Whether a message of `rows` rows has room."""
    if protocol is Protocol.LL:
        return rows <= layout.slots and 2 * row_bytes <= layout.chunk * 8
    if protocol is Protocol.ONE_SHOT:
        return layout.ranks * cdiv(rows, layout.programs) * row_bytes <= layout.arena
    return row_bytes <= layout.row


def estimate(protocol: Protocol, ranks: int, size: int, bytes_per_us: float = BYTES_PER_US) -> float:
    """Microseconds that `size` bytes take beyond what all protocols share. `bytes_per_us`: of the links, one way."""
    sent = (ranks - 1) * size / bytes_per_us
    if protocol is Protocol.LL:
        return 2 * sent
    if protocol is Protocol.ONE_SHOT:
        return sent + SYNC_US
    return 2 * sent / ranks + 2 * SYNC_US


def choose_protocol(
    layout: Layout, rows: int, row_bytes: int, among: Iterable[Protocol] = tuple(Protocol)
) -> Protocol | None:
    """The protocol of a message, one of `among`; None: there is no room by any of them."""
    possible = [one for one in among if fits(one, layout, rows, row_bytes)]
    return min(possible, key=lambda one: estimate(one, layout.ranks, rows * row_bytes), default=None)
