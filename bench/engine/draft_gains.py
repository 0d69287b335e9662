"""What drafts gained beside what they could have gained at the ceilings of the chip.

    python bench/engine.py MODEL --engines allotrope --speculate 1 2 3 --accept 1.8 2.4 2.8 --adaptive --out found
    python bench/engine/draft_gains.py found.json --chip h200

Reads results of `bench/engine.py --speculate --accept`, of our engine on one GPU, and needs no GPU. `without / with` is
TPOT without drafts over TPOT with them. `possible` is the same at the ceilings: the tokens that a step yields in the
mean over how much longer it takes, with the number of drafts up to the given one that gains most, and 1 where none
does. Ends with 1 if drafts made any case slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from allotrope.config import EngineConfig  # noqa: E402
from allotrope.engine.drafts.acceptance import rates_of_length  # noqa: E402
from allotrope.engine.load_plan import resolve_load_plan  # noqa: E402
from allotrope.engine.planning.decode_report import draft_cost  # noqa: E402
from allotrope.engine.planning.step_cost import ModelCost  # noqa: E402
from allotrope.engine.planning.step_time import StepTime  # noqa: E402
from allotrope.kernels.chip_figures import FIGURES, ChipFigures  # noqa: E402
from bench.engine.cost_model import CONFIGS, released_config, sliced  # noqa: E402
from bench.engine.report import OURS, Column, Report, Speculation  # noqa: E402


@dataclass(frozen=True)
class Gain:
    """A case with drafts. `found`, `possible`: TPOT without drafts over TPOT with them."""

    model: str
    case: str
    drafts: Speculation
    found: float
    possible: float


def read(files: Sequence[Path], figures: ChipFigures) -> list[Gain]:
    """Every case of our engine with forced acceptance that was measured without drafts too."""
    return [
        gain
        for file in files
        for name, model in json.loads(file.read_text())["models"].items()
        for gain in _gains(name, model, figures)
    ]


def _gains(name: str, model: Report, figures: ChipFigures) -> Iterator[Gain]:
    plain, time = model["engines"].get(OURS, {"cases": {}}), StepTime(figures)
    columns = [Column.of(column) for column in model["engines"]]
    for column in (one for one in columns if one.plain == Column(OURS)):
        drafts, measured = column.speculation, model["engines"][str(column)]
        if drafts is None or drafts.length is None:
            continue
        with sliced(model, released_config(model), measured) as config:
            options = _with_drafts(config, model, measured)
            memory = int(figures.memory.value)
            cost = ModelCost(resolve_load_plan(options, chip=figures.chip, available=memory))
            for case, numbers in measured["cases"].items():
                if case in plain["cases"]:
                    found = _tpot(plain["cases"][case]) / _tpot(numbers)
                    yield Gain(name, case, drafts, found, possible(cost, time, case, drafts))


def _tpot(numbers: dict[str, Any]) -> float:
    return statistics.median(numbers["tpot_ms"])


def possible(cost: ModelCost, time: StepTime, case: str, drafts: Speculation) -> float:
    """The most that up to so many drafts can gain at the ceilings; 1: none of them gains anything."""
    assert drafts.length is not None
    inputs, outputs, requests = map(int, case.split("/"))
    # Of each draft, the share of steps in which it and all before it are accepted.
    accepted = itertools.accumulate(
        rates_of_length(drafts.length, drafts.drafts), lambda all_before, rate: all_before * rate
    )
    tokens = itertools.accumulate(accepted, initial=1.0)
    next(tokens)
    gains = (
        found / draft_cost(cost, time, inputs + outputs // 2, requests, count) for count, found in enumerate(tokens, 1)
    )
    return max(1.0, *gains)


def _with_drafts(config: EngineConfig, model: Report, measured: Report) -> EngineConfig:
    """The config of the run. A head in a checkpoint of its own has its config beside the model's, in bench/configs."""
    own = dict(measured["options"]["speculative_config"])
    if "model" in own:
        own["model"] = str(_head_of(model))
    sizes = {key: measured["options"][key] for key in ("max_model_len", "max_num_seqs")}
    return dataclasses.replace(config, speculative_config=own, **sizes)


def _head_of(model: Report) -> Path:
    released = released_config(model)
    for folder in CONFIGS.glob("*_eagle3"):
        target = folder.with_name(folder.name.removesuffix("_eagle3")) / "config.json"
        if json.loads(target.read_text()) == released:
            return folder
    raise ValueError(f"bench/configs has no EAGLE3 head of {model['described']}")


def page(gains: Sequence[Gain]) -> str:
    """The comparison for people."""
    lines = ["| model | case | drafts | without / with | possible | of that |", f"|{'---|' * 3}{'---:|' * 3}"]
    for gain in gains:
        numbers = f"{gain.found:.2f} | {gain.possible:.2f} | {100 * gain.found / gain.possible:.0f} %"
        lines.append(f"| {gain.model} | {gain.case} | {gain.drafts} | {numbers} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--chip", default="h200", choices=list(FIGURES), help="that the files were measured on")
    given = parser.parse_args(arguments)
    gains = read(given.files, FIGURES[given.chip])
    print(page(gains))
    return int(any(gain.found < 1 for gain in gains))


if __name__ == "__main__":
    sys.exit(main())
