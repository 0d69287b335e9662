"""The server's side of the engine process: starts it, sends requests, hands outputs to whoever asked for them.

Must not know HTTP or text. When the engine process ends, for whatever reason, every open request fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from allotrope.config import EngineConfig
from allotrope.engine.messages import (
    COUNTS_SECONDS,
    LENGTH,
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
    unpack_from_engine,
)
from allotrope.engine.report import EngineLimits, EngineStats, ModelSummary
from allotrope.errors import AllotropeError, ConfigError, EngineDead, InvalidRequest, Overloaded
from allotrope.logs import one_line
from allotrope.request import Request, SequenceOutput

_REAP_SECONDS = 2.0
# Most outputs of a sequence that become one, and how far the caller is behind the engine when they do.
MAX_JOINED, JOIN_SECONDS = 16, 0.1
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from allotrope.engine.process import main; main(int(sys.argv[1]))"
)

# When the engine made it, and what came.
_Inbox = asyncio.Queue[tuple[float, SequenceOutput | AllotropeError]]


class EngineClient:
    """One engine process and the requests that are open in it.

    Making the object starts the process, which loads while the server imports its own packages; `start` waits for the
    model. `dead` is None until the process has ended, then the reason in one line. `summary`: the model and its memory,
    in a line each, once it is loaded.
    """

    def __init__(self, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        ours.sendall(pack(Start(config)))
        self._reap_seconds = _REAP_SECONDS + (0.0 if config.expert_load_file is None else COUNTS_SECONDS)
        self._socket = ours
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._open: dict[str, _Inbox] = {}
        # Sequences that the engine has not ended, by request; and since when it has said nothing that it owes.
        self._unended: dict[str, set[int]] = {}
        self._owed_since: float | None = None
        self._limits: EngineLimits | None = None
        self._model: ModelSummary | None = None
        self._stats = EngineStats()
        self.summary: tuple[str, ...] = ()
        self._failure: Failed | None = None
        # The sleep or wake that the engine has not answered.
        self._change: asyncio.Future[str | None] | None = None
        self._stopped = False
        self.dead: str | None = None
        self.died = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def limits(self) -> EngineLimits:
        """What the loaded model allows. Raises `RuntimeError` before `start` has returned."""
        if self._limits is None:
            raise RuntimeError("the engine's limits are known only after it has started")
        return self._limits

    @property
    def model(self) -> ModelSummary:
        """The loaded model and its memory. Raises `RuntimeError` before `start` has returned."""
        if self._model is None:
            raise RuntimeError("the model is known only after the engine has started")
        return self._model

    def stats(self) -> EngineStats:
        """Where the engine stood after its last step."""
        return self._stats

    @property
    def open_requests(self) -> int:
        """Prompts whose answers are not complete."""
        return len(self._open)

    @property
    def silent_seconds(self) -> float:
        """For how long the engine has ended no step although it has something to do; 0 where it has nothing."""
        return 0.0 if self._owed_since is None else time.monotonic() - self._owed_since

    async def start(self, on_progress: Callable[[str], None] = lambda phase: None) -> None:
        """Wait until the model is loaded and can generate.

        `on_progress`: called with each phase of the loading, in words.
        Raises `ConfigError` if the options cannot work, another `AllotropeError` if the model cannot be loaded.
        """
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        while self._limits is None:
            message = await _receive(reader)
            match message:
                case Progress(phase):
                    on_progress(phase)
                case Ready(limits, stats, summary, model):
                    self._limits, self._stats, self.summary, self._model = limits, stats, summary, model
                case Failed(kind, text):
                    raise (ConfigError if kind == "ConfigError" else AllotropeError)(text)
                case _:
                    raise EngineDead(f"{await self._how_it_ended()} while it was loading")
        self._listener = asyncio.create_task(self._listen(reader))

    async def generate(self, request: Request, *, join: bool = True) -> AsyncGenerator[SequenceOutput, None]:
        """Yield the outputs of all `request.params.n` sequences as they come, until each has ended.

        `join`: those of several steps may be one, see `_joined`, once the caller is `JOIN_SECONDS` behind the engine: a
        server that cannot keep up sends fewer, longer parts.

        Leaving early (closing the generator, or being cancelled) aborts the request in the engine.
        Raises `InvalidRequest` or `Overloaded` if the engine refuses it, `EngineDead` if the process ends.
        """
        if self.dead is not None:
            raise EngineDead(self.dead)
        inbox: _Inbox = asyncio.Queue()
        self._open[request.request_id] = inbox
        left = request.params.n
        self._unended[request.request_id] = set(range(left))
        try:
            self._send(Add(request))
            while left:
                made, item = await inbox.get()
                arrived = [item]
                while not inbox.empty():
                    arrived.append(inbox.get_nowait()[1])
                is_late = time.monotonic() - made > JOIN_SECONDS
                for item in _joined(arrived) if join and is_late else arrived:
                    if isinstance(item, AllotropeError):
                        left = 0
                        raise item
                    left -= item.finish_reason is not None
                    yield item
        finally:
            del self._open[request.request_id]
            if left:
                self.abort(request.request_id)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or only its sequence `index`, in whatever phase it is; nothing happens if it is not there."""
        self._ended(request_id, index)
        if self.dead is None:
            self._send(Abort([request_id]) if index is None else AbortSequence(request_id, index))

    async def sleep(self) -> None:
        """Free the device's memory until `wake`; see `Engine.sleep`. Raises `InvalidRequest` where it cannot be."""
        await self._ask(Sleep())

    async def wake(self) -> None:
        """End a sleep."""
        await self._ask(Wake())

    async def _ask(self, message: Sleep | Wake) -> None:
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self._change is not None:
            raise InvalidRequest("the engine is changing its state already.")
        self._change = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            refusal = await self._change
        finally:
            self._change = None
        if refusal is not None:
            raise InvalidRequest(refusal)

    async def stop(self) -> None:
        """End the process; open requests fail. May be called again."""
        self._stopped = True
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.close()
        if not await self._reaped():
            self._process.kill()
            await self._reaped()
        if self._listener is not None:
            self._listener.cancel()
            with suppress(asyncio.CancelledError):
                await self._listener

    def _send(self, message: ToEngine) -> None:
        if self._writer is None:
            raise RuntimeError("the engine has not been started")
        # The end of a step answers every message.
        if self._owed_since is None:
            self._owed_since = time.monotonic()
        self._writer.write(pack(message))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        reason = ""
        try:
            await self._deliver_all(reader)
            reason = await self._how_it_ended()
        except Exception as error:
            # The border of the process: a message that cannot be read leaves requests that nobody would answer.
            self._process.kill()
            reason = one_line(f"the engine process (pid {self.pid}) sent what cannot be read: {error!r}")
        finally:
            self.dead = reason or "it was stopped"
            for inbox in self._open.values():
                inbox.put_nowait((time.monotonic(), EngineDead(self.dead)))
            if self._change is not None and not self._change.done():
                self._change.set_exception(EngineDead(self.dead))
            self.died.set()

    async def _deliver_all(self, reader: asyncio.StreamReader) -> None:
        while (message := await _receive(reader)) is not None:
            match message:
                case Stepped(outputs, stats, made):
                    self._stats = stats
                    for output in outputs:
                        if output.finish_reason is not None:
                            self._ended(output.request_id, output.index)
                        self._deliver(output.request_id, output, made)
                case Refused(request_id, text, kind, param):
                    self._ended(request_id)
                    refusal = Overloaded(text) if kind == "overloaded" else InvalidRequest(text, param)
                    self._deliver(request_id, refusal, time.monotonic())
                case Changed(refusal):
                    if self._change is not None and not self._change.done():
                        self._change.set_result(refusal)
                case Failed():
                    self._failure = message
                case _:
                    raise RuntimeError(f"unexpected message from a running engine: {message}")
            self._owed_since = time.monotonic() if self._unended else None

    def _ended(self, request_id: str, index: int | None = None) -> None:
        """The engine owes nothing more for a request, or for its sequence `index`."""
        unended = self._unended.get(request_id, set())
        unended -= unended if index is None else {index}
        if not unended:
            self._unended.pop(request_id, None)

    def _deliver(self, request_id: str, item: SequenceOutput | AllotropeError, made: float) -> None:
        # A request that was just aborted may still have had outputs on their way.
        inbox = self._open.get(request_id)
        if inbox is not None:
            inbox.put_nowait((made, item))

    async def _how_it_ended(self) -> str:
        if self._stopped:
            return "it was stopped"
        name = f"the engine process (pid {self.pid})"
        if not await self._reaped():
            return f"{name} closed its connection"
        if self._failure is not None:
            return f"{name} failed: {self._failure.message}"
        status = self._process.returncode
        return f"{name} was killed by {_signal_name(-status)}" if status < 0 else f"{name} exited with status {status}"

    async def _reaped(self) -> bool:
        """Wait a little for the process to end; whether it has."""
        deadline = asyncio.get_running_loop().time() + self._reap_seconds
        while self._process.poll() is None:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True


