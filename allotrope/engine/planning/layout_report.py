"""The comparison of layouts as people read it: a table, why each is not the best, and what the ranks of the best hold.

Owns words and tables. Must not know how anything is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allotrope.engine.planning.exchange import total_sent
from allotrope.engine.planning.layout_plan import DecodeTime, LayoutReport, Machines, best, proposed
from allotrope.engine.planning.report_text import size_text, table
from allotrope.rank_layout import RankLayout

# Seconds per token below which a part is no reason.
_PART = 5e-5


@dataclass(frozen=True, kw_only=True)
class LayoutComparison:
    """`reports`: of all layouts of `machines`. `usable`: bytes of a GPU for weights, steps and caches."""

    model: str
    heading: str
    machines: Machines
    usable: int
    context: int
    requests: tuple[int, ...]
    reports: tuple[LayoutReport, ...]

    @property
    def proposal(self) -> LayoutReport | None:
        """The layout that is proposed for all numbers of requests alike; None where none fits."""
        return proposed(self.reports, self.requests)

    def best(self, requests: int) -> LayoutReport | None:
        """The layout with the least time per token of so many requests; None where none holds them."""
        return best(self.reports, requests)

    def as_json(self) -> dict[str, Any]:
        """The same as plain data, with what is proposed and why the others are not."""
        figures, proposal = self.machines.figures, self.proposal
        return {
            "model": self.model,
            "heading": self.heading,
            "chip": {"name": figures.name, "about": figures.about, "figures": _figures(self.machines)},
            "gpus": self.machines.gpus,
            "hosts": self.machines.hosts,
            "usable_bytes": self.usable,
            "context": self.context,
            "requests": list(self.requests),
            "fits": proposal is not None,
            "proposed": None if proposal is None else asdict(proposal.layout),
            "best": {
                count: None if (one := self.best(count)) is None else asdict(one.layout) for count in self.requests
            },
            "layouts": [
                {
                    **asdict(one.layout),
                    "options": options(one.layout),
                    "weight_bytes": one.weight_bytes,
                    "weights": one.weights,
                    "entries": one.entries,
                    "dequantized": list(one.dequantized),
                    "tokens": one.tokens,
                    "refusal": one.refusal,
                    "reason": self.reason(one),
                    "decode": [asdict(step) for step in one.decode],
                    "prompts": None if one.prompts is None else asdict(one.prompts),
                    "exchanges": [asdict(exchange) for exchange in one.exchanges],
                }
                for one in self.reports
            ],
            "assumed": figures.assumed(hosts=self.machines.hosts),
        }

    def lines(self) -> list[str]:
        """The same for people, one line each."""
        text = [self.heading, self._machines_line()]
        fits = [one for one in self.reports if one.refusal is None]
        if fits:
            counts = ", ".join(map(str, self.requests))
            text.append(
                f"ms per token of {counts} requests that each see {self.context} tokens, in brackets the least that "
                "the ceilings of chip and links allow; tokens of prompts per second; bytes that a rank sends in a step "
                "of the most requests"
            )
            text += table(self._rows(fits))
        for count in self.requests:
            text.append(self._best_line(count))
        if (proposal := self.proposal) is None:
            text.append("no layout fits")
        else:
            text.append(f"proposed: {options(proposal.layout)}: {self.reason(proposal)}")
        others = [one for one in self.reports if one is not proposal]
        if proposal is not None and others:
            text.append("the others, and their times beside the proposed one's:")
        text += [f"  {one.layout.name}: {self.reason(one)}" for one in others]
        if proposal is not None:
            text += self._details(proposal)
        assumed = self.machines.figures.assumed(hosts=self.machines.hosts)
        return text + [f"not measured on this chip: {one}" for one in assumed]

    def reason(self, report: LayoutReport) -> str:
        """Why a layout is proposed, or why it is not."""
        text = self._reason(report)
        if report.dequantized:
            text += f"; no longer quantized: {', '.join(report.dequantized)}"
        return text

    def _reason(self, report: LayoutReport) -> str:
        proposal = self.proposal
        if report.refusal is not None:
            return report.refusal
        if proposal is None:
            return "fits"
        if report is proposal:
            return self._why_proposed(report)
        served = [count for count in self.requests if proposal.at(count) is not None]
        lost = [count for count in served if report.at(count) is None]
        parts = []
        if lost:
            parts.append(
                f"its caches hold {report.tokens} tokens, and {lost[0]} requests need {lost[0] * self.context}"
            )
        shared = [count for count in served if count not in lost]
        if shared:
            parts.append(_compared(report, proposal, (shared[0], shared[-1])))
        return "; ".join(parts) or "holds fewer tokens of context"

    def _why_proposed(self, report: LayoutReport) -> str:
        if not report.decode:
            return f"of the layouts that fit, it holds most context, {report.tokens} tokens"
        count = report.decode[-1].requests
        others = [one for one in self.reports if one is not report and one.at(count) is not None]
        text = f"it holds {report.tokens} tokens of context"
        if not others:
            return f"{text}; no other holds {count} requests"
        nearest = min(others, key=lambda one: _tpot(one, count))
        ahead = [str(one) for one in self.requests if self.best(one) is report]
        first = f", and is the fastest with {', '.join(ahead)} requests" if ahead else ""
        rest = _compared(nearest, report, (report.decode[0].requests, count))
        return f"{text}{first}; {nearest.layout.name}, the nearest with {count}, is {rest}"

    def _machines_line(self) -> str:
        machines = self.machines
        hosts = "one host" if machines.hosts == 1 else f"{machines.hosts} hosts"
        memory = size_text(int(machines.figures.memory.value))
        return (
            f"{machines.gpus} x {machines.figures.about} on {hosts}: {memory} each, of which {size_text(self.usable)} "
            "are for weights, caches and steps"
        )

    def _rows(self, reports: Sequence[LayoutReport]) -> list[tuple[str, ...]]:
        steps = [str(count) for count in self.requests]
        rows: list[tuple[str, ...]] = [("layout", "weights", "tokens", *steps, "prompts", "links", "network")]
        for one in reports:
            times = (_time_text(one.at(count)) for count in self.requests)
            last = one.decode[-1] if one.decode else None
            sent = ("-", "-") if last is None else (size_text(last.link_bytes), size_text(last.network_bytes))
            prompts = "-" if one.prompts is None else f"{one.prompts.tokens_per_second:.0f}"
            rows.append((one.layout.name, size_text(one.weight_bytes), str(one.tokens), *times, prompts, *sent))
        return rows

    def _best_line(self, count: int) -> str:
        found = self.best(count)
        if found is None:
            return f"best with {count} requests: no layout holds their {count * self.context} tokens"
        return f"best with {count} requests: {found.layout.name}, {_tpot(found, count) * 1e3:.2f} ms"

    def _details(self, report: LayoutReport) -> list[str]:
        """What each rank of a layout holds, and what it exchanges."""
        rows = [(f"weights of a rank of {report.layout.name}", "bytes")]
        rows += [(kind, size_text(size)) for kind, size in (*report.weights.items(), ("all", report.weight_bytes))]
        text = table(rows)
        entries = ", ".join(f"{label} {size_text(size)}" for label, size in report.entries.items())
        own = report.tokens // report.layout.data
        text.append(f"its caches hold {own} tokens of context; one entry of all its layers: {entries}")
        if report.prompts is not None:
            prompts = report.prompts
            times = f"{prompts.seconds * 1e3:.1f} ms ({prompts.least * 1e3:.1f})"
            sent = f"{size_text(prompts.link_bytes)} over links and {size_text(prompts.network_bytes)} over the network"
            text.append(f"a step of {prompts.tokens} tokens of prompts takes {times}, and a rank sends {sent}")
        if report.decode:
            step = report.decode[-1]
            parts = [(f"a step of {step.requests} requests", "ms")]
            parts += [(part, f"{seconds * 1e3:.2f}") for part, seconds in step.parts.items()]
            text += table(parts)
        if report.exchanges:
            exchanged = [("it exchanges", "by", "times", "ranks", "bytes of each", "links", "network", "ms")]
            for one in report.exchanges:
                links, network = (size_text(size) for size in total_sent([one]))
                seconds = f"{one.seconds(self.machines.figures) * 1e3:.2f}"
                cells = (str(one.count), str(one.ranks), size_text(one.bytes), links, network, seconds)
                exchanged.append((one.of, one.name, *cells))
            text += table(exchanged)
        return text


def options(layout: RankLayout) -> str:
    """The options of `allotrope serve` that ask for a layout."""
    sizes = {"tensor": layout.tensor, "data": layout.data, "pipeline": layout.pipeline}
    flags = [f"--{what}-parallel-size {size}" for what, size in sizes.items() if size > 1]
    return " ".join([*flags, *(["--enable-expert-parallel"] if layout.expert_parallel else [])]) or "one rank"


def _tpot(report: LayoutReport, requests: int) -> float:
    step = report.at(requests)
    assert step is not None
    return step.tpot


def _time_text(step: DecodeTime | None) -> str:
    return "-" if step is None else f"{step.tpot * 1e3:.2f} ({step.least * 1e3:.2f})"


def _compared(one: LayoutReport, other: LayoutReport, requests: tuple[int, int]) -> str:
    """How much slower `one` is than `other` with few and with many requests, and in what."""
    texts = []
    for count in dict.fromkeys(requests):
        own, theirs = one.at(count), other.at(count)
        if own is None or theirs is None:
            continue
        by = own.tpot - theirs.tpot
        gains = {part: own.parts.get(part, 0.0) - theirs.parts.get(part, 0.0) for part in {**own.parts, **theirs.parts}}
        # What explains the difference, and what speaks against it, the largest first.
        shown = sorted((part for part in gains.items() if abs(part[1]) >= _PART), key=lambda part: -abs(part[1]))[:3]
        why = ", ".join(f"{part} {seconds * 1e3:+.2f}" for part, seconds in shown)
        texts.append(f"{by * 1e3:+.2f} ms with {count}" + (f" ({why})" if why else ""))
    return "; ".join(texts)


def _figures(machines: Machines) -> dict[str, Any]:
    figures = machines.figures
    return {
        "memory": asdict(figures.memory),
        "bandwidth": asdict(figures.bandwidth),
        "rates": {kind: asdict(rate) for kind, rate in figures.rates.items()},
        "link": asdict(figures.link),
        "network": None if figures.network is None else asdict(figures.network),
    }
