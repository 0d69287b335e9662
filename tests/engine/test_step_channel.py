"""Every reader of the ring gets every step whole and in order, however long it is and however far behind it reads."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from allotrope.engine.packed_step import PackedStep
from allotrope.engine.ranks.step_channel import Command, Ring, StepReceiver, StepSender

WORDS = 64


def arrays(seed: int, largest: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    random = np.random.default_rng(seed)
    host = [random.integers(-(2**62), 2**62, random.integers(0, largest)) for _ in range(3)]
    device = [random.integers(-(2**30), 2**30, random.integers(0, largest)).astype(np.int32) for _ in range(2)]
    return host, [*device, random.integers(-(2**62), 2**62, random.integers(1, largest))]


def test_a_packed_step_holds_its_arrays() -> None:
    for seed in range(20):
        host, device = arrays(seed, 9)
        packed = PackedStep(PackedStep.of(host, device, pinned=False).words.clone())
        assert [one.tolist() for one in packed.host] == [one.tolist() for one in host]
        sent = list(packed.send(torch.device("cpu")))
        assert [one.view(torch.int32)[: len(want)].tolist() for one, want in zip(sent, device[:2], strict=False)] == [
            one.tolist() for one in device[:2]
        ]
        assert sent[2].tolist() == device[2].tolist()
        assert all((one.storage_offset() - sent[0].storage_offset()) % 2 == 0 for one in sent)


def test_every_reader_gets_every_step() -> None:
    """Steps from a few words to several times the ring, and a reader that is slow."""
    readers, steps = (
        3,
        [PackedStep.of(*arrays(seed, 3 * WORDS if seed % 5 == 0 else 9), pinned=False) for seed in range(60)],
    )
    ring = Ring(Ring.create(readers, WORDS), readers, WORDS)
    ends = [Pipe() for _ in range(readers)]
    got: list[list[list[int] | Command]] = [[] for _ in range(readers)]

    def read(reader: int, connection: Connection) -> None:
        own = Ring(os.dup(ring.descriptor), readers, WORDS)
        receiver = StepReceiver(own, reader, connection, pinned=False)
        for i in range(len(steps) + 1):
            if reader == 1 and i % 7 == 0:
                time.sleep(0.01)
            sent = receiver.receive()
            got[reader].append(sent.words.tolist() if isinstance(sent, PackedStep) else sent)

    threads = [threading.Thread(target=read, args=(i, theirs)) for i, (_, theirs) in enumerate(ends)]
    for thread in threads:
        thread.start()
    sender = StepSender(ring, [ours for ours, _ in ends])
    for i, step in enumerate(steps):
        if i == 30:
            sender.command(Command.CAPTURE)
        sender.send(step, lambda: None)
    for thread in threads:
        thread.join(timeout=30)
    want = [step.words.tolist() for step in steps]
    assert got == [[*want[:30], Command.CAPTURE, *want[30:]]] * readers


def test_a_reader_that_stops_reading_does_not_hold_up_the_sender_for_ever() -> None:
    ring = Ring(Ring.create(1, WORDS), 1, WORDS)
    ours, _theirs = Pipe()
    sender, looks = StepSender(ring, [ours]), []

    def check() -> None:
        looks.append(1)
        if len(looks) > 3:
            raise RuntimeError("rank 1 ended")

    with pytest.raises(RuntimeError, match="rank 1 ended"):
        for _ in range(WORDS):
            sender.send(PackedStep.of([], [np.arange(20)], pinned=False), check)
