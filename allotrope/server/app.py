"""Lifecycle of the server: open the port, load, serve, then drain on a signal, or exit if the engine ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import signal
import socket
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import allotrope
from allotrope.config import EngineConfig, ServerConfig
from allotrope.errors import AllotropeError, ConfigError
from allotrope.logs import configure_logging, one_line

if TYPE_CHECKING:
    from allotrope.engine.client import EngineClient
    from allotrope.server.state import ServerState
    from allotrope.text.tokenizer import Tokenizer

log = logging.getLogger("allotrope.server")

_PACKAGES = ("fastapi", "msgspec", "prometheus_client", "pydantic", "uvicorn")
_STOPPED, _FAILED = 0, 1
# After the engine's end, open requests get this long to send their error. The process must exit within 5 s.
_ERROR_ANSWER_SECONDS = 2.0
_BACKLOG = 2048


def serve(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve until a signal or the engine's end. Returns the exit status: 0 after a signal, 1 after a failure.

    Raises `ConfigError` if the server cannot listen on the address, or a package of the server is missing.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the server needs {', '.join(missing)}. Run: pip install 'allotrope[server]'")
    from allotrope.engine.client import EngineClient
    from allotrope.server.log_limiter import limit_repeated_errors

    configure_logging()
    limit_repeated_errors()
    listener = _listen(server)
    # EngineClient starts the engine's process now, so that both processes import their packages at the same time.
    return asyncio.run(_Service(engine, server, listener, EngineClient(engine)).run())


def _listen(config: ServerConfig) -> socket.socket:
    try:
        (family, *_, address), *_ = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit TCP_NODELAY. Without it the first token waits 40 ms for the client's delayed
        # acknowledgement of the headers. asyncio sets it only if the socket names its protocol.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        # The socket listens before the model is loaded, so that the address is reserved and early clients wait.
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on host={config.host} port={config.port}: {error.strerror}. "
            "Choose another with --host or --port (0 takes a free port)."
        ) from error
    return listener


class _Service:
    """One run of the server, from the open port to the exit status."""

    def __init__(
        self, engine: EngineConfig, server: ServerConfig, listener: socket.socket, client: EngineClient
    ) -> None:
        from allotrope.server.api import build_app
        from allotrope.server.http_server import HttpServer
        from allotrope.server.state import ServerState

        self._engine_config = engine
        self._config = server
        self._listener = listener
        self._client = client
        self._state: ServerState = ServerState(server, server.served_model_name or (engine.model,))
        self._http = HttpServer(build_app(self._state), server)
        self._state.is_full = lambda: self._http.is_full
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve, and return the exit status."""
        with self._signal_handlers():
            accepting = asyncio.create_task(self._http.serve(sockets=[self._listener]))
            log.info(
                "listening on %s; engine process %d loads %s",
                self._address(),
                self._client.pid,
                self._engine_config.model,
            )
            try:
                return await self._serve_until_end(accepting)
            finally:
                self._http.should_exit = True
                await accepting
                await self._client.stop()

    async def _serve_until_end(self, accepting: asyncio.Task[None]) -> int:
        loading = asyncio.create_task(self._load())
        if not await self._ends_before_stop(loading, accepting):
            loading.cancel()
            log.info("stopped while loading")
            return _STOPPED
        try:
            loading.result()
        except AllotropeError as error:
            log.error("cannot serve: %s", one_line(str(error)))
            return _FAILED
        print("\n".join((*self._client.summary, self._ready_message())), flush=True)
        died = asyncio.create_task(self._client.died.wait())
        if await self._ends_before_stop(died, accepting):
            return await self._end_with_engine()
        return await self._drain(died)

    async def _ends_before_stop(self, task: asyncio.Task[Any], accepting: asyncio.Task[None]) -> bool:
        """Wait for `task` or a stop signal. Returns whether the task ended. Raises if the HTTP server failed."""
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop, accepting}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if accepting.done():
            accepting.result()
        return task.done()

    async def _load(self) -> None:
        """Load tokenizer and model concurrently, then accept requests. Raises `AllotropeError` if either fails."""
        from allotrope.engine.sampling_defaults import describe_defaults
        from allotrope.server.metrics import Metrics
        from allotrope.server.prompts import PromptReader
        from allotrope.server.state import Phase, Serving

        tokenizing = asyncio.create_task(asyncio.to_thread(_load_tokenizer, self._engine_config))
        starting = asyncio.create_task(self._client.start(self._note))
        try:
            template = _read_template(self._config)
            await asyncio.gather(starting, tokenizing)
        finally:
            starting.cancel()
        (tokenizer, max_token_bytes), limits = tokenizing.result(), self._client.limits
        if limits.sampling_defaults:
            log.warning("%s", describe_defaults(limits.sampling_defaults))
        self._state.serving = Serving(
            engine=self._client,
            options=self._engine_config,
            tokenizer=tokenizer,
            prompts=PromptReader(tokenizer, limits.max_model_len, max_token_bytes, template),
            metrics=Metrics(self._state.model_name, self._client.stats, self._config.metrics_compat),
            limits=limits,
            max_sequences=self._engine_config.max_num_waiting,
            eos_ids=tuple(i for i in dict.fromkeys(limits.eos_ids + tokenizer.eos_ids) if i < limits.vocab_size),
        )
        self._state.phase = Phase.SERVING

    def _note(self, phase: str) -> None:
        self._state.detail = phase
        log.info("engine: %s", phase)

    async def _end_with_engine(self) -> int:
        from allotrope.server.state import Phase

        reason = self._client.dead or "unknown"
        self._state.phase, self._state.detail = Phase.DEAD, reason
        log.error("ending, because %s", reason)
        await self._state.idle(_ERROR_ANSWER_SECONDS)
        return _FAILED

    async def _drain(self, died: asyncio.Task[object]) -> int:
        from allotrope.server.state import Phase

        self._state.phase = Phase.DRAINING
        log.info("stopping; open requests get %g s to finish", self._config.drain_timeout)
        self._stop.clear()
        idle = asyncio.create_task(self._state.idle(self._config.drain_timeout))
        again = asyncio.create_task(self._stop.wait())
        await asyncio.wait({idle, died, again}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if died.done():
            return await self._end_with_engine()
        if not (idle.done() and idle.result()):
            idle.cancel()
            log.warning("stopping with requests still open; they are dropped")
            await self._client.stop()
            await self._state.idle(_ERROR_ANSWER_SECONDS)
        return _STOPPED

    def _ready_message(self) -> str:
        """The server's address and an example request."""
        serving = self._state.serving
        assert serving is not None
        chats = serving.prompts.chats
        prompt = {"messages": [{"role": "user", "content": "Hello"}]} if chats else {"prompt": "Hello"}
        body = json.dumps({"model": self._state.model_name, **prompt})
        key = ' -H "Authorization: Bearer $ALLOTROPE_API_KEY"' if self._config.api_key else ""
        route = "chat/completions" if chats else "completions"
        return (
            f"Allotrope {allotrope.__version__} serves {self._state.model_name} at {self._address()}/v1, "
            f"with a page for browsers at {self._address()}/, for example: "
            f"curl {self._address()}/v1/{route} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
        )

    def _address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        # Python delivers signals to the main thread only. In another thread, the caller stops the server itself.
        signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        loop = asyncio.get_running_loop()
        for number in signals:
            loop.add_signal_handler(number, self._stop.set)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def _load_tokenizer(config: EngineConfig) -> tuple[Tokenizer, int]:
    """The tokenizer and the byte length of its longest token. The search over a large vocabulary takes a while."""
    from allotrope.checkpoint.hub import find_snapshot
    from allotrope.text.tokenizer import load_tokenizer

    path = config.tokenizer or config.model
    if not Path(path).expanduser().exists():
        revision = config.revision if config.tokenizer is None else None
        path = str(find_snapshot(path, revision, with_weights=False))
    tokenizer = load_tokenizer(path)
    return tokenizer, max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))


def _read_template(config: ServerConfig) -> str | None:
    from allotrope.text.chat import read_chat_template

    return None if config.chat_template is None else read_chat_template(config.chat_template)
