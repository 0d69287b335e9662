"""What the engine answers to items in an execution mode.

Tasks run as they are served: together, greedily, to the first newline, with graphs and async scheduling. Text runs
through the execution modes of `allotrope.verify`: each chunk's last tokens are fed one by one, whatever the engine
would choose. Must not know what is right.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.architectures.registry import read_draft
from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.config import EngineConfig
from allotrope.engine.report import SpeculationStats
from allotrope.errors import ModelError
from allotrope.eval.items import Item, Items, TextChunks
from allotrope.eval.options import ModeName
from allotrope.llm import LLM
from allotrope.loading.draft import draft_tensors
from allotrope.request import SamplingParams
from allotrope.verify.execution_modes import ALL, Bench, NotExercised, tight_settings

# Prompts that run together in a warm cache: each is run twice, before later ones need its memory.
_TOGETHER = 32
# Tokens of a step in the chunked mode.
_CHUNK = 64
# Drafts of the speculated mode, none left out to save time: how many are made must not depend on the machine.
_DRAFTS = {"num_speculative_tokens": 3, "adaptive": False}

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
    position; NaN where a token was not computed. Both lack what was not measured. `drafts`: what the tasks drafted,
    where that follows from their tokens alone. `remark`: what happened.
    """

    name: str
    tasks: dict[str, tuple[Answer, ...]]
    losses: tuple[tuple[float, ...], ...]
    remark: str = ""
    seconds: float = 0.0
    drafts: SpeculationStats | None = None


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


def _drafting(config: EngineConfig, longest: int) -> dict[str, Any]:
    """Drafts as the options say, else of the model's own head, else of n-grams."""
    if config.speculative_config is not None:
        return {"enable_prefix_caching": False}
    method = {"method": "mtp"} if _has_head(config) else {"method": "ngram", "prompt_lookup_min": 2}
    return {"enable_prefix_caching": False, "speculative_config": json.dumps({**method, **_DRAFTS})}


def _has_head(config: EngineConfig) -> bool:
    """Whether the checkpoint has a draft head of its own."""
    checkpoint = open_checkpoint(
        config.model, revision=config.revision, load_format=config.load_format, hf_overrides=config.hf_overrides
    )
    try:
        draft = read_draft(checkpoint.config, checkpoint.source)
        if draft is not None:
            draft_tensors(checkpoint, draft)
    except ModelError:
        # Its config names a head that cannot draft, or its weights lack it.
        return False
    return draft is not None


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
    "speculated": Mode("drafts of the model's own head, or of n-grams, are verified", "whole", (_drafting,)),
}
"""By name, in the order in which they run."""


# Answers or losses, and a remark.
Tasks = tuple[dict[str, tuple[Answer, ...]], str]
Losses = tuple[tuple[tuple[float, ...], ...], str]


def ask_engine(config: EngineConfig, items: Items, name: ModeName, log: Log = lambda text: None) -> Answers:
    """Run all items in a mode. Raises NotExercised if what the mode is there to try came about in no part of them."""
    started = time.monotonic()
    drafts: SpeculationStats | None = None

    def ask_tasks() -> Tasks:
        nonlocal drafts
        log(f"{name}: tasks")
        answers, remark, drafts = _ask_tasks(config, items, name)
        return answers, remark

    def ask_text(text: TextChunks) -> Losses:
        log(f"{name}: text")
        return _ask_text(config, text, name)

    return dataclasses.replace(ask_both(items, name, started, ask_tasks, ask_text), drafts=drafts)


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


def _ask_tasks(
    config: EngineConfig, items: Items, name: ModeName
) -> tuple[dict[str, tuple[Answer, ...]], str, SpeculationStats | None]:
    """The answers, a remark, and the drafts where they follow from the tokens alone."""
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
) -> tuple[dict[str, tuple[Answer, ...]], str, SpeculationStats | None]:
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
        stats = llm.engine.stats()
    finally:
        llm.close()
    if mode.twice and not cached:
        raise NotExercised("no prompt was found in the prefix cache: none has the tokens of one shared page")
    if squeezed and not stats.preemptions:
        raise NotExercised("no sequence was preempted: what this model keeps of a prompt does not grow enough")
    remarks = [f"{cached} of {total} prompt tokens reused"] if mode.twice else []
    remarks += [f"{stats.preemptions} preemptions"] if squeezed else []
    remarks += [_drafts_remark(config, stats.speculation)] if stats.speculation else []
    # Where memory is short, sequences get fewer drafts.
    repeatable = _is_repeatable(config) and not squeezed
    return answers, ", ".join(remarks), stats.speculation if repeatable else None


def _drafts_remark(config: EngineConfig, drafts: SpeculationStats) -> str:
    wanted = config.speculation
    assert wanted is not None
    length = f", acceptance length {1 + drafts.accepted_tokens / drafts.drafts:.2f}" if drafts.drafts else ""
    return f"{drafts.accepted_tokens} of {drafts.draft_tokens} drafts of {wanted.method} accepted{length}"


def _is_repeatable(config: EngineConfig) -> bool:
    """Whether drafts follow from a request's tokens alone: adaptive ones depend on time, and suffixes on the others."""
    wanted = config.speculation
    return wanted is not None and not wanted.adaptive and not wanted.is_synthetic and wanted.method != "suffix"


def _params(item: Item) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=item.max_tokens, stop=("\n",))


def _ask_text(config: EngineConfig, text: TextChunks, name: ModeName) -> Losses:
    if name == "two-ranks":
        config = dataclasses.replace(config, tensor_parallel_size=2)
    if name == "speculated":
        config = dataclasses.replace(config, **_drafting(config, 0))
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
