"""The server's listening socket."""

from __future__ import annotations

import socket

from allotrope.config import ServerConfig
from allotrope.server.app import _listen


def test_small_chunks_of_a_stream_are_sent_at_once() -> None:
    """Nagle's algorithm holds a small segment back until the one before it is acknowledged, which clients delay."""
    with _listen(ServerConfig(port=0)) as listener, socket.create_connection(listener.getsockname()) as _:
        connection, _address = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
