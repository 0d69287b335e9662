"""The ways in which the engine may cut the same tokens into steps; none may change an answer.

Each mode builds an engine with settings of its own and runs the samples through it. Must not know what is right.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from allotrope.cache.memory import Demand, make_plan
from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.observer import Observer
from allotrope.layers.parallel import Parallel
from allotrope.request import Request, SamplingParams
from allotrope.verify.prompts import draw_prompt
from allotrope.verify.sample import ForcedTokens

# Steps of the modes that take a step for every token or three of them, unless all is asked for.
_SLOW_STEPS = 300
# Sequences that run together where they do, and where there is hardly any memory.
_TOGETHER, _TIGHT = 16, 8

Attach = Callable[[Engine], None]
SampleT = TypeVar("SampleT", bound=ForcedTokens, covariant=True)


@dataclass(frozen=True)
class Bench(Generic[SampleT]):
    """What all modes share. `config`: the engine as asked for. `samples`: what is run. `thorough`: leave none out.

    `attach(engine)`: called with each engine before it runs.
    """

    config: EngineConfig
    samples: Sequence[SampleT]
    thorough: bool = False
    attach: Attach | None = None

    @contextmanager
    def engine(self, observer: Observer, **settings: Any) -> Iterator[Engine]:
        """An engine for the longest sample, with `settings` in place of its own. Looked into, it captures no graphs:
        their layers cannot be seen; and it drafts nothing: every row of a step is a token that follows."""
        if self.attach is not None:
            settings |= {"cuda_graphs": False, "speculative_config": None}
        config = dataclasses.replace(self.config, **{**self.fitting(), **settings})
        engine = Engine(config, observer=observer)
        try:
            if self.attach is not None:
                self.attach(engine)
            yield engine
        finally:
            engine.close()

    def fitting(self) -> dict[str, Any]:
        """Settings under which every sample runs whole and alone."""
        return {
            "max_model_len": self.longest,
            "max_num_batched_tokens": self.longest,
            "max_num_seqs": 1,
            "max_num_waiting": 4 * len(self.samples) + 64,
        }

    @property
    def longest(self) -> int:
        return max(len(sample.prompt) + len(sample.forced) for sample in self.samples)

    def background_requests(self, count: int, seed: int) -> list[Request]:
        """Requests that are nobody's sample, of up to half the longest one's length."""
        generator = torch.Generator().manual_seed(seed)
        longest = max(2, self.longest // 2)
        ids = sorted({token for sample in self.samples for token in sample.prompt})
        lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
        return [
            _request(f"background/{i}", draw_prompt(ids, length, generator), min(4, self.longest - length))
            for i, length in enumerate(lengths)
        ]


@dataclass(frozen=True)
class ExecutionMode:
    """`text`: what it does, for people. `run(bench, observer)` returns a remark on what happened, perhaps "".

    It raises NotExercised where the model gives it nothing to do.
    """

    name: str
    text: str
    run: Callable[[Bench[ForcedTokens], Observer], str]


class NotExercised(Exception):
    """What a mode is there to try did not come about; its text says why."""


def drain(engine: Engine, requests: Sequence[Request]) -> None:
    """Run requests to their end. Raises RuntimeError if the engine reports an error or stops making progress."""
    steps = 10_000 + 4 * sum(len(request.prompt_ids) + (request.params.max_tokens or 0) for request in requests)
    for request in requests:
        engine.add(request)
    while engine.has_work():
        if not (steps := steps - 1):
            raise RuntimeError(f"no progress any more: {engine.stats()}")
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")


def ask(sample: ForcedTokens, run: str, tokens: int | None = None) -> Request:
    """Run `run` of a sample, for `tokens` of its forced tokens or all of them."""
    return _request(f"{sample.name}/{run}", sample.prompt, min(tokens or len(sample.forced), len(sample.forced)))


def _request(name: str, ids: Sequence[int], tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return Request(request_id=name, prompt_ids=tuple(ids), params=params)


def _whole(bench: Bench[ForcedTokens], observer: Observer) -> str:
    with bench.engine(observer, enable_prefix_caching=False) as engine:
        drain(engine, [ask(sample, "whole") for sample in bench.samples])
    return ""


def _chunked(size: int) -> Callable[[Bench[ForcedTokens], Observer], str]:
    def run(bench: Bench[ForcedTokens], observer: Observer) -> str:
        chosen = list(bench.samples) if bench.thorough else _some(bench.samples, _SLOW_STEPS * size)
        with bench.engine(observer, enable_prefix_caching=False, max_num_batched_tokens=size) as engine:
            drain(engine, [ask(sample, "chunked") for sample in chosen])
        left_out = len(bench.samples) - len(chosen)
        return f"{left_out} prompts left out (--thorough runs them)" if left_out else ""

    return run


def _some(samples: Sequence[ForcedTokens], tokens: int) -> list[ForcedTokens]:
    """Samples of at most `tokens` tokens together, long ones first, none of them more than half of all."""
    chosen, left = [], tokens
    for sample in sorted(samples, key=lambda sample: -len(sample.fed)):
        if len(sample.fed) <= min(left, tokens // 2):
            chosen.append(sample)
            left -= len(sample.fed)
    return chosen or [min(samples, key=lambda sample: len(sample.fed))]


def _cached(bench: Bench[ForcedTokens], observer: Observer) -> str:
    """Each prompt after a background request that begins like it, at several cuts, and after itself."""
    together = min(2 * _TOGETHER, len(bench.samples))
    settings = {"max_num_seqs": together, "max_num_batched_tokens": max(bench.longest, together)}
    with bench.engine(observer, enable_prefix_caching=True, **settings) as engine:
        sizes = [entry.group.page_size for entry in engine.memory.groups if entry.group.kind != "state"]
        unit = math.lcm(*sizes) if sizes else 16
        cuts = [_cuts(len(sample.prompt), unit) for sample in bench.samples]
        for turn in range(max(map(len, cuts))):
            engine.reset_prefix_cache()
            pairs = [(sample, own[turn]) for sample, own in zip(bench.samples, cuts, strict=True) if turn < len(own)]
            warmers = bench.background_requests(len(pairs), seed=turn)
            drain(engine, [_beginning(*pair, warmer) for pair, warmer in zip(pairs, warmers, strict=True)])
            drain(engine, [ask(sample, f"cut {cut}", tokens=3) for sample, cut in pairs])
        drain(engine, [ask(sample, "again") for sample in bench.samples])
        stats = engine.stats()
    if not stats.prefix_hits:
        raise NotExercised(f"nothing could be reused: no prompt has more than the {unit} tokens of one shared page")
    return f"{stats.prefix_hits} of {stats.prefix_queries} prompt tokens reused"


def _cuts(length: int, unit: int) -> list[int]:
    """Where a background request leaves a prompt: at its last page's end, in a page, at a page's, before the end."""
    last = (length - 1) // unit * unit
    wanted = (last, last // 2 + unit // 2 + 1, min(unit, last), length - 1)
    return list(dict.fromkeys(cut for cut in wanted if 0 < cut < length))


def _beginning(sample: ForcedTokens, cut: int, background: Request) -> Request:
    """The background request's tokens behind the first `cut` tokens of the sample."""
    ids = (*sample.prompt[:cut], *background.prompt_ids[: max(1, min(3, len(sample.fed) - cut - 1))])
    return _request(f"background/{sample.name}", ids, 1)


