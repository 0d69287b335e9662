"""Running an engine step by step while watching its logits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.request import Request, SamplingParams, SequenceOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class Watch:
    """Keeps the latest logits of every position: request -> position -> [vocabulary]."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)

    def logits(self, request_id: str, index: int, start: int, logits: torch.Tensor) -> None:
        for offset, row in enumerate(logits):
            self.seen[request_id][start + offset] = row.clone()

    def token(self, request_id: str, index: int, chosen: int) -> int:
        return chosen


def request(name: str, ids: Sequence[int], params: SamplingParams = GREEDY, eos_ids: tuple[int, ...] = ()) -> Request:
    return Request(request_id=name, prompt_ids=tuple(ids), params=params, eos_ids=eos_ids)


def engine(model: object, watch: Watch | None = None, **options: Any) -> Engine:
    return Engine(EngineConfig(**{"model": str(model), "dtype": "float32", **options}), observer=watch)


def drain(running: Engine, limit: int = 10_000) -> dict[str, list[int]]:
    """Step until nothing is left; the tokens of each request, those of sequence i under `name#i` for i > 0."""
    tokens: dict[str, list[int]] = defaultdict(list)
    for _ in range(limit):
        if not running.has_work():
            return dict(tokens)
        for output in running.step():
            tokens[_name(output)].extend(output.token_ids)
    raise AssertionError(f"still at work after {limit} steps: {running.stats()}")


def run(running: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    for one in requests:
        running.add(one)
    return drain(running)


def outputs(running: Engine, requests: Sequence[Request]) -> list[SequenceOutput]:
    """Everything the engine says while it answers `requests`."""
    for one in requests:
        running.add(one)
    found: list[SequenceOutput] = []
    while running.has_work():
        found.extend(running.step())
    return found


def assert_idle(running: Engine) -> None:
    """Nothing runs and no page is held."""
    stats = running.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert set(stats.pages_used.values()) <= {0}, stats


def assert_same(got: Mapping[str, list[int]], want: Mapping[str, list[int]]) -> None:
    wrong = {name: (got.get(name), tokens) for name, tokens in want.items() if got.get(name) != tokens}
    assert not wrong, f"tokens differ (got, want): {wrong}"


def assert_same_logits(got: Watch, want: Watch, atol: float = 0.0) -> None:
    """At every position of every request: the same bits, or numbers at most `atol` apart."""
    for name, positions in want.seen.items():
        for position, logits in positions.items():
            found = got.seen[name][position]
            same = torch.equal(found, logits) if atol == 0.0 else torch.allclose(found, logits, atol=atol, rtol=0.0)
            assert same, (name, position, (found - logits).abs().max())


def _name(output: SequenceOutput) -> str:
    return output.request_id if output.index == 0 else f"{output.request_id}#{output.index}"
