"""The HTTP server beneath the application: uvicorn with a bounded number of connections that have deadlines.

Owns uvicorn's configuration. It must not know routes.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from allotrope.config import ServerConfig
from allotrope.server.connection import Connection, Deadlines
from allotrope.server.descriptors import default_max_connections, raise_descriptor_limit
from allotrope.server.listener import Listener

_CLOSE_SECONDS = 1
_KEEP_ALIVE_SECONDS = 60


class HttpServer(uvicorn.Server):
    """Serves `app`. `serve(sockets)` runs until `should_exit` is set. The caller handles signals."""

    def __init__(self, app: object, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                log_config=None,
                access_log=False,
                log_level="warning",
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
            )
        )
        descriptors = raise_descriptor_limit()
        self.max_connections = config.max_connections or default_max_connections(descriptors)
        self._deadlines = Deadlines(config.header_timeout, config.body_timeout)
        self._listener: Listener | None = None

    @property
    def is_full(self) -> bool:
        """Whether the number of open connections exceeds the limit."""
        return len(self.server_state.connections) > self.max_connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept. asyncio's server has no limit of connections, and repeats one error thousands of times."""
        await self.lifespan.startup()
        self.servers = []
        connections: set[Connection] = self.server_state.connections  # type: ignore[assignment]
        self._listener = Listener(sockets or [], connections, self.max_connections, self._connection)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and close the open connections."""
        if self._listener is not None:
            self._listener.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals: the service decides when to stop."""
        yield

    def _connection(self) -> Connection:
        return Connection(
            self._deadlines, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