def _batched(bench: Bench[ForcedTokens], observer: Observer) -> str:
    together = min(_TOGETHER, 2 * len(bench.samples))
    background_requests = bench.background_requests(max(4, len(bench.samples) // 2), seed=1)
    requests = [ask(sample, "batched") for sample in bench.samples] + background_requests
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(2)).tolist()
    with bench.engine(observer, max_num_seqs=together, max_num_batched_tokens=max(64, together)) as engine:
        drain(engine, [requests[i] for i in order])
    return f"with {len(background_requests)} background requests, up to {together} at a time"


class _Recorder:
    """An `Observer` that passes all on to another one, and keeps the logits."""

    def __init__(self, inner: Observer) -> None:
        self.inner = inner
        self.rows: dict[tuple[str, int, int], torch.Tensor] = {}

    def logits(self, request_id: str, index: int, start: int, logits: torch.Tensor) -> None:
        self.rows[request_id, index, start] = logits.clone()
        self.inner.logits(request_id, index, start, logits)

    def token(self, request_id: str, index: int, chosen: int) -> int:
        return self.inner.token(request_id, index, chosen)


def _graphs(bench: Bench[ForcedTokens], observer: Observer) -> str:
    """All prompts at once through captured graphs, then the same steps eagerly: not one bit may differ."""
    together = min(_TOGETHER, len(bench.samples))
    settings = {"max_num_seqs": together, "max_num_batched_tokens": max(bench.longest, together)}
    graphs, eager = _Recorder(observer), _Recorder(observer)
    replays = 0
    for recorder, captures in ((graphs, True), (eager, False)):
        with bench.engine(recorder, cuda_graphs=captures, enable_prefix_caching=False, **settings) as engine:
            if captures:
                engine.capture_all()
            drain(engine, [ask(sample, "graphs" if captures else "eager") for sample in bench.samples])
            if captures:
                replays = engine.graph_replays
    if not replays:
        raise NotExercised("no step is captured here: that takes a GPU, and backends that can be captured")
    names = {key: (key[0].replace("/graphs", "/eager"), *key[1:]) for key in graphs.rows}
    differ = [key for key, other in names.items() if not torch.equal(graphs.rows[key], eager.rows[other])]
    if differ:
        name, _, position = differ[0]
        raise RuntimeError(
            f"logits of {len(differ)} of {len(names)} steps differ between graphs and eager, the first after token "
            f"{position} of {name.partition('/')[0]}"
        )
    return f"{replays} steps replayed, logits of {len(names)} steps equal to eager ones bit for bit"


def _preempted(bench: Bench[ForcedTokens], observer: Observer) -> str:
    """Memory for the longest sample alone, and pages so small that every sample needs more of them as it goes on."""
    preemptions = sum(_squeezed(bench, observer, _TIGHT, reuse) for reuse in (True, False))
    if not preemptions:
        # What windows take does not grow with a sequence: there must be fewer of them than sequences.
        preemptions = sum(_squeezed(bench, observer, 1, reuse) for reuse in (True, False))
    if not preemptions:
        raise NotExercised("no sequence had to give up its memory: what this model keeps does not grow enough")
    return f"{preemptions} preemptions"


def tight_settings(config: EngineConfig, longest: int, windows: int, reuse: bool) -> dict[str, Any]:
    """Options for pages so small and memory so tight that sequences preempt each other: `longest` tokens of context,
    and windows and states of `windows` sequences."""
    settings: dict[str, Any] = {
        "max_model_len": longest,
        "max_num_seqs": _TIGHT,
        "max_num_batched_tokens": max(64, _TIGHT),
        "page_size": min(4, config.page_size),
        "enable_prefix_caching": reuse,
        "scheduler_reserve_full_isl": False,
    }
    demand = Demand(context=longest, sequences=windows, step_tokens=max(64, _TIGHT), reuse=reuse)
    load_plan = resolve_load_plan(dataclasses.replace(config, **settings), Parallel.of(config.layout))
    return settings | {"kv_cache_memory_bytes": max(1, make_plan(load_plan.groups, demand, longest).bytes)}


def _squeezed(bench: Bench[ForcedTokens], observer: Observer, windows: int, reuse: bool) -> int:
    """Run all samples in memory for the longest one and for the windows and states of so many. Returns preemptions."""
    with bench.engine(observer, **tight_settings(bench.config, bench.longest, windows, reuse)) as engine:
        samples = [ask(sample, f"{windows}, reuse {reuse}") for sample in bench.samples]
        drain(engine, samples + bench.background_requests(2, seed=3))
        return engine.stats().preemptions


ALL = {
    mode.name: mode
    for mode in (
        ExecutionMode("whole", "each prompt alone and in one step, then token by token", _whole),
        ExecutionMode("chunked-1", "each prompt alone, one token a step", _chunked(1)),
        ExecutionMode("chunked-3", "each prompt alone, three tokens a step", _chunked(3)),
        ExecutionMode("chunked-64", "each prompt alone, 64 tokens a step", _chunked(64)),
        ExecutionMode("cached", "prompts whose beginning another request has left in the prefix cache", _cached),
        ExecutionMode(
            "batched", "all prompts at once among background requests, prompts and decodes in the same steps", _batched
        ),
        ExecutionMode("graphs", "all prompts at once through captured graphs, bit for bit as without them", _graphs),
        ExecutionMode(
            "preempted", "all prompts at once in memory for one: each is sent back and computed again", _preempted
        ),
    )
}
"""By name, in the order in which they run."""
