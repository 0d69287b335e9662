"""Pieces of a step: where captures begin and end, and what runs between them. What is captured is held on a GPU, by
`test_graphs.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allotrope.graphs import captured, piecewise_graphs
from allotrope.graphs.piecewise_graphs import PiecewiseGraphs, expected_bytes
from allotrope.layers.step import Attend

CPU, LAYERS = torch.device("cpu"), 3


@dataclass(frozen=True)
class Rows:
    x: torch.Tensor

    def map_tokens(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
        return Rows(change(self.x))


class Captures:
    """Stands for CUDA: counts captures that are open, and replays."""

    def __init__(self) -> None:
        self.open = self.ended = self.replayed = 0

    def begin(self) -> Any:
        assert not self.open, "one capture at a time"
        self.open += 1
        return SimpleNamespace(capture_end=self.end, replay=self.replay)

    def end(self) -> None:
        assert self.open, "nothing is being captured"
        self.open, self.ended = 0, self.ended + 1

    def replay(self) -> None:
        self.replayed += 1


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    found = Captures()
    monkeypatch.setattr(PiecewiseGraphs, "_begin", found.begin)
    monkeypatch.setattr(PiecewiseGraphs, "_on_stream", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(captured, "free_memory", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(piecewise_graphs, "_unowned", lambda x: x)
    return found


def step(tokens: int) -> Any:
    return SimpleNamespace(ids=torch.arange(tokens), layers=list(range(LAYERS)))


def double(layer: Any, inputs: Rows) -> torch.Tensor:
    """Attention, which keeps the number of rows that it saw in `seen`."""
    seen.append((layer, len(inputs.x)))
    return 2 * inputs.x


seen: list[tuple[int, int]] = []


class Body:
    def __init__(self) -> None:
        self.x, self.outs = torch.ones(64, 2), torch.zeros(LAYERS, 64, 2)
        self.fails_at: int | None = None

    def __call__(self, size: int, attend: Attend) -> None:
        for layer in range(LAYERS):
            if layer == self.fails_at:
                raise RuntimeError("no room")
            self.outs[layer, :size] = attend(layer, double, Rows(self.x[:size]))


def test_a_step_is_a_graph_before_each_attention_and_one_behind(captures: Captures) -> None:
    seen.clear()
    body = Body()
    made = PiecewiseGraphs(body, lambda: step(1), [16, 32], CPU, capture=True)
    assert made.capture_next()
    # The step that a capture is prepared with has one row; what is captured attends to nothing.
    assert seen == [(layer, 1) for layer in range(LAYERS)]
    assert (captures.open, captures.ended, made.captured) == (0, LAYERS + 1, [32])
    seen.clear()
    made.run(made.padded(20), step(20))
    assert seen == [(layer, 20) for layer in range(LAYERS)] and captures.replayed == LAYERS + 1
    for piece in made._graphs[32].pieces:
        assert piece.out[:20].eq(2).all() and not piece.out[20:].any()
    # A size without a graph runs eagerly, with padding rows that attention left out.
    made.run(made.padded(9), step(9))
    assert (made.replays, made.eager) == (1, 1)
    assert body.outs[:, :9].eq(2).all() and not body.outs[:, 9:16].any()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_capture_that_fails_is_ended_and_says_why(
    captures: Captures, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    body = Body()
    made = PiecewiseGraphs(body, lambda: step(1), [16, 32], CPU, capture=True)
    monkeypatch.setattr(made, "_prepare", lambda size: None)
    made._returned = dict.fromkeys(range(LAYERS), (torch.Size([2]), torch.float32))
    body.fails_at = layer
    with caplog.at_level("WARNING"):
        assert not made.capture_next()
    assert not captures.open and not made.pending
    assert "prefill steps of 32 tokens cannot be captured, they run eager: no room" in caplog.text


def test_expected_memory_covers_what_was_measured() -> None:
    """On two H200s: bytes of an eager step of so many tokens, layers, and what the graphs of all sizes took."""
    for eager, tokens, layers, took in ((450_000_000, 3584, 94, 1.70e9), (450_000_000, 3584, 8, 1.12e9)):
        assert took <= expected_bytes(eager, tokens, layers) < 1.2 * took
    assert expected_bytes(450_000_000, 0, 94) == 0
