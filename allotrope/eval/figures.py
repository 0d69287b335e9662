"""Figures with 95 % intervals, made of answers; and whether figures of two runs agree."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from allotrope.engine.report import SpeculationStats
from allotrope.eval.answers import Answers
from allotrope.eval.intervals import Estimate, mean, ratio, wilson
from allotrope.eval.items import Item, Items, TextChunks
from allotrope.eval.tasks import Mark, mark

# Bytes between a value and its query: buckets begin here, and end where the next one begins.
DISTANCES = (0, 64, 256, 1024, 4096, 16384, 65536)
RESIDUES = 64
# Of these residues alone, each has enough items for an interval that says something.
FOLDED = 4
LENGTH_UNIT = "tokens a step"


@dataclass(frozen=True)
class Figure:
    """`name`: such as "recall, distance 64-255". `unit`: "share", that of the text, or of acceptance lengths."""

    name: str
    unit: str
    estimate: Estimate

    def holds(self, value: float) -> bool:
        """Whether `value` lies inside the interval. Shares go by whole answers: the interval's ends are rounded
        outward to one, or all answers right would be outside where one of very many is wrong.
        """
        one = self.estimate
        if self.unit != "share":
            return one.holds(value)
        return math.floor(one.low * one.count) <= round(value * one.count) <= math.ceil(one.high * one.count)

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        one = self.estimate
        return {
            "name": self.name,
            "unit": self.unit,
            "value": one.value,
            "low": one.low,
            "high": one.high,
            "count": one.count,
        }


@dataclass(frozen=True)
class Difference:
    """A figure beside the same one of what it is held to."""

    figure: Figure
    wanted: Figure

    @property
    def inside(self) -> bool:
        """Whether the figure lies in the 95 % interval of the wanted one; see `Figure.holds`."""
        return self.wanted.holds(self.figure.estimate.value)


@dataclass(frozen=True)
class Measured:
    """What one way of running the items came to. `answers`: first lines, by task. `residues`: of recall, (right, items)
    by the prompt's length in tokens modulo 64.
    """

    name: str
    figures: tuple[Figure, ...]
    answers: dict[str, tuple[str, ...]]
    residues: tuple[tuple[int, int], ...] = ()
    remark: str = ""
    seconds: float = 0.0

    def differences(self, wanted: Measured) -> list[Difference]:
        """Each figure that both have."""
        theirs = {figure.name: figure for figure in wanted.figures}
        return [Difference(figure, theirs[figure.name]) for figure in self.figures if figure.name in theirs]

    def unequal(self, wanted: Measured) -> dict[str, tuple[int, int]]:
        """How many answers of each task that both have are others than `wanted` has, and of how many."""
        pairs = {
            task: (answers, wanted.answers[task]) for task, answers in self.answers.items() if task in wanted.answers
        }
        return {
            task: (sum(one != other for one, other in zip(ours, theirs, strict=True)), len(ours))
            for task, (ours, theirs) in pairs.items()
        }

    def worst_residues(self, count: int) -> list[tuple[int, int, int]]:
        """(residue, right, items) of those with the smallest share, worst first."""
        known = [(i, right, total) for i, (right, total) in enumerate(self.residues) if total]
        return sorted(known, key=lambda one: (one[1] / one[2], one[0]))[:count]

    @property
    def even(self) -> bool:
        """Whether recall is the same at every length."""
        return len({right / total for right, total in self.residues if total}) < 2


def measure(items: Items, answers: Answers) -> Measured:
    """Figures of `answers`."""
    figures: list[Figure] = []
    residues: tuple[tuple[int, int], ...] = ()
    remark = answers.remark
    if items.text is not None and answers.losses:
        missing = sum(math.isnan(loss) for one in answers.losses for loss in one[items.text.first :])
        if missing:
            remark += f"; text has no figure: {missing} of its tokens were not computed, as they were cached"
        else:
            figures.append(_text_figure(items.text, answers.losses))
    for task, given in answers.tasks.items():
        asked = items.tasks[task]
        marks = [mark(item.example, answer.text) for item, answer in zip(asked, given, strict=True)]
        groups = _groups(task, asked)
        figures += [_share(name, marks, chosen) for name, chosen in groups.items()]
        if task in ("json", "tool_call"):
            valid = [Mark(one.valid, one.valid) for one in marks]
            figures.append(_share(f"{task}, valid", valid, range(len(valid))))
        if task == "recall":
            residues = _residues(asked, marks)
    # A single draft has no interval.
    if answers.drafts is not None and answers.drafts.drafts > 1:
        figures += _draft_figures(answers.drafts)
    texts = {task: tuple(answer.text for answer in given) for task, given in answers.tasks.items()}
    return Measured(answers.name, tuple(figures), texts, residues, remark, answers.seconds)


def _text_figure(text: TextChunks, losses: Sequence[Sequence[float]]) -> Figure:
    """Bits of each byte or token in the second halves of all chunks."""
    totals = [math.fsum(one[text.first :]) / math.log(2) for one in losses]
    return Figure("text", f"bits per {text.unit}", ratio(totals, [sum(sizes) for sizes in text.sizes]))


def _share(name: str, marks: Sequence[Mark], chosen: Sequence[int]) -> Figure:
    return Figure(name, "share", wilson(sum(marks[i].exact for i in chosen), len(chosen)))


def _draft_figures(drafts: SpeculationStats) -> list[Figure]:
    """The mean of tokens that a sequence gets where its drafts are verified, and by position in the draft, the share
    that is accepted of those whose former one is: each pass of a draft model has a figure of its own."""
    still = (drafts.drafts, *drafts.accepted_per_position)
    ended = [still[i] - still[i + 1] for i in range(len(still) - 1)] + [still[-1]]
    figures = [Figure("acceptance length", LENGTH_UNIT, mean({1 + i: count for i, count in enumerate(ended)}))]
    for i, (accepted, reached) in enumerate(
        zip(drafts.accepted_per_position, drafts.reached_per_position, strict=True)
    ):
        if reached:
            figures.append(Figure(f"accepted, draft {i + 1}", "share", wilson(accepted, reached)))
    return figures


def _groups(task: str, items: Sequence[Item]) -> dict[str, Sequence[int]]:
    """Names of figures, each with the items that it counts."""
    groups: dict[str, Sequence[int]] = {task: range(len(items))}
    if task == "recall":
        groups |= _grouped(items, lambda item: _bucket(item.example.facts["distance"]))
        groups |= _grouped(items, lambda item: f"tokens = {len(item.ids) % FOLDED} mod {FOLDED}")
    return groups


def _grouped(items: Sequence[Item], name: Callable[[Item], str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        groups[f"recall, {name(item)}"].append(i)
    return dict(sorted(groups.items(), key=lambda group: _number(group[0])))


def _number(name: str) -> int:
    return int("".join(char if char.isdigit() else " " for char in name).split()[0])


def _bucket(distance: int) -> str:
    index = max(i for i, start in enumerate(DISTANCES) if start <= distance)
    end = f"-{DISTANCES[index + 1] - 1}" if index + 1 < len(DISTANCES) else " and more"
    return f"distance {DISTANCES[index]}{end}"


def _residues(items: Sequence[Item], marks: Sequence[Mark]) -> tuple[tuple[int, int], ...]:
    counts = [[0, 0] for _ in range(RESIDUES)]
    for item, one in zip(items, marks, strict=True):
        count = counts[len(item.ids) % RESIDUES]
        count[0] += one.exact
        count[1] += 1
    return tuple((right, total) for right, total in counts)
