"""Rows of bytes to train on: text, and the tasks of `allotrope.eval.tasks` with their answers weighed more.

A row has L + 1 bytes, so that L are predicted. Rows of recall are one long example with many queries; rows of the other
tasks are short examples one after the other.
"""

from __future__ import annotations

import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allotrope.eval.tasks import TASKS, make, task_rng
from train import text

SHORT_TASKS = tuple(task for task in TASKS if task != "recall")
# Weights of a byte's loss: of text, of an answer, and of what a task says before it.
TEXT_WEIGHT, ANSWER_WEIGHT, PROMPT_WEIGHT = 2, 16, 0.2
# Parts of the rows.
TEXT_SHARE, RECALL_SHARE = 0.3, 0.4
# Prompts of short tasks, in bytes.
SHORT_PROMPTS = (160, 640)


@dataclass(frozen=True)
class Rows:
    """`tokens`: [n, L + 1] uint8. `answers`: [n, L + 1] uint8: 0 in text, 1 in a prompt, 2 in an answer."""

    tokens: np.ndarray
    answers: np.ndarray


def example_row(task: str, index: int, seed: int, size: int) -> tuple[bytes, bytes]:
    """`size` bytes of a task, and which of them are answers."""
    out, kinds = bytearray(), bytearray()
    rng = task_rng("train", task, index, seed)
    while len(out) < size:
        # Recall's answers have two digits and a newline.
        length = size - 3 if task == "recall" else rng.randint(*SHORT_PROMPTS)
        example = make(task if task in TASKS else rng.choice(SHORT_TASKS), rng, length)
        kind = bytearray(b"\1" * len(example.text))
        for start, end in example.spans:
            kind[start:end] = b"\2" * (end - start)
        out += example.text
        kinds += kind
    return bytes(out[:size]), bytes(kinds[:size])


def draw_rows(source: bytes, count: int, length: int, seed: int, first: int = 0) -> Rows:
    """Rows `first` to `first + count` of the endless list of rows of `length` that a seed gives."""
    tokens = np.empty((count, length + 1), dtype=np.uint8)
    answers = np.zeros((count, length + 1), dtype=np.uint8)
    for i in range(count):
        rng = random.Random(f"rows/{seed}/{length}/{first + i}")
        kind = rng.random()
        if kind < TEXT_SHARE:
            start = rng.randrange(len(source) - length)
            tokens[i] = np.frombuffer(source, np.uint8, length + 1, start)
            continue
        task = "recall" if kind < TEXT_SHARE + RECALL_SHARE else "short"
        row, answered = example_row(task, length * 1_000_000 + first + i, seed, length + 1)
        tokens[i], answers[i] = np.frombuffer(row, np.uint8), np.frombuffer(answered, np.uint8)
    return Rows(tokens, answers)


# Rows that a worker draws at a time.
_BATCH = 64


def _part(path: Path, count: int, length: int, seed: int, first: int) -> Rows:
    return draw_rows(text.read(path, held_out=False), count, length, seed, first)


def write_rows(path: Path, folder: Path, sizes: dict[int, int], seed: int, workers: int) -> None:
    """Draws rows in parallel and writes them as `L.tokens.npy` and `L.answers.npy`. `sizes`: length -> rows."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers) as pool:
        parts = {
            length: [
                pool.submit(_part, path, min(_BATCH, count - first), length, seed, first)
                for first in range(0, count, _BATCH)
            ]
            for length, count in sizes.items()
        }
        for length, drawn in parts.items():
            found = [part.result() for part in drawn]
            np.save(folder / f"{length}.tokens.npy", np.concatenate([part.tokens for part in found]))
            np.save(folder / f"{length}.answers.npy", np.concatenate([part.answers for part in found]))


PARTS = ("tokens", "answers")


def drawn_count(folder: Path, length: int) -> int:
    """The number of rows of `length` that are drawn."""
    path = folder / f"{length}.answers.npy"
    return len(np.load(path, mmap_mode="r")) if path.is_file() else 0


def read_rows(folder: Path, counts: dict[int, int]) -> dict[int, Rows]:
    """The first rows of each length, as many as `counts` says: more that are drawn change nothing."""
    return {
        length: Rows(*(np.load(folder / f"{length}.{part}.npy", mmap_mode="r")[:count].copy() for part in PARTS))
        for length, count in counts.items()
    }
