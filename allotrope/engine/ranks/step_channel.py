"""How packed steps reach the worker processes: through a ring of shared memory, with a short message for each step.

Owns the ring and the order in which it is written and read. Must not know what a step holds.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch

from allotrope.engine.packed_step import PackedStep, Words
from allotrope.engine.ranks.shared_memory import create_shared_memory

RING_WORDS = 1 << 23
"""Words of the ring, 64 MiB: several steps of many requests. Longer steps go through it in parts."""

_HEADER = struct.Struct("<qq")
_POLL_SECONDS = 50e-6
# Words before the ring itself: one for each rank, apart by a cache line.
_STRIDE = 8


class Command(enum.Enum):
    """What a rank is told beside steps, in their order: to capture its next graph; on the first of several pipeline
    stages, to finish a step; to let go of the model, and wait for the next engine."""

    CAPTURE = -1
    FINISH = -2
    RELEASE = -3


class Ring:
    """Shared memory that one process writes and `readers` others read, in order.

    A reader counts the words that it has read; the writer overwrites none that a reader has yet to read.
    """

    def __init__(self, descriptor: int, readers: int, words: int = RING_WORDS) -> None:
        """`descriptor`: of `Ring.create`, in this process. The ring owns it."""
        self.descriptor, self.words = descriptor, words
        self._control = readers * _STRIDE
        self._map = mmap.mmap(descriptor, (self._control + words) * 8)
        shared = np.frombuffer(self._map, dtype=np.int64)
        self.read_counts: Words = shared[: self._control : _STRIDE]
        self._ring: Words = shared[self._control :]

    @staticmethod
    def create(readers: int, words: int = RING_WORDS) -> int:
        """A descriptor of shared memory for a ring: zeros."""
        return create_shared_memory((readers * _STRIDE + words) * 8)

    def copy_in(self, words: Words, at: int) -> None:
        """Write `words`, no more than the ring has, as words `at` and on of all that were ever written."""
        start = at % self.words
        first = min(len(words), self.words - start)
        self._ring[start : start + first] = words[:first]
        self._ring[: len(words) - first] = words[first:]

    def copy_out(self, target: Words, at: int) -> None:
        """Fill `target` with the words that `copy_in` wrote at `at`."""
        start = at % self.words
        first = min(len(target), self.words - start)
        target[:first] = self._ring[start : start + first]
        target[first:] = self._ring[: len(target) - first]

    def close(self) -> None:
        """Let go of the memory."""
        del self.read_counts, self._ring
        self._map.close()
        os.close(self.descriptor)


class StepSender:
    """Rank 0's end. `connections`: one for each reader."""

    def __init__(self, ring: Ring, connections: list[Connection]) -> None:
        self._ring, self._connections = ring, connections
        self._written = 0

    def send(self, packed: PackedStep, check: Callable[[], object]) -> None:
        """Let every reader have the step. Waits where a reader is a whole ring behind; `check` is called meanwhile, and
        may raise.
        """
        words = packed.words.numpy()
        # Halves, so that readers copy one part while the next is written.
        part = self._ring.words // 2
        for start in range(0, len(words), part):
            chunk = words[start : start + part]
            while self._written + len(chunk) - int(self._ring.read_counts.min()) > self._ring.words:
                check()
                time.sleep(_POLL_SECONDS)
            self._ring.copy_in(chunk, self._written)
            self._written += len(chunk)
            self._announce(len(words) - start, len(chunk))

    def command(self, command: Command) -> None:
        """Tell every reader, in the order of the steps."""
        self._announce(command.value, 0)

    def _announce(self, left: int, words: int) -> None:
        # A system call on either side orders what was written before with what is read after.
        message = _HEADER.pack(left, words)
        for connection in self._connections:
            connection.send_bytes(message)


class StepReceiver:
    """The end of reader `reader`. `pinned`: steps are sent on to a GPU."""

    def __init__(self, ring: Ring, reader: int, connection: Connection, *, pinned: bool) -> None:
        self._ring, self._reader, self._connection, self._pinned = ring, reader, connection, pinned
        self._read = 0

    def receive(self) -> PackedStep | Command:
        """Wait for the next step or command. Raises EOFError once rank 0 has let go."""
        left, count = self._next()
        if left < 0:
            return Command(left)
        words = torch.empty(left, dtype=torch.int64, pin_memory=self._pinned)
        target, start = words.numpy(), 0
        while True:
            self._ring.copy_out(target[start : start + count], self._read)
            start, self._read = start + count, self._read + count
            self._ring.read_counts[self._reader] = self._read
            if start == len(target):
                return PackedStep(words)
            _, count = self._next()

    def _next(self) -> tuple[int, int]:
        left, count = _HEADER.unpack(self._connection.recv_bytes())
        return left, count
