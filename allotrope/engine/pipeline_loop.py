"""The step loop of several pipeline stages: a step for each of them is in flight, all of different sequences.

The first stage runs its layers of the next steps before it finishes the first one: its hidden states have come back
from the last stage by then. Owns the steps in flight. Must not know how hidden states pass between stages.
"""

from __future__ import annotations

import time
from collections import abc, deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from allotrope.engine.in_flight import start_copy
from allotrope.engine.sampled_tokens import SampledTokens
from allotrope.engine.scheduler import Row
from allotrope.engine.step_loop import StepLoop
from allotrope.engine.step_rows import decode_rows, sampling_rows, wanted_drafts
from allotrope.ops.sampling.spec import Sampled
from allotrope.ops.token_mask import BitMask
from allotrope.request import SequenceOutput


@dataclass(frozen=True)
class StepInFlight:
    """A step that was launched. `num_logits`: per row, trailing tokens whose logits it computes. `forced`: as in
    `InFlightStep`. `greedy`: whether the ranks choose its tokens. `mask`: that of grammars. `since`: seconds of
    `time.perf_counter`.
    """

    rows: tuple[Row, ...]
    num_logits: tuple[int, ...]
    forced: tuple[int | None, ...]
    greedy: bool
    mask: Future[BitMask] | None
    since: float


class PipelineLoop(StepLoop):
    """`in_flight`: the steps that were launched and not finished, in their order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.in_flight: deque[StepInFlight] = deque()

    def step(self) -> list[SequenceOutput]:
        """Launch steps until as many are in flight as there are stages, and return new tokens of the first of them; []
        when there is nothing to run."""
        while len(self.in_flight) < self._executor.stages:
            others = frozenset(row.seq for step in self.in_flight for row in step.rows)
            rows = self._requests.plan(others)
            if not rows:
                break
            self.in_flight.append(self._start(rows))
        if not self.in_flight:
            return []
        step = self.in_flight.popleft()
        sampled = self._finish(step)
        self._commit(step.rows, {one.seq: one.num_accepted for one in sampled})
        outputs = [self._output(one) for one in sampled]
        if self._lookups is not None:
            self._lookups.record_time(decode_rows(step.rows), time.perf_counter() - step.since)
            having = {one.seq for one in sampled if not one.seq.done}
            self._lookups.propose(wanted_drafts([row for row in step.rows if row.seq in having]))
        if not self.in_flight and self._executor.capture_next() and self._drafting is not None:
            self._drafting.forget_times()
        return outputs

    def _start(self, rows: abc.Sequence[Row]) -> StepInFlight:
        """Launch a step: all its tokens are known."""
        since = time.perf_counter()
        num_logits = [self._num_logits(row) for row in rows]
        ready = [row for row in rows if row.samples]
        plan = self._step_plan(rows, num_logits, {}, [()] * len(self._requests.schedulers))
        plan = replace(plan, greedy=self._chosen_by_ranks(ready, sum(num_logits)))
        mask = self._start_mask(ready)
        self._executor.launch(plan)
        for row in rows:
            self._requests.start(row.seq)
        return StepInFlight(tuple(rows), tuple(num_logits), self._forced(ready), plan.greedy, mask, since)

    def _finish(self, step: StepInFlight) -> list[SampledTokens]:
        """Read the tokens of a step, but for sequences that ended since."""
        rows, out = step.rows, self._executor.finish()
        ready = [row for row in rows if row.samples]
        if step.greedy:
            sampled = start_copy(ready, self._batch(sampling_rows(ready)), Sampled(out, None))
        else:
            last = self._last_logits(rows, step.num_logits, out, len(ready))
            made = self._sample(ready, last, out, step.mask, None)
            if made is None:
                return []
            sampled = made
        return self._take_tokens(replace(sampled, forced=step.forced, rows=decode_rows(rows)))
