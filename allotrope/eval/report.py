"""The figures for people and programs: a table, a verdict, a JSON document, a plot.

Must not know how anything was measured.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allotrope.errors import ConfigError
from allotrope.eval.figures import FOLDED, RESIDUES, Difference, Figure, Measured
from allotrope.eval.intervals import Estimate

if TYPE_CHECKING:
    from rich.table import Table

_WORST = 6


@dataclass(frozen=True)
class Skipped:
    """A mode without figures. `broken`: the engine failed in it; else the model gave it nothing to do."""

    name: str
    reason: str
    broken: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """`engine`, `items`: what ran and what was asked, in words. `baseline`: what modes are held to; None: the first.
    `backends`: what each attention and operation runs by.
    """

    model: str
    architecture: str
    engine: str
    items: str
    items_sha256: str
    baseline: Measured | None
    modes: tuple[Measured, ...]
    skipped: tuple[Skipped, ...]
    backends: tuple[str, ...]
    seconds: float

    @property
    def wanted(self) -> Measured:
        """What the modes are held to."""
        return self.baseline or self.modes[0]

    def differences(self) -> dict[str, list[Difference]]:
        """Of each mode that is held to something, by its name."""
        return {mode.name: mode.differences(self.wanted) for mode in self.held()}

    @property
    def passed(self) -> bool:
        inside = all(one.inside for differences in self.differences().values() for one in differences)
        return inside and not any(one.broken for one in self.skipped)

    def heading(self) -> list[str]:
        """What ran, and on what."""
        return [
            f"{self.model}: {self.architecture}",
            f"engine:  {self.engine}",
            f"items:   {self.items}",
        ]

    def notes(self) -> list[str]:
        """What happened in each mode, and which lengths recall is worst at."""
        lines = [f"{mode.name}: {mode.remark}" for mode in self.modes if mode.remark]
        lines += [f"{one.name}: {'failed' if one.broken else 'not exercised'}: {one.reason}" for one in self.skipped]
        for mode in self.runs():
            if not mode.even:
                lacking = [one for one in mode.worst_residues(_WORST) if one[1] < one[2]]
                worst = ", ".join(f"{i} ({right} of {total})" for i, right, total in lacking)
                lines.append(f"{mode.name}: recall is worst where prompt tokens mod {RESIDUES} are {worst}")
        for mode in self.held():
            counts = mode.unequal(self.wanted)
            text = ", ".join(f"{unequal} of {total} of {task}" for task, (unequal, total) in counts.items() if unequal)
            if counts:
                lines.append(f"{mode.name}: answers other than of {self.wanted.name}: {text or 'none'}")
        return lines

    def runs(self) -> list[Measured]:
        """Every mode, and the baseline."""
        return [*self.modes, *([] if self.baseline is None else [self.baseline])]

    def held(self) -> tuple[Measured, ...]:
        """The modes that are held to something."""
        return self.modes if self.baseline is not None else self.modes[1:]

    def verdict(self) -> list[str]:
        """Every figure outside, then one line for all."""
        lines = []
        found = self.differences()
        for name, differences in found.items():
            lines += [
                f"outside in {name}: {_difference(one, self.wanted.name)}" for one in differences if not one.inside
            ]
        broken = [one.name for one in self.skipped if one.broken]
        count = sum(map(len, found.values()))
        if broken:
            lines.append(f"FAILED in {', '.join(broken)}")
        elif lines:
            lines.append(f"OUTSIDE: {len(lines)} of {count} figures are not in the interval of {self.wanted.name}")
        elif found:
            lines.append(f"INSIDE: all {count} figures are in the 95 % interval of {self.wanted.name}")
        else:
            lines.append("measured; --baseline or a second mode would say whether this is right")
        return lines

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "model": self.model,
            "architecture": self.architecture,
            "engine": self.engine,
            "backends": list(self.backends),
            "items": self.items,
            "items_sha256": self.items_sha256,
            "seconds": self.seconds,
            "passed": self.passed,
            "verdict": self.verdict()[-1],
            "modes": [_as_json(mode) for mode in self.modes],
            "skipped": [{"name": one.name, "reason": one.reason, "broken": one.broken} for one in self.skipped],
            "baseline": None if self.baseline is None else _as_json(self.baseline),
            "differences": [
                {
                    "mode": name,
                    "figure": one.figure.name,
                    "difference": one.figure.estimate.value - one.wanted.estimate.value,
                    "inside": one.inside,
                }
                for name, differences in self.differences().items()
                for one in differences
            ],
            "unequal_answers": {mode.name: mode.unequal(self.wanted) for mode in self.held()},
        }


def _as_json(measured: Measured) -> dict[str, Any]:
    return {
        "name": measured.name,
        "figures": [figure.as_json() for figure in measured.figures],
        "answers": measured.answers,
        "residues": [list(one) for one in measured.residues],
        "remark": measured.remark,
        "seconds": measured.seconds,
    }


def _difference(one: Difference, wanted: str) -> str:
    ours, theirs, unit = one.figure.estimate, one.wanted.estimate, one.figure.unit
    return (
        f"{one.figure.name} is {_number(ours.value, unit)}, {wanted} has {_number(theirs.value, unit)} "
        f"{_bounds(theirs, unit)}"
    )


def _number(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "share" else f"{value:.4f}"


def _bounds(estimate: Estimate, unit: str) -> str:
    return f"[{_number(estimate.low, unit)}, {_number(estimate.high, unit)}]"


def figure_table(report: Report) -> Table:
    """One row a figure, one column a way of running the items."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table
    from rich.text import Text

    runs = report.runs()
    outside = {
        (name, one.figure.name) for name, found in report.differences().items() for one in found if not one.inside
    }
    columns = [Column(run.name, justify="right", no_wrap=True) for run in runs]
    table = Table(Column("figure", no_wrap=True), Column("items", justify="right"), *columns, box=SIMPLE_HEAD)
    by_name = [{figure.name: figure for figure in run.figures} for run in runs]
    for name in dict.fromkeys(figure.name for run in runs for figure in run.figures):
        cells = []
        for run, figures in zip(runs, by_name, strict=True):
            cell = _cell(figures.get(name))
            cells.append(Text(cell, style="bold red" if (run.name, name) in outside else ""))
        known = next(figures[name] for figures in by_name if name in figures)
        unit = "" if known.unit == "share" else f" ({known.unit})"
        table.add_row(f"{name}{unit}", str(known.estimate.count), *cells)
    return table


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    return f"{_number(figure.estimate.value, figure.unit)} {_bounds(figure.estimate, figure.unit)}"


