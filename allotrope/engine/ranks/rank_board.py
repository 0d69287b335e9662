"""The rank board: what each rank shows the others, in one small block of memory that all of them map.

Owns the layout. The block has no name, so nothing is left of it when the last process that maps it has ended.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from allotrope.engine.ranks.shared_memory import create_shared_memory

STARTING, JOINING, LOADED = range(3)
_WORDS = ("process", "heartbeat", "progress", "phase", "compiling", "waits", "failed_at", "follows")
_SIGNS = ("process", "heartbeat", "progress", "phase", "compiling", "waits")


@dataclass(frozen=True)
class Signs:
    """The signs of life of a rank, for a board on another host: words of its `RankRow`."""

    process: int
    heartbeat: int
    progress: int
    phase: int
    compiling: int
    waits: int
    place: str


class RankRow(ctypes.Structure):
    """One rank's part of the board, which only this rank writes.

    `process`: its process id. `heartbeat`: grows while the process runs. `progress`: grows when a step begins and when
    it ends, so it is odd within a step. `phase`: `STARTING`, `JOINING` or `LOADED`. `compiling`: 1 while a kernel
    compiles. `waits`: 1 where a long step waits in a collective or for a GPU. `failed_at`: when the rank failed, 0
    before. `follows`: 1 where it failed in a collective, which may be another rank's fault. `place`: where a long step
    is. `host`: the address of the rank's host, empty for this one. `error`: why the rank failed.
    """

    _fields_ = (
        *((word, ctypes.c_uint64) for word in _WORDS),
        ("_place", ctypes.c_char * 256),
        ("_host", ctypes.c_char * 256),
        ("_error", ctypes.c_char * 8192),
    )

    process: int
    heartbeat: int
    progress: int
    phase: int
    compiling: int
    waits: int
    failed_at: int
    follows: int
    _place: bytes
    _host: bytes
    _error: bytes

    @property
    def place(self) -> str:
        return self._place.decode(errors="replace")

    @place.setter
    def place(self, text: str) -> None:
        self._place = _cut(text, 255)

    @property
    def host(self) -> str:
        return self._host.decode(errors="replace")

    @host.setter
    def host(self, text: str) -> None:
        self._host = _cut(text, 255)

    @property
    def error(self) -> str:
        return self._error.decode(errors="replace")

    def fail(self, error: str, *, follows: bool) -> None:
        """Show that the rank failed; see `follows` and `error`."""
        self._error, self.follows = _cut(error, 8191), int(follows)
        # Last: who sees the time sees the text.
        self.failed_at = time.monotonic_ns()

    @property
    def signs(self) -> Signs:
        """What other ranks watch."""
        return Signs(*(getattr(self, word) for word in (*_SIGNS, "place")))

    @signs.setter
    def signs(self, signs: Signs) -> None:
        for word in (*_SIGNS, "place"):
            setattr(self, word, getattr(signs, word))

    @property
    def in_step(self) -> bool:
        return self.progress % 2 == 1


class RankBoard:
    """`rows`: one for each rank. `descriptor`: of the block; the board owns it from now on."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        size = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, size)
        self.rows = cast(Sequence[RankRow], (RankRow * (size // ctypes.sizeof(RankRow))).from_buffer(self._memory))

    @property
    def descriptor(self) -> int:
        """The descriptor of the block, which a process that joins is passed."""
        return self._file.fileno()

    @staticmethod
    def make(size: int) -> RankBoard:
        """A board for `size` ranks."""
        return RankBoard(create_shared_memory(size * ctypes.sizeof(RankRow)))

    def close(self) -> None:
        """Close the file. The rows stay as long as somebody holds them."""
        self._file.close()


def _cut(text: str, length: int) -> bytes:
    return text.replace("\0", " ").encode(errors="replace")[:length]
