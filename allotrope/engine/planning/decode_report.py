"""What a decode step must at least move and compute, and from how many tokens of a step drafts are worth their time.

Owns the report. Must not know how costs are counted, nor the chip's figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from allotrope.attention.cost import StepCost
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.planning.rank_report import drafts_of_step
from allotrope.engine.planning.report_text import size_text, table
from allotrope.engine.planning.step_cost import ModelCost
from allotrope.engine.planning.step_time import StepTime
from allotrope.kernels.chip_figures import ChipFigures

# Requests that decode at once, and drafts of each beside the most that the options allow.
REQUESTS = (1, 4, 16, 64, 256)
DRAFTS = (1, 2, 3)


@dataclass(frozen=True)
class DecodeReport:
    """The roofline cost for one rank, by class, of decoding a token of each of `requests` requests that see `context`
    tokens; with speculative decoding, of verifying `drafts` drafts beside these and of making as many. `least`: seconds
    that the ceilings of the chip of the plan allow for it, None where no chip was named.

    `draft_costs`: by requests and by drafts of each, how many times as long as without drafts a step takes at those
    ceilings: drafts pay where it yields more tokens of a request than that.
    """

    requests: int
    drafts: int
    context: int
    classes: dict[str, StepCost]
    least: float | None = None
    draft_costs: dict[int, dict[int, float]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The same for people, one line each."""
        shown = [*self.classes.items(), ("all", sum(self.classes.values(), StepCost()))]
        rows = [(kind, size_text(work.bytes), f"{work.flops / 1e9:.3f}") for kind, work in shown]
        drafts = f" with {self.drafts} drafts" if self.drafts else ""
        title = f"a decode step of {self.requests} requests{drafts} that see {self.context} tokens, at least:"
        text = [title, *table([("work", "bytes", "GFLOP"), *rows])]
        if self.least is not None:
            text.append(f"at the ceilings of the chip that takes {self.least * 1e3:.2f} ms")
        return text + self._draft_lines()

    def _draft_lines(self) -> list[str]:
        if not self.draft_costs:
            return []
        counts = sorted({count for costs in self.draft_costs.values() for count in costs})
        names = [f"{count} draft{'s' * (count > 1)}" for count in counts]
        rows = [
            (str(requests), *(f"{costs[count]:.2f}" if count in costs else "-" for count in counts))
            for requests, costs in self.draft_costs.items()
        ]
        title = "drafts pay where a step yields more tokens of a request than, at the ceilings of the chip:"
        return [title, *table([("requests", *names), *rows])]


def report_decode(load_plan: LoadPlan, figures: ChipFigures | None) -> DecodeReport:
    """Of a step of as many requests as there may be, half as long as they may be. `figures`: of the chip, if one was
    named."""
    context, cost = max(1, load_plan.max_model_len // 2), ModelCost(load_plan)
    drafts = drafts_of_step(load_plan)
    classes = cost.drafted(context, drafts)
    if figures is None:
        return DecodeReport(len(drafts), sum(drafts), context, classes)
    time = StepTime(figures)
    costs = _draft_costs(load_plan, cost, time, context)
    return DecodeReport(len(drafts), sum(drafts), context, classes, time.least(classes), costs)


def _draft_costs(load_plan: LoadPlan, cost: ModelCost, time: StepTime, context: int) -> dict[int, dict[int, float]]:
    most, rows = load_plan.max_drafts, load_plan.max_decodes
    found = {}
    for requests in (count for count in REQUESTS if count <= load_plan.max_num_seqs):
        counts = sorted(count for count in {*DRAFTS, most} if 0 < count <= most and requests * (1 + count) <= rows)
        if costs := {count: draft_cost(cost, time, context, requests, count) for count in counts}:
            found[requests] = costs
    return found


def draft_cost(cost: ModelCost, time: StepTime, context: int, requests: int, drafts: int) -> float:
    """How many times as long as without drafts a step of `requests` with `drafts` of each takes, at the ceilings."""
    plain = time.least(cost((1,) * requests, (context,) * requests))
    return time.least(cost.drafted(context, (drafts,) * requests)) / plain
