"""The engine's own process: loads the model, then turns messages into steps until the server's end closes.

Must not know HTTP or text. The process ends by itself as soon as the server's process does, whatever it is doing.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from allotrope.engine.frozen_heap import frozen_heap
from allotrope.engine.messages import (
    COUNTS_SECONDS,
    Abort,
    AbortSequence,
    Add,
    Changed,
    Failed,
    FromEngine,
    Progress,
    Ready,
    Refused,
    Sleep,
    Start,
    Stepped,
    ToEngine,
    Wake,
    pack,
    receive,
)
from allotrope.env import spin_setting
from allotrope.errors import AllotropeError, InvalidRequest, Overloaded
from allotrope.logs import configure_logging, one_line
from allotrope.progress import show_progress
from allotrope.request import Request

if TYPE_CHECKING:
    from allotrope.config import EngineConfig
    from allotrope.engine.engine import Engine

log = logging.getLogger("allotrope.engine")

_ENDED_WITH_SERVER = 0
_FAILED = 1


@dataclass(frozen=True)
class _Compiled:
    """To the loop: the grammar of a request is compiled, or refused."""

    request: Request
    result: Future[Any]


@dataclass(frozen=True)
class _ServerEnded:
    """To the loop: nobody is left to answer."""


_Message = ToEngine | _Compiled | _ServerEnded


class EngineProcess:
    """The engine's side of the border: one socket, a thread that reads it, and the loop that steps.

    A request whose grammar is not compiled yet is put aside, not queued, so that nobody waits behind it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._compiling: dict[str, Request] = {}
        # The engine, if it counts the tokens of experts: it writes them when it is closed.
        self._counting: Engine | None = None

    def run(self) -> int:
        """Serve until the engine cannot go on; the exit status. Does not return when the server ends first."""
        start = receive(self._connection)
        if not isinstance(start, Start):
            return _ENDED_WITH_SERVER
        threading.Thread(target=self._read, name="messages", daemon=True).start()
        try:
            engine = self._load(start.config)
            self._counting = None if start.config.expert_load_file is None else engine
            report = engine.report()
            ready = Ready(
                limits=engine.limits, stats=engine.stats(), summary=report.summary(), model=report.model_summary()
            )
            self._send(ready)
            with frozen_heap():
                while True:
                    self._turn(engine)
        except (BrokenPipeError, ConnectionResetError):
            if self._counting is not None:
                self._counting.close()
            return _ENDED_WITH_SERVER
        except AllotropeError as error:
            self._send(Failed(kind=type(error).__name__, message=one_line(str(error))))
        except Exception as error:
            # The border of the process: whatever went wrong, the server must hear of it in one line.
            traceback.print_exc()
            self._send(Failed(kind="EngineDead", message=one_line(f"{type(error).__name__}: {error}")))
        return _FAILED

    def _load(self, config: EngineConfig) -> Engine:
        started = time.monotonic()
        self._send(Progress("importing the engine"))
        from allotrope.engine.engine import Engine
        from allotrope.kernels.warmup import report_late_kernels

        imported = time.monotonic()
        self._send(Progress(f"loading {config.model}"))
        engine = Engine(config, self._end)
        if engine.device.type == "cuda":
            # A capture between two steps would hold up whoever waits for the second one.
            self._send(Progress("capturing CUDA graphs"))
            engine.capture_all()
        # What is frozen from here on should be what is used.
        gc.collect()
        report_late_kernels(engine.device, log)
        log.info(
            "engine ready in %.1f s (imports %.1f s, model %.1f s)",
            time.monotonic() - started,
            imported - started,
            time.monotonic() - imported,
        )
        return engine

    def _turn(self, engine: Engine) -> None:
        """Take what has arrived (waiting where there is nothing else to do), then one step."""
        message: _Message | None = None if engine.has_work() else self._inbox.get()
        while True:
            if message is not None:
                self._take(engine, message)
            try:
                message = self._inbox.get_nowait()
            except Empty:
                break
        outputs = engine.step() if engine.has_work() else []
        self._send(Stepped(outputs=outputs, stats=engine.stats(), made=time.monotonic()))

    def _take(self, engine: Engine, message: _Message) -> None:
        match message:
            case Add(request):
                self._add(engine, request)
            case _Compiled(request, result):
                # It may have been aborted since, or even sent again under its id.
                if self._compiling.get(request.request_id) is request:
                    del self._compiling[request.request_id]
                    self._add(engine, request, result)
            case Abort(request_ids):
                for request_id in request_ids:
                    self._compiling.pop(request_id, None)
                engine.abort(request_ids)
            case AbortSequence(request_id, index):
                engine.abort_sequence(request_id, index)
            case Sleep():
                try:
                    if self._compiling:
                        raise InvalidRequest(f"{len(self._compiling)} requests wait for their grammars; try again.")
                    engine.sleep()
                    self._send(Changed())
                except InvalidRequest as error:
                    self._send(Changed(str(error)))
            case Wake():
                engine.wake()
                self._send(Changed())
            case _ServerEnded():
                raise BrokenPipeError
            case Start():
                raise RuntimeError("the server asked for a second start")

    def _add(self, engine: Engine, request: Request, compiled: Future[Any] | None = None) -> None:
        """Queue a request, or put it aside until its grammar is `compiled`, which may be a refusal."""
        try:
            if request.request_id in self._compiling:
                raise InvalidRequest(f"request_id={request.request_id!r} is already running.", "request_id")
            engine.check(request, len(self._compiling))
            if request.params.grammar is not None and compiled is None:
                compiled = engine.compile_grammar(request.params.grammar)
                if not compiled.done():
                    self._compiling[request.request_id] = request
                    compiled.add_done_callback(lambda result: self._inbox.put(_Compiled(request, result)))
                    return
            # What was compiled for it is handed on: among many grammars it may not be kept elsewhere.
            engine.add(request, None if compiled is None else compiled.result())
        except InvalidRequest as error:
            self._send(Refused(request.request_id, str(error), "invalid", error.param))
        except Overloaded as error:
            self._send(Refused(request.request_id, str(error), "overloaded"))

    def _end(self, reason: str) -> None:
        """Called, perhaps from a thread, when a rank has failed: no step will ever return."""
        self._send(Failed(kind="EngineDead", message=reason))
        os._exit(_FAILED)

    def _send(self, message: FromEngine) -> None:
        with self._sending:
            self._connection.sendall(pack(message))

    def _read(self) -> None:
        while (message := receive(self._connection)) is not None:
            self._inbox.put(message)
        if self._counting is not None:
            # The loop ends the process once the counts are written.
            self._inbox.put(_ServerEnded())
            time.sleep(COUNTS_SECONDS)
        # Nobody is left to answer. A step may run for seconds, so this does not wait for the loop to notice.
        os._exit(_ENDED_WITH_SERVER)


def main(descriptor: int) -> None:
    """Run the engine behind the socket `descriptor`; the entry point of the child process."""
    # A terminal's Ctrl-C and a supervisor's SIGTERM reach the whole group: the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging()
    show_progress()
    os.environ.update(spin_setting())
    os.set_inheritable(descriptor, False)
    sys.exit(EngineProcess(socket.socket(fileno=descriptor)).run())
