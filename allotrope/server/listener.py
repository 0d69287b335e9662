"""Accepts a bounded number of connections, so that a flood of them cannot use up the file descriptors.

Owns which connections are accepted and which are closed for new ones. It must not know HTTP: a connection says itself
since when it waits for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection

from allotrope.server.connection import Connection
from allotrope.server.descriptors import SPARE_CONNECTIONS

log = logging.getLogger("allotrope.server")

_BATCH = 64
_CHECK_SECONDS = 0.25
_FULL_SECONDS = 0.05
_FAILED_SECONDS = 0.5
# A younger connection may have sent a request that the server has not read yet.
_YOUNG_SECONDS = 1.0
# A full server closes up to 1/16 of its connections at once, so that a flood does not cause a search for each one.
_SHARE = 16
_TCP_KEEP_ALIVE_SECONDS = 30


class Listener:
    """Accepts connections from `sockets` while there is room.

    `connections`: the open connections, which enter and leave this set themselves. `limit`: their largest number;
    `SPARE_CONNECTIONS` more are accepted and get an error. `make`: makes the protocol of a new connection. At the
    limit, new connections replace those that are idle or have sent no complete request for a second, the
    longest-waiting first.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        connections: Collection[Connection],
        limit: int,
        make: Callable[[], Connection],
    ) -> None:
        self._sockets = sockets
        self._connections = connections
        self._limit = limit
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._checks = self._loop.create_task(self._check())
        self._retries: dict[socket.socket, asyncio.TimerHandle] = {}
        for each in sockets:
            each.setblocking(False)
            self._resume(each)

    def close(self) -> None:
        """Stop accepting. Open connections stay open."""
        self._checks.cancel()
        for retry in self._retries.values():
            retry.cancel()
        for each in self._sockets:
            self._loop.remove_reader(each)

    def _resume(self, listening: socket.socket) -> None:
        self._loop.add_reader(listening, self._accept, listening)

    def _pause(self, listening: socket.socket, seconds: float) -> None:
        self._loop.remove_reader(listening)
        self._retries[listening] = self._loop.call_later(seconds, self._resume, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_BATCH):
            count = len(self._connections) + len(self._opening)
            if count >= self._limit and self._close_waiting():
                # The event loop removes the closed connections in its next iteration, which calls `_accept` again.
                return
            if count >= self._limit + SPARE_CONNECTIONS:
                self._pause(listening, _FULL_SECONDS)
                return
            try:
                client, _address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("cannot accept a connection: %s", error.strerror)
                self._pause(listening, _FAILED_SECONDS)
                return
            task = self._loop.create_task(self._open(client))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, client: socket.socket) -> None:
        client.setblocking(False)
        _keep_alive(client)
        try:
            await self._loop.connect_accepted_socket(self._make, client)
        except OSError as error:
            client.close()
            log.error("cannot open a connection: %s", error.strerror)

    def _close_waiting(self) -> bool:
        """Close some connections that wait for a request. Returns whether there were any."""
        oldest = self._loop.time() - _YOUNG_SECONDS
        waiting = [(since, each) for each in self._connections if (since := each.waits_since) is not None]
        closable = sorted((pair for pair in waiting if pair[0] < oldest), key=lambda pair: pair[0])
        closed = closable[: max(1, self._limit // _SHARE)]
        for _since, each in closed:
            each.transport.abort()
        if closed:
            log.error(
                "%d connections are open (--max-connections %d): closed %d that had sent no complete request",
                len(self._connections),
                self._limit,
                len(closed),
            )
        return bool(closed)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = self._loop.time()
            for each in list(self._connections):
                each.check(now)


def _keep_alive(client: socket.socket) -> None:
    """Turn TCP keep-alive on: it detects lost clients, and keeps routers from dropping connections that wait."""
    with contextlib.suppress(OSError, AttributeError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _TCP_KEEP_ALIVE_SECONDS)