def _joined(arrived: list[SequenceOutput | AllotropeError]) -> Iterator[SequenceOutput | AllotropeError]:
    """Outputs of a sequence that follow each other as one, up to `MAX_JOINED` of them.

    Log-probabilities would make long events, and counts of drafts belong to a step: outputs with these stay as they
    are, and so do failures.
    """
    run: list[SequenceOutput | AllotropeError] = []
    for item in arrived:
        if run and not (len(run) < MAX_JOINED and _joins(run[-1], item)):
            yield _as_one(run)
            run = []
        run.append(item)
    if run:
        yield _as_one(run)


def _joins(last: SequenceOutput | AllotropeError, item: SequenceOutput | AllotropeError) -> bool:
    """Whether an output goes on where the one before it ended, and neither has what belongs to its step."""
    if not isinstance(last, SequenceOutput) or not isinstance(item, SequenceOutput):
        return False
    plain = all(one.logprobs is None and not one.num_draft_tokens for one in (last, item))
    follows = last.index == item.index and last.finish_reason is None
    return plain and follows and item.finish_reason not in ("error", "abort")


def _as_one(run: list[SequenceOutput | AllotropeError]) -> SequenceOutput | AllotropeError:
    """`run`: a failure alone, or outputs that join."""
    outputs = [one for one in run if isinstance(one, SequenceOutput)]
    if len(outputs) < 2:
        return run[0]
    ids = tuple(itertools.chain.from_iterable(one.token_ids for one in outputs))
    first, last = outputs[0], outputs[-1]
    return replace(first, token_ids=ids, finish_reason=last.finish_reason, stop_reason=last.stop_reason)


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


async def _receive(reader: asyncio.StreamReader) -> FromEngine | None:
    try:
        header = await reader.readexactly(LENGTH.size)
        return unpack_from_engine(await reader.readexactly(LENGTH.unpack(header)[0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
