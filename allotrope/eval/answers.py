"""What the engine answers to items in an execution mode.

Tasks run as they are served: together, greedily, to the first newline, with graphs and async scheduling. Text runs
through the execution modes of `allotrope.verify`: each chunk's last tokens are fed one by one, whatever the engine
would choose. Must not know what is right.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.config import EngineConfig
from allotrope.eval.items import Item, Items, TextChunks
from allotrope.eval.options import ModeName
from allotrope.llm import LLM
from allotrope.request import SamplingParams
from allotrope.verify.execution_modes import ALL, Bench, NotExercised, tight_settings

# Prompts that run together in a warm cache: each is run twice, before later ones need its memory.
_TOGETHER = 32
# Tokens of a step in the chunked mode.
_CHUNK = 64

Log = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """Greedy continuation of an item's prompt, to its first newline."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Answers:
    """All that one way of running the items gave.

    `tasks`: name to an answer for each item. `losses`: nats of every token of each chunk of text but the first, by
    position; NaN where a token was not computed. Both lack what was not measured. `remark`: what happened.
    """

    name: str
    tasks: dict[str, tuple[Answer, ...]]
    losses: tuple[tuple[float, ...], ...]
    remark: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Mode:
    """`text`: what it does, for people. `like`: the mode of `allotrope.verify` that runs chunks of text.

    `settings(config, longest)`: options of the engine in place of its own; each is tried until one exercises the mode.
    `twice`: every prompt runs before it counts.
    """

    text: str
    like: str
    settings: tuple[Callable[[EngineConfig, int], dict[str, Any]], ...]
    twice: bool = False


def _tight(config: EngineConfig, longest: int) -> dict[str, Any]:
    return tight_settings(config, longest, windows=8, reuse=True)


def _tightest(config: EngineConfig, longest: int) -> dict[str, Any]:
    """What windows take does not grow with a sequence: there must be fewer of them than sequences."""
    return tight_settings(config, longest, windows=1, reuse=True)


def _always(**settings: Any) -> tuple[Callable[[EngineConfig, int], dict[str, Any]], ...]:
    return (lambda config, longest: settings,)


MODES: dict[ModeName, Mode] = {
    "cold": Mode("nothing in the prefix cache", "whole", _always(enable_prefix_caching=False)),
    "warm": Mode(
        "every prompt was run before, and is in the prefix cache",
        "cached",
        _always(enable_prefix_caching=True),
        twice=True,
    ),
    "chunked": Mode(
        f"{_CHUNK} tokens a step",
        "chunked-64",
        _always(enable_prefix_caching=False, max_num_batched_tokens=_CHUNK, max_num_seqs=8),
    ),
    "preempted": Mode("memory for the longest item alone", "preempted", (_tight, _tightest)),
    "two-ranks": Mode(
        "two processes share each layer", "whole", _always(enable_prefix_caching=False, tensor_parallel_size=2)
    ),
}
"""By name, in the order in which they run."""


# Answers or losses, and a remark.
Tasks = tuple[dict[str, tuple[Answer, ...]], str]
Losses = tuple[tuple[tuple[float, ...], ...], str]


def ask_engine(config: EngineConfig, items: Items, name: ModeName, log: Log = lambda text: None) -> Answers:
    """Run all items in a mode. Raises NotExercised if what the mode is there to try came about in no part of them."""
    started = time.monotonic()

    def ask_tasks() -> Tasks:
        log(f"{name}: tasks")
        return _ask_tasks(config, items, name)

    def ask_text(text: TextChunks) -> Losses:
        log(f"{name}: text")
        return _ask_text(config, text, name)

    return ask_both(items, name, started, ask_tasks, ask_text)


def ask_both(
    items: Items,
    name: ModeName,
    started: float,
    ask_tasks: Callable[[], Tasks],
    ask_text: Callable[[TextChunks], Losses],
) -> Answers:
    """The answers of those parts that `items` has. Raises NotExercised if no part exercised the mode. `started`: in
    seconds (time.monotonic).
    """
    remarks: list[str] = []
    unexercised: list[str] = []
    tasks: dict[str, tuple[Answer, ...]] = {}
    losses: tuple[tuple[float, ...], ...] = ()
    if items.tasks:
        try:
            tasks, remark = ask_tasks()
            remarks.append(remark and f"tasks: {remark}")
        except NotExercised as reason:
            unexercised.append(f"tasks: {reason}")
    if items.text is not None:
        try:
            losses, remark = ask_text(items.text)
            remarks.append(remark and f"text: {remark}")
        except NotExercised as reason:
            unexercised.append(f"text: {reason}")
    if not tasks and not losses:
        raise NotExercised("; ".join(unexercised))
    remark = "; ".join(one for one in (*remarks, *unexercised) if one)
    return Answers(name, tasks, losses, remark, time.monotonic() - started)


