"""The messages between the server's process and the engine's, and how they lie on the wire.

A frame is a 4-byte little-endian length and that many bytes of msgpack. The end of the stream means that the other
process has ended. Must not know what either side does with a message.
"""

from __future__ import annotations

import socket
import struct
from typing import Literal

import msgspec

from allotrope.config import EngineConfig
from allotrope.engine.report import EngineLimits, EngineStats, ModelSummary
from allotrope.request import Request, SequenceOutput

RefusalKind = Literal["invalid", "overloaded"]

COUNTS_SECONDS = 10.0
"""What an engine that counts the tokens of experts has to write them, once the server has ended."""

LENGTH = struct.Struct("<I")
_CHUNK = 1 << 20


class Start(msgspec.Struct, tag=True):
    """To the engine, first and once: load this model."""

    config: EngineConfig


class Add(msgspec.Struct, tag=True):
    """To the engine: queue a request. Answered by outputs, or by `Refused`."""

    request: Request


class Abort(msgspec.Struct, tag=True):
    """To the engine: drop these requests in whatever phase they are. Unknown ids are ignored."""

    request_ids: list[str]


class AbortSequence(msgspec.Struct, tag=True):
    """To the engine: drop one sequence of a request. Unknown ids are ignored."""

    request_id: str
    index: int


class Sleep(msgspec.Struct, tag=True):
    """To the engine: free the device's memory, see `Engine.sleep`. Answered by `Changed`."""


class Wake(msgspec.Struct, tag=True):
    """To the engine: end a sleep. Answered by `Changed`."""


class Progress(msgspec.Struct, tag=True):
    """From the engine while it loads: the phase that begins."""

    phase: str


class Ready(msgspec.Struct, tag=True):
    """From the engine, once: the model is loaded. `summary`: the model and its memory, in a line each. `model`: the
    same as figures."""

    limits: EngineLimits
    stats: EngineStats
    summary: tuple[str, ...]
    model: ModelSummary


class Failed(msgspec.Struct, tag=True):
    """From the engine, last: the reason that it ends. `kind` is the name of the error's class."""

    kind: str
    message: str


class Refused(msgspec.Struct, tag=True):
    """From the engine: a request that was not queued.

    `kind`: "invalid" for one that can never run, "overloaded" for one that finds the queue full. `param`: the field at
    fault.
    """

    request_id: str
    message: str
    kind: RefusalKind
    param: str | None = None


class Changed(msgspec.Struct, tag=True):
    """From the engine after `Sleep` or `Wake`. `refusal`: why nothing was done, or None."""

    refusal: str | None = None


class Stepped(msgspec.Struct, tag=True):
    """From the engine after each step: its outputs and its counts. `made`: seconds of `time.monotonic`, which both
    processes share."""

    outputs: list[SequenceOutput]
    stats: EngineStats
    made: float = 0.0


ToEngine = Start | Add | Abort | AbortSequence | Sleep | Wake
FromEngine = Progress | Ready | Failed | Refused | Changed | Stepped

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def pack(message: ToEngine | FromEngine) -> bytes:
    """`message` as one frame."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def unpack_from_engine(body: bytes) -> FromEngine:
    """The message in a frame's body (the bytes after its length)."""
    return _from_engine.decode(body)


def receive(connection: socket.socket) -> ToEngine | None:
    """Wait for the next message to the engine; None where the other process has ended."""
    header = _read(connection, LENGTH.size)
    body = None if header is None else _read(connection, LENGTH.unpack(header)[0])
    return None if body is None else _to_engine.decode(body)


def _read(connection: socket.socket, size: int) -> bytearray | None:
    data = bytearray()
    while len(data) < size:
        try:
            piece = connection.recv(min(size - len(data), _CHUNK))
        except ConnectionError:
            return None
        if not piece:
            return None
        data += piece
    return data
