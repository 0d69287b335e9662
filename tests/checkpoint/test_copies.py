"""Copies by several threads: all are made before the end, their errors are raised, and little waits in memory."""

from __future__ import annotations

import threading

import pytest
import torch

from allotrope.checkpoint import copies
from allotrope.checkpoint.copies import Copies

LARGE = 1 << 20


def test_all_are_made_before_the_end() -> None:
    source, target = torch.arange(64 * 1024).view(64, 1024), torch.zeros(64, 1024, dtype=torch.int64)
    with Copies(1) as made:
        for row in range(64):
            # Of both sizes: small ones are made at once, by this thread.
            made.add(LARGE if row % 2 else 8, lambda row=row: target[row].copy_(source[row]))
            assert row % 2 or torch.equal(target[row], source[row])
    assert torch.equal(source, target)


def test_an_error_of_a_thread_is_raised() -> None:
    def fail() -> None:
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"), Copies(1) as made:
        made.add(LARGE, fail)
    # What failed before it counts more, and leaves no thread behind.
    before = threading.active_count()
    with pytest.raises(ValueError, match="not this tensor"), Copies(1) as made:
        made.add(LARGE, fail)
        raise ValueError("not this tensor")
    assert threading.active_count() <= before


def test_few_bytes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_BYTES_AHEAD", 4 * LARGE)
    go, made, counts = threading.Event(), [], []

    def copy() -> None:
        go.wait(10)
        made.append(None)

    with Copies(1) as some:
        for i in range(20):
            if i == 4:
                go.set()
            some.add(LARGE, copy)
            counts.append(i + 1 - len(made))
    assert len(made) == 20 and max(counts[5:]) <= 4


def test_parameters_made_in_inference_mode_are_written() -> None:
    with torch.inference_mode():
        target = torch.zeros(4)
        with Copies(1) as made:
            made.add(LARGE, lambda: target.copy_(torch.ones(4)))
        assert target.tolist() == [1.0] * 4