def _ask_tasks(config: EngineConfig, items: Items, name: ModeName) -> Tasks:
    mode = MODES[name]
    whole = dataclasses.replace(config, max_model_len=items.longest)
    for i, settings in enumerate(mode.settings):
        try:
            return _generate(
                dataclasses.replace(whole, **settings(whole, items.longest)),
                items.tasks,
                mode,
                squeezed=name == "preempted",
            )
        except NotExercised:
            if i + 1 == len(mode.settings):
                raise
    raise AssertionError(f"the mode {name} has no settings")


def _generate(
    config: EngineConfig, tasks: dict[str, tuple[Item, ...]], mode: Mode, *, squeezed: bool
) -> tuple[dict[str, tuple[Answer, ...]], str]:
    llm = LLM(**dataclasses.asdict(config))
    try:
        answers: dict[str, tuple[Answer, ...]] = {}
        cached = total = 0
        for task, items in tasks.items():
            found: list[Answer] = []
            for i in range(0, len(items), _TOGETHER if mode.twice else len(items)):
                group = items[i : i + _TOGETHER] if mode.twice else items
                if mode.twice:
                    llm.generate([item.ids for item in group], SamplingParams(temperature=0.0, max_tokens=1))
                outputs = llm.generate([item.ids for item in group], [_params(item) for item in group])
                found += [Answer(one.outputs[0].text, tuple(one.outputs[0].token_ids)) for one in outputs]
                cached += sum(output.cached_tokens for output in outputs)
                total += sum(len(item.ids) for item in group)
            answers[task] = tuple(found)
        preemptions = llm.engine.stats().preemptions
    finally:
        llm.close()
    if mode.twice and not cached:
        raise NotExercised("no prompt was found in the prefix cache: none has the tokens of one shared page")
    if squeezed and not preemptions:
        raise NotExercised("no sequence was preempted: what this model keeps of a prompt does not grow enough")
    reused = f"{cached} of {total} prompt tokens reused" if mode.twice else ""
    return answers, f"{preemptions} preemptions" if squeezed else reused


def _params(item: Item) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=item.max_tokens, stop=("\n",))


def _ask_text(config: EngineConfig, text: TextChunks, name: ModeName) -> Losses:
    if name == "two-ranks":
        config = dataclasses.replace(config, tensor_parallel_size=2)
    recorder = LossRecorder(text)
    remark = ALL[MODES[name].like].run(Bench(config, text.chunks, thorough=True), recorder)
    return tuple(tuple(losses.tolist()) for losses in recorder.losses.values()), remark


class LossRecorder:
    """An `Observer` that notes -log p of every token of each chunk, and feeds the chunk's own tokens.

    A position that is computed again keeps its last loss: it is the one that later tokens build on.
    """

    def __init__(self, text: TextChunks) -> None:
        self.ids = {chunk.name: torch.tensor([*chunk.prompt, *chunk.forced]) for chunk in text.chunks}
        self.losses = {name: torch.full(ids.shape, math.nan) for name, ids in self.ids.items()}
        self._forced: dict[str, Sequence[int]] = {chunk.name: chunk.forced for chunk in text.chunks}
        self._fed: dict[str, int] = defaultdict(int)

    def logits(self, request_id: str, index: int, start: int, logits: torch.Tensor) -> None:
        name = request_id.partition("/")[0]
        if name in self.ids:
            wanted = self.ids[name][start + 1 : start + 1 + len(logits)].to(logits.device)
            losses = torch.nn.functional.cross_entropy(logits[: len(wanted)].float(), wanted, reduction="none")
            # NaN says that a token was not computed.
            losses = losses.nan_to_num(nan=math.inf, posinf=math.inf).cpu()
            self.losses[name][start + 1 : start + 1 + len(wanted)] = losses

    def token(self, request_id: str, index: int, chosen: int) -> int:
        forced = self._forced.get(request_id.partition("/")[0])
        if forced is None:
            return max(chosen, 0)
        self._fed[request_id] += 1
        return forced[self._fed[request_id] - 1]
