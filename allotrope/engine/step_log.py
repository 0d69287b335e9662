"""The step log: on demand, every so many seconds a line with a step's time beside its roofline cost.

Steps that only decode and steps with prompts have lines of their own. A step that is timed begins when the device has
done all before it, and is waited for. Owns the moment and the line. Must not know the parts of a step.
"""

from __future__ import annotations

import time

import torch

from allotrope.attention.cost import StepCost
from allotrope.engine.executor import Executor
from allotrope.engine.inputs import StepPlan
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.planning.step_cost import ModelCost
from allotrope.logs import asked_for

log = asked_for("allotrope.engine.steps")


class StepLog:
    """Runs plans on `executor`, and logs the time of some of them."""

    def __init__(self, executor: Executor, load_plan: LoadPlan, seconds: float) -> None:
        self._executor, self._seconds = executor, seconds
        self._device, self._work = load_plan.build.device, ModelCost(load_plan)
        # When a step of a kind is timed next.
        self._due: dict[str, float] = {}

    def run(self, plan: StepPlan, prev_sampled: torch.Tensor | None = None) -> torch.Tensor:
        """As `Executor.run`. Of several data-parallel ranks, the part of the one with the most tokens is measured."""
        kind, now = "a decode step" if plan.decodes_only else "a step with prompts", time.monotonic()
        # Not the first one: kernels are compiled in it.
        if now < self._due.setdefault(kind, now + self._seconds):
            return self._executor.run(plan, prev_sampled)
        self._due[kind] = now + self._seconds
        self._wait()
        begin = time.perf_counter()
        logits = self._executor.run(plan, prev_sampled)
        self._wait()
        seconds = time.perf_counter() - begin
        own = max(plan.parts, key=lambda part: part.tokens, default=plan)
        new, kv_lens = _lengths(own)
        cost = self._work(new, kv_lens, sum(row.num_logits for row in own.rows))
        what = f"{kind} of {sum(new)} tokens of {len(new)} requests that see {sum(kv_lens)}"
        log.info("%s took %.3f ms; %s", what, seconds * 1e3, format_cost(cost, seconds))
        return logits

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _lengths(plan: StepPlan) -> tuple[list[int], list[int]]:
    """Of each request of a step, its new tokens and those visible after it. A draft's row counts as a token of its
    sequence: what they read of caches is read once."""
    new: list[int] = []
    kv_lens: list[int] = []
    for row in plan.rows:
        end = row.context + len(row.ids)
        if row.draft:
            new[-1] += 1
            kv_lens[-1] = end
        else:
            new.append(len(row.ids))
            kv_lens.append(end)
    return new, kv_lens


def format_cost(classes: dict[str, StepCost], seconds: float) -> str:
    """The roofline cost by class, and the rates that it and the time give."""
    by_class = [f"{kind} {work.bytes / 1e9:.3g} GB {work.flops / 1e9:.3g} GFLOP" for kind, work in classes.items()]
    total = sum(classes.values(), StepCost())
    rates = f"{total.bytes / seconds / 1e12:.3g} TB/s, {total.flops / seconds / 1e12:.3g} TFLOP/s"
    return f"at least {', '.join(by_class)}: {rates}"
