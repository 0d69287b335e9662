"""A worker process: a child of this process that runs one rank of an engine, and then, if it is kept, of the next.

Owns its start and end, and what it is handed for a rank. Must not know what a rank computes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self

from allotrope.env import spin_setting

_BOOT = (
    "from allotrope.engine.ranks.lifeline import end_with_parent; end_with_parent({lifeline}, {parent}); "
    "from allotrope.engine.ranks.worker_loop import run_worker_process; run_worker_process({control})"
)
_RANK = struct.Struct("<q")
_RELEASED = b"released"


@dataclass(frozen=True)
class Assignment:
    """What a worker process is handed for a rank, as descriptors: `messages` of its socket to rank 0, `steps` of the
    ring of steps, `board` of the rank board."""

    rank: int
    messages: int
    steps: int
    board: int

    def send(self, control: socket.socket) -> None:
        """Hand it to the process at the other end, which gets descriptors of its own."""
        socket.send_fds(control, [_RANK.pack(self.rank)], [self.messages, self.steps, self.board])

    @classmethod
    def receive(cls, control: socket.socket) -> Self | None:
        """Wait for the next one; None where there will be none."""
        data, descriptors, _, _ = socket.recv_fds(control, _RANK.size, 3)
        if not data:
            return None
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return cls(*_RANK.unpack(data), *descriptors)


class WorkerProcess:
    """Started at once. It has no rank yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._on_end: Callable[[int], None] | None = None
        self._status: int | None = None
        lifeline, its_lifeline = socket.socketpair()
        control, its_control = socket.socketpair()
        self._lifeline, self._control = lifeline, control
        descriptors = (its_lifeline.fileno(), its_control.fileno())
        boot = _BOOT.format(lifeline=descriptors[0], control=descriptors[1], parent=os.getpid())
        started: Future[subprocess.Popen[bytes]] = Future()
        given = ([sys.executable, "-c", boot], descriptors, started)
        self._waiting = threading.Thread(target=self._run, args=given, name="worker process", daemon=True)
        self._waiting.start()
        with its_lifeline, its_control:
            self._process = started.result()

    @property
    def id(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    @property
    def waits(self) -> bool:
        """Whether it is there to run another rank, once it has let go of one."""
        try:
            # Nothing is sent meanwhile; the end of a process closes its socket.
            self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def watch(self, on_end: Callable[[int], None] | None) -> None:
        """Call `on_end` with the status of the process when it ends, from another thread; None: no longer."""
        with self._lock:
            self._on_end, status = on_end, self._status
        if on_end is not None and status is not None:
            threading.Thread(target=on_end, args=(status,), name="worker process", daemon=True).start()

    def assign(self, assignment: Assignment) -> None:
        """Let it run a rank."""
        # Who watches it hears if it has ended.
        with contextlib.suppress(OSError):
            assignment.send(self._control)

    def released(self, seconds: float) -> bool:
        """Whether it has let go of its rank, which takes as long at most; then it waits for another."""
        self._control.settimeout(seconds)
        try:
            return self._control.recv(len(_RELEASED)) == _RELEASED
        except OSError:
            return False
        finally:
            self._control.settimeout(None)

    def let_go(self) -> None:
        """Ask it to end."""
        for end in (self._lifeline, self._control):
            with contextlib.suppress(OSError):
                # Also where a process that was forked from this one holds a copy.
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def kill(self) -> None:
        """End it at once, also if it is stopped."""
        self._process.kill()

    def end(self) -> None:
        """End it where it has no rank: it has nothing to let go of."""
        self.let_go()
        self.kill()

    def wait(self, seconds: float) -> None:
        """Wait for its end, and for what follows from that where it is watched, no longer than that."""
        self._waiting.join(seconds)

    def _run(self, command: list[str], descriptors: tuple[int, ...], started: Future[subprocess.Popen[bytes]]) -> None:
        """Start a process and wait for its end; it would not outlive this thread, see `end_with_parent`."""
        try:
            # The worker is a process of ours, whatever this one's threads do while they wait.
            process = subprocess.Popen(command, pass_fds=descriptors, env=os.environ | spin_setting())
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        status = process.wait()
        with self._lock:
            self._status, on_end = status, self._on_end
        if on_end is not None:
            on_end(status)


class KeptProcesses:
    """Worker processes that wait for the next engine, by the rank that they ran."""

    def __init__(self) -> None:
        self._waiting: dict[int, WorkerProcess] = {}

    def put(self, rank: int, process: WorkerProcess) -> None:
        """Keep a process that has let go of its rank."""
        process.watch(None)
        self._waiting[rank] = process

    def take(self, rank: int) -> WorkerProcess | None:
        """A process that ran `rank` before, on its GPU; None if none waits."""
        found = self._waiting.pop(rank, None)
        if found is None or found.waits:
            return found
        found.end()
        return None

    def end(self) -> None:
        """End all of them."""
        for process in self._waiting.values():
            process.end()
        self._waiting.clear()


_kept: KeptProcesses | None = None


def kept_processes() -> KeptProcesses | None:
    """Where the processes of an engine that is closed are kept; None where they end with it."""
    return _kept


@contextlib.contextmanager
def keep_worker_processes() -> Iterator[None]:
    """Inside, engines of several ranks take over the worker processes of those that were closed before. Blocks inside
    others share theirs.

    A new process imports libraries and loads every kernel anew, which takes longer than the engine's own start.
    """
    global _kept
    if _kept is not None:
        yield
        return
    _kept = KeptProcesses()
    try:
        yield
    finally:
        _kept.end()
        _kept = None


def announce_release(control: socket.socket) -> None:
    """Tell the parent that this worker process has let go of its rank."""
    control.sendall(_RELEASED)