def write_json(path: Path, report: Report) -> None:
    """Write all figures to `path`."""
    path.write_text(json.dumps(_finite(report.as_json()), indent=1) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no infinity: such numbers become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _read_number(value: float | None) -> float:
    """A number of the JSON file, which has null for infinity."""
    return math.inf if value is None else value


def read_report(path: Path) -> tuple[Measured, str]:
    """The first mode of a report that `write_json` wrote, and the SHA-256 of its items.

    Raises ConfigError if the file is none.
    """
    try:
        document = json.loads(path.read_text())
        mode = document["modes"][0]
        figures = tuple(
            Figure(
                one["name"],
                one["unit"],
                Estimate(_read_number(one["value"]), _read_number(one["low"]), _read_number(one["high"]), one["count"]),
            )
            for one in mode["figures"]
        )
        residues = tuple((right, total) for right, total in mode["residues"])
        answers = {task: tuple(texts) for task, texts in mode["answers"].items()}
        measured = Measured(f"{path.name} ({mode['name']})", figures, answers, residues)
        return measured, str(document["items_sha256"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"bad options: baseline={str(path)!r} is no report of this command: {problem}.") from error


def write_plot(path: Path, report: Report) -> None:
    """Draw recall by distance and by length, the other shares, and the text's bits, to the PNG file `path`.

    Raises ConfigError where matplotlib is missing.
    """
    pyplot = load_pyplot()
    figure, grid = pyplot.subplots(2, 2, figsize=(12.8, 8.4), layout="constrained")
    distance, length, shares, text = (panel for row in grid for panel in row)
    runs = report.runs()
    for i, run in enumerate(runs):
        # Side by side, so that equal ones do not hide each other.
        shift = 0.7 * ((i + 0.5) / len(runs) - 0.5)
        _points(distance, [one for one in run.figures if "distance" in one.name], run.name, shift)
        tasks = [one for one in run.figures if one.unit == "share" and not one.name.startswith("recall,")]
        _points(shares, tasks, run.name, shift)
        _points(text, [one for one in run.figures if one.name == "text"], run.name, shift)
        known = [(residue, right / total) for residue, (right, total) in enumerate(run.residues) if total]
        if known:
            length.plot(*zip(*known, strict=True), marker="o", markersize=3, linewidth=0.8, label=run.name)
    distance.set_title("recall by bytes between value and query", fontsize=10)
    length.set_title(f"recall by prompt tokens modulo {RESIDUES}", fontsize=10)
    length.xaxis.set_major_locator(pyplot.MultipleLocator(FOLDED))
    shares.set_title("right answers, and answers of the right format", fontsize=10)
    units = {one.unit for run in runs for one in run.figures if one.name == "text"}
    text.set_title(" and ".join(units) or "text", fontsize=10)
    for panel in (distance, length, shares, text):
        if panel is not text:
            panel.set_ylim(-0.02, 1.02)
        panel.grid(alpha=0.3)
        if panel.has_data():
            panel.legend(fontsize=8)
    figure.suptitle(f"{report.model}: {report.engine}", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def load_pyplot() -> Any:
    """matplotlib's pyplot, drawing to files. Raises ConfigError where matplotlib is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError("a plot needs matplotlib. Run: pip install 'allotrope[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _points(panel: Any, figures: list[Figure], label: str, shift: float) -> None:
    """Values with their intervals. `shift`: to the right, in distances between two figures."""
    if not figures:
        return
    values = [one.estimate.value for one in figures]
    below = [max(0.0, one.estimate.value - one.estimate.low) for one in figures]
    above = [max(0.0, one.estimate.high - one.estimate.value) for one in figures]
    at = [i + shift for i in range(len(figures))]
    panel.errorbar(at, values, yerr=(below, above), fmt="o", markersize=4, capsize=3, label=label)
    names = [one.name.removeprefix("recall, distance ") for one in figures]
    panel.set_xticks(range(len(figures)), names, rotation=30, ha="right", fontsize=8)
