"""What a host with the plugin answers to items in an execution mode. Must not know what is right, or which host it is.

Tasks are sent together and answered greedily to the first newline. A host says how it computes text.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from allotrope.eval.answers import Answer, Answers, Losses, Tasks, ask_both
from allotrope.eval.items import Item, Items, TextChunks
from allotrope.eval.options import ModeName
from allotrope.text.tokenizer import Tokenizer
from allotrope.verify.execution_modes import NotExercised

# Prompts that run together in a warm cache: each is run twice, before later ones need its memory.
TOGETHER = 32
# Tokens of a step, and sequences that run together, where there are few of them.
CHUNK, TIGHT = 64, 8


T = TypeVar("T")


class NotOurs(Exception):
    """The host runs another model than the plugin's."""


@dataclass(frozen=True)
class Host:
    """What ran. `version`: of the host, its name before it. `model`: types, device and ranks. `backends`: of its layers
    and operations, where the host's processes say them."""

    version: str
    model: str
    backends: tuple[str, ...]


@dataclass(frozen=True)
class Generated:
    """`ids`: tokens after a prompt. `ended`: whether the last one ends the text by itself. `cached`: prompt tokens that
    were reused."""

    ids: list[int]
    ended: bool
    cached: int


class Running(ABC):
    """A host that runs a model of ours. `host`: which. `tokenizer`: says the text of answers."""

    host: Host
    tokenizer: Tokenizer

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[Generated]:
        """Greedy tokens to the first newline, of prompts that are sent together."""

    @abstractmethod
    def losses(self, text: TextChunks, first: int | None) -> tuple[tuple[tuple[float, ...], ...], int]:
        """-log p of every token of each chunk, NaN where it was not computed, and how many prompt tokens were reused.

        `first`: the first position that needs one, where the tokens before may be cached; None: all of them do.
        """

    @abstractmethod
    def squeezed(self, run: Callable[[], T]) -> tuple[T, str]:
        """What `run` returns where sequences preempt each other, and a remark. Raises NotExercised where none does."""

    @abstractmethod
    def close(self) -> None:
        """Free the model, its memory and its ranks."""

    def ask(self, items: Items, name: ModeName, started: float) -> Answers:
        """Answers to all items. Raises NotExercised if what the mode is there to try came about in no part of them."""
        return ask_both(
            items, name, started, lambda: self._ask_tasks(items.tasks, name), lambda text: self._ask_text(text, name)
        )

    def _ask_tasks(self, tasks: dict[str, tuple[Item, ...]], name: ModeName) -> Tasks:
        """Answers, and a remark."""
        if name == "preempted":
            return self.squeezed(lambda: self._answers(tasks, warm=False)[0])
        answers, cached, total = self._answers(tasks, warm=name == "warm")
        return answers, _reused(cached, total) if name == "warm" else ""

    def _answers(
        self, tasks: dict[str, tuple[Item, ...]], *, warm: bool
    ) -> tuple[dict[str, tuple[Answer, ...]], int, int]:
        """`warm`: every prompt runs before it counts. Also returns prompt tokens: reused ones, and all."""
        answers: dict[str, tuple[Answer, ...]] = {}
        cached = total = 0
        for task, items in tasks.items():
            found: list[Answer] = []
            size = TOGETHER if warm else len(items)
            for group in (items[i : i + size] for i in range(0, len(items), size)):
                prompts = [item.ids for item in group]
                if warm:
                    self.generate(prompts, [1] * len(group))
                outputs = self.generate(prompts, [item.max_tokens for item in group])
                found += map(self._answer, outputs)
                cached += sum(output.cached for output in outputs)
                total += sum(map(len, prompts))
            answers[task] = tuple(found)
        return answers, cached, total

    def _answer(self, output: Generated) -> Answer:
        """The first line, as our engine says it: hosts leave the bytes of an incomplete character out."""
        text = self.tokenizer.decode(output.ids[:-1] if output.ended else output.ids)
        return Answer(text.partition("\n")[0], tuple(output.ids))

    def _ask_text(self, text: TextChunks, name: ModeName) -> Losses:
        """-log p of every token of each chunk, NaN where it was not computed; and a remark."""
        if name == "preempted":
            return self.squeezed(lambda: self.losses(text, text.first)[0])
        if name != "warm":
            return self.losses(text, None)[0], ""
        # Another request leaves the beginning; the rest of the prompt is computed on top of it.
        left = [[*chunk.prompt, *chunk.forced][: max(1, text.first * 3 // 4)] for chunk in text.chunks]
        found: list[tuple[float, ...]] = []
        cached = total = 0
        for i in range(0, len(text.chunks), TOGETHER):
            group = dataclasses.replace(text, chunks=text.chunks[i : i + TOGETHER])
            before = left[i : i + TOGETHER]
            self.generate(before, [1] * len(before))
            losses, reused = self.losses(group, text.first)
            found += losses
            cached += reused
            total += text.first * len(before)
        return tuple(found), _reused(cached, total)


def ask_running(start: Callable[[], Running], items: Items, name: ModeName) -> tuple[Answers, Host]:
    """Run all items in a mode, in a host of its own that `start` starts.

    Raises NotExercised if what the mode is there to try came about in no part of them, NotOurs if the model is not the
    plugin's, and what the host raises.
    """
    started = time.monotonic()
    running = start()
    try:
        return running.ask(items, name, started), running.host
    finally:
        running.close()


def _reused(cached: int, total: int) -> str:
    if not cached:
        raise NotExercised("no prompt was found in the prefix cache: none has the tokens of one shared run")
    return f"{cached} of {total} prompt tokens reused"
