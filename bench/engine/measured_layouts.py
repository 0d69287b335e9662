"""What `allotrope plan` says of layouts beside what they took: its errors, and whether it proposes the fastest.

    python bench/engine.py MODEL --engines allotrope --layouts TP2 DP2 DP2+EP --out layouts
    python bench/engine/measured_layouts.py layouts.json --chip h200

Reads results of `bench/engine.py`, of our engine in several layouts of as many GPUs, and needs no GPU. Nothing is
fitted to them. Ends with 1 if, in any case, the layout that a plan would choose took more than 5 % longer than the
fastest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from allotrope.engine.planning.layout_plan import LayoutPlanner, Machines  # noqa: E402
from allotrope.kernels.chip_figures import FIGURES, FITTED, ChipFigures  # noqa: E402
from allotrope.rank_layout import RankLayout  # noqa: E402
from bench.engine.cost_model import DECODE, PROMPTS, batches, released_config, seconds_of, sliced  # noqa: E402
from bench.engine.report import OURS, Column, held_cases  # noqa: E402

# How much slower than the fastest layout the proposed one may be.
MAX_BEHIND = 0.05


@dataclass(frozen=True)
class Measured:
    """A case in a layout. `measured`, `expected`: seconds by kind of step."""

    model: str
    case: str
    layout: RankLayout
    measured: dict[str, float]
    expected: dict[str, float]

    def error(self, kind: str) -> float:
        return self.expected[kind] / self.measured[kind] - 1


def read(files: Sequence[Path], figures: ChipFigures) -> list[Measured]:
    """Every case of our engine without drafts."""
    found = []
    for file in files:
        for title, model in json.loads(file.read_text())["models"].items():
            for name, measured in model["engines"].items():
                column = Column.of(name)
                if column.engine == OURS and column.speculation is None:
                    layout = column.layout
                    with sliced(model, released_config(model), measured) as config:
                        planner = LayoutPlanner(config, Machines(figures, layout.size, 1), 1)
                        planner.stages(layout)
                    for case, times in held_cases(measured).items():
                        expected = _expected(planner, layout, case)
                        found.append(Measured(title, case, layout, seconds_of(times), expected))
    return found


def _expected(planner: LayoutPlanner, layout: RankLayout, case: str) -> dict[str, float]:
    """Seconds by kind of step. Prompts are read by the steps that a rank's own tokens fill."""
    inputs, outputs, requests = map(int, case.split("/"))
    decode = planner.decode(layout, requests, inputs + outputs // 2).tpot
    own = -(-requests // layout.data)
    steps = [planner.prompts(layout, n * inputs * layout.data, inputs).seconds for n in batches(own, inputs)]
    return {DECODE: decode, PROMPTS: FITTED.prompts + sum(steps)}


def page(rows: Sequence[Measured]) -> str:
    """The comparison for people."""
    lines = ["| model | case | layout | ms measured | ms expected | | prompts s | expected | |", f"|{'---|' * 9}"]
    for row in rows:
        cells = [row.model, row.case, row.layout.name]
        for kind, scale, digits in ((DECODE, 1e3, 2), (PROMPTS, 1.0, 3)):
            numbers = (row.measured[kind] * scale, row.expected[kind] * scale)
            cells += [*(f"{number:.{digits}f}" for number in numbers), f"{100 * row.error(kind):+.0f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    means = [100 * statistics.mean(abs(row.error(kind)) for row in rows) for kind in (DECODE, PROMPTS)]
    lines += ["", f"Mean error: {means[0]:.1f} % of a decode step, {means[1]:.1f} % of a batch of prompts.", ""]
    lines += ["| model | case | a plan chooses | fastest | time over the fastest |", "|---|---|---|---|---|"]
    for model, case, chosen, fastest, behind in choices(rows):
        lines.append(f"| {model} | {case} | {chosen.name} | {fastest.name} | {1 + behind:.2f} |")
    return "\n".join(lines) + "\n"


def choices(rows: Sequence[Measured]) -> list[tuple[str, str, RankLayout, RankLayout, float]]:
    """For each case that several layouts of as many GPUs ran: which a plan chooses, which was the fastest, and how much
    longer the chosen one took."""
    found = []
    for model, case, gpus in dict.fromkeys((row.model, row.case, row.layout.size) for row in rows):
        same = [row for row in rows if (row.model, row.case, row.layout.size) == (model, case, gpus)]
        if len(same) > 1:
            chosen = min(same, key=lambda row: row.expected[DECODE])
            fastest = min(same, key=lambda row: row.measured[DECODE])
            behind = chosen.measured[DECODE] / fastest.measured[DECODE] - 1
            found.append((model, case, chosen.layout, fastest.layout, behind))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--chip", default="h200", choices=list(FIGURES), help="that the files were measured on")
    given = parser.parse_args(arguments)
    rows = read(given.files, FIGURES[given.chip])
    print(page(rows))
    return int(any(behind > MAX_BEHIND for *_, behind in choices(rows)))


if __name__ == "__main__":
    sys.exit(main())
