"""Requests whose grammars are being compiled: put aside by the engine's process, and queued once these are there."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.watching import engine, request
from server.tiny_model import write_tiny_model

from allotrope.engine.engine import Engine
from allotrope.engine.messages import LENGTH, Abort, Add, Changed, FromEngine, Sleep, Stepped, unpack_from_engine
from allotrope.engine.process import EngineProcess
from allotrope.grammars.llguidance_backend import LLGuidanceBackend
from allotrope.request import Grammar, SamplingParams

EOS = 1


class Aside:
    """An engine behind a process's loop, which compiles nothing until `go`."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine: Engine = engine(model, load_format="dummy")
        self.theirs, ours = socket.socketpair()
        self.process = EngineProcess(ours)
        self.go, self.compiled = threading.Event(), Counter[str]()
        plain = LLGuidanceBackend.compile

        def compile_later(backend: Any, grammar: Grammar) -> Any:
            self.go.wait(30)
            self.compiled[grammar.source] += 1
            return plain(backend, grammar)

        monkeypatch.setattr(LLGuidanceBackend, "compile", compile_later)

    def take(self, message: Any) -> None:
        self.process._take(self.engine, message)

    def heard(self) -> FromEngine:
        """The next message of the engine."""
        (size,) = LENGTH.unpack(self.theirs.recv(LENGTH.size, socket.MSG_WAITALL))
        return unpack_from_engine(self.theirs.recv(size, socket.MSG_WAITALL))

    def add(self, name: str) -> None:
        params = SamplingParams(max_tokens=20, grammar=Grammar("choice", f'["{name}"]'))
        self.take(Add(request(name, [9, 40], params, (EOS,))))


@pytest.fixture
def aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aside]:
    made = Aside(write_tiny_model(tmp_path), monkeypatch)
    yield made
    made.go.set()
    made.engine.close()


def test_no_grammar_is_compiled_twice(aside: Aside) -> None:
    """Not even one of so many at once that the first are kept no more when the last are asked for."""
    names = {f"r{number}" for number in range(80)}
    for name in names:
        aside.add(name)
    assert not aside.engine.requests and not aside.engine.has_work()
    aside.go.set()
    ended: dict[str, str | None] = {}
    while len(ended) < len(names):
        aside.process._turn(aside.engine)
        message = aside.heard()
        assert isinstance(message, Stepped), message
        ended |= {one.request_id: one.finish_reason for one in message.outputs if one.finish_reason}
    assert set(ended) == names and set(ended.values()) == {"stop"}
    assert set(aside.compiled.values()) == {1}


def test_the_engine_does_not_sleep_under_them(aside: Aside) -> None:
    aside.add("yes")
    aside.take(Sleep())
    refused = aside.heard()
    assert isinstance(refused, Changed) and "1 requests wait for their grammars" in str(refused.refusal)
    aside.take(Abort(["yes"]))
    aside.take(Sleep())
    assert aside.heard() == Changed()
    aside.go.set()
    # The grammar is there, and nobody wants it.
    aside.take(aside.process._inbox.get(timeout=30))
    assert not aside.engine.requests
