"""The cost model of `allotrope plan` against measured steps, with its error on those that it was not fitted to.

    python bench/engine/cost_model.py                                      the results in bench/results
    python bench/engine/cost_model.py bench/results/engine_h200.json --out /tmp/cost_model

Reads results of `bench/engine.py`: of our engine on one GPU without drafts, the time per output token and the seconds
of a batch of prompts. For each of them it counts what the steps must move and compute
(`engine/planning/step_cost.py`), and fits the seven constants of `engine/planning/step_time.py`. Needs no GPU. The
files of the fit were measured with eager prefill steps; later ones, with prefill steps as CUDA graphs, stand beside
the same constants.

The error is that of cases that were left out of the fit: those with 16 requests, and all those of a model, each model
in its turn. The constants of a fit to everything are those of `kernels/chip_figures.py`; `--check` ends with 1 if they
are not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from allotrope.config import EngineConfig  # noqa: E402
from allotrope.engine.load_plan import resolve_load_plan  # noqa: E402
from allotrope.engine.planning.step_cost import ModelCost, StepWork  # noqa: E402
from allotrope.engine.planning.step_time import StepTime  # noqa: E402
from allotrope.graphs.piecewise_graphs import MOST_TOKENS  # noqa: E402
from allotrope.kernels.chip_figures import FIGURES, FITTED, ChipFigures, Fitted  # noqa: E402
from bench.engine.report import OURS, Report, held_cases, write_json_alone  # noqa: E402
from bench.random_weights import with_layers  # noqa: E402

RESULTS, CONFIGS = ROOT / "bench" / "results", ROOT / "bench" / "configs"
FILES = ("engine_h200.json", "engine_h200_speculation.json")
# Of runs whose prefill steps were replayed as graphs.
NEWER = ("engine_h200_ranks.json", "engine_h200_ranks_ours.json", "engine_h200_ranks_whole.json")
# Offline, a step reads so many tokens of prompts (`LLM`).
STEP_TOKENS = 16384
# Requests at once of the cases that are left out of the first split.
LEFT_OUT = 16
# The largest mean error of what was left out.
MAX_ERROR = 0.15
# Before a fit, from experience with GPUs; a constant that no case of a split tells anything about stays near it.
START = Fitted(step=2e-4, launch=2.5e-6, bytes=1.1, flops=1.2, passed=2.0, prompts=5e-3, host_launch=1e-4)
PRIOR = 0.01
DECODE, PROMPTS = "decode", "prompts"


@dataclass(frozen=True)
class Case:
    """A measured case, and what its steps do. `requests`, `inputs`: of `case`. `decode`: a step in the middle of the
    answers. `prompts`: the steps that read the prompts. `seconds`: measured, by kind of step. `graphs`: of each step
    with prompts, whether it may have been replayed as graphs; default: none."""

    model: str
    layers: int
    case: str
    requests: int
    decode: StepWork
    prompts: tuple[StepWork, ...]
    seconds: dict[str, float]
    graphs: tuple[bool, ...] = ()

    def expected(self, time: StepTime) -> dict[str, float]:
        """Seconds by kind of step, as `time` has them."""
        return {DECODE: time.decode(self.decode), PROMPTS: time.prompts(self.prompts, self.graphs)}

    def errors(self, time: StepTime) -> dict[str, float]:
        """How much longer than measured, by kind of step."""
        return {kind: seconds / self.seconds[kind] - 1 for kind, seconds in self.expected(time).items()}


def read_cases(files: Sequence[Path], figures: ChipFigures, *, graphs: bool = False) -> list[Case]:
    """The cases of our engine on one GPU and without drafts, of models whose config is in bench/configs. `graphs`:
    prefill steps were replayed as graphs."""
    found = []
    for file in files:
        for name, model in json.loads(file.read_text())["models"].items():
            measured = model["engines"].get(OURS)
            if measured is not None:
                found += _cases(name, model, released_config(model), measured, figures, graphs=graphs)
    return found


def released_config(model: Report) -> dict[str, Any]:
    """The config in bench/configs of a measured model's architecture."""
    architecture = model["described"].split(", ")[0]
    for path in sorted(CONFIGS.glob("*/config.json")):
        config: dict[str, Any] = json.loads(path.read_text())
        if architecture in config["architectures"]:
            return config
    raise ValueError(f"bench/configs has no {architecture}")


@contextlib.contextmanager
def sliced(model: Report, released: dict[str, Any], measured: dict[str, Any]) -> Iterator[EngineConfig]:
    """The config of a measured model: the first layers of a released one, with the types of the run."""
    options = {key: measured["options"][key] for key in ("state_dtype", "kv_cache_dtype") if key in measured["options"]}
    if options.get("kv_cache_dtype") == "fp8_scaled":
        # Its name when the file was written.
        options["kv_cache_dtype"] = "fp8_ds_mla"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(with_layers(released, layers_of(model))))
        yield EngineConfig(model=folder, load_format="dummy", **options)


def layers_of(model: Report) -> int:
    """How many layers a measured model has, as its description says."""
    return int(model["described"].split(", ")[1].partition(" ")[0])


def seconds_of(times: dict[str, Any]) -> dict[str, float]:
    """Medians of a case, by kind of step."""
    return {DECODE: statistics.median(times["tpot_ms"]) / 1e3, PROMPTS: statistics.median(times["prefill_s"])}


def batches(requests: int, inputs: int) -> list[int]:
    """Prompts of each step that reads `requests` prompts."""
    whole, rest = divmod(requests, max(STEP_TOKENS // inputs, 1))
    return [max(STEP_TOKENS // inputs, 1)] * whole + [rest] * bool(rest)


def _cases(
    name: str, model: Report, released: dict[str, Any], measured: dict[str, Any], figures: ChipFigures, *, graphs: bool
) -> list[Case]:
    with sliced(model, released, measured) as config:
        cost = ModelCost(resolve_load_plan(config, chip=figures.chip, available=int(figures.memory.value)))
    found = []
    for case, times in held_cases(measured).items():
        inputs, outputs, requests = map(int, case.split("/"))
        sizes = batches(requests, inputs)
        steps = tuple(cost.work((inputs,) * n, (inputs,) * n) for n in sizes)
        decode = cost.work((1,) * requests, (inputs + outputs // 2,) * requests)
        replayed = tuple(graphs and n * inputs <= MOST_TOKENS for n in sizes)
        found.append(Case(name, layers_of(model), case, requests, decode, steps, seconds_of(times), replayed))
    return found


def fit(cases: Sequence[Case], figures: ChipFigures) -> Fitted:
    """The constants with the least sum of squares of log(expected / measured), by steps along one constant at a time;
    `PRIOR` keeps what no case tells anything about near `START`."""

    def loss(constants: Fitted) -> float:
        time = StepTime(figures, constants)
        errors = [error for case in cases for error in case.errors(time).values()]
        apart = (
            math.log(getattr(constants, one.name) / getattr(START, one.name)) for one in dataclasses.fields(Fitted)
        )
        return sum(math.log1p(error) ** 2 for error in errors) + PRIOR * sum(one**2 for one in apart)

    best, step = START, 0.3
    least = loss(best)
    while step > 1e-3:
        before = least
        for field in dataclasses.fields(Fitted):
            for factor in (1 + step, 1 / (1 + step)):
                other = dataclasses.replace(best, **{field.name: getattr(best, field.name) * factor})
                if (value := loss(other)) < least:
                    best, least = other, value
        if before - least < 1e-9:
            step /= 2
    return best


Held = tuple[tuple[Case, dict[str, float]], ...]
"""Cases, each with its errors by kind of step."""


@dataclass(frozen=True)
class Split:
    """`left_out`: the cases that a fit did not see."""

    name: str
    constants: Fitted
    left_out: Held

    def mean(self, kind: str) -> float:
        """The mean of the absolute errors."""
        return statistics.mean(abs(errors[kind]) for _, errors in self.left_out)


def split(name: str, cases: Sequence[Case], figures: ChipFigures, left_out: Callable[[Case], bool]) -> Split:
    """Fit to the others, and hold the constants against those that are left out."""
    constants = fit([case for case in cases if not left_out(case)], figures)
    return Split(name, constants, held([case for case in cases if left_out(case)], StepTime(figures, constants)))


def held(cases: Sequence[Case], time: StepTime) -> Held:
    """Each case, held against `time`."""
    return tuple((case, case.errors(time)) for case in cases)


def splits(cases: Sequence[Case], figures: ChipFigures) -> list[Split]:
    """The cases of 16 requests left out; then each model in its turn."""
    by_size = split(f"{LEFT_OUT} requests", cases, figures, lambda case: case.requests == LEFT_OUT)
    return [by_size, *(_without(model, cases, figures) for model in dict.fromkeys(case.model for case in cases))]


def _without(model: str, cases: Sequence[Case], figures: ChipFigures) -> Split:
    return split(f"all of {model}", cases, figures, lambda case: case.model == model)


def make_report(files: Sequence[Path], newer: Sequence[Path], figures: ChipFigures) -> Report:
    """Fit to `files`, leave out and compare; compare with `newer`."""
    cases = read_cases(files, figures)
    found = splits(cases, figures)
    constants = rounded(fit(cases, figures))
    time = StepTime(figures, constants)
    return {
        "command": "python bench/engine/cost_model.py",
        "chip": figures.about,
        "files": [file.name for file in files],
        "constants": dataclasses.asdict(constants),
        "all": _rows(held(cases, time)),
        "newer": _rows(held(read_cases(newer, figures, graphs=True), time)),
        "splits": [
            {
                "left_out": one.name,
                "constants": dataclasses.asdict(rounded(one.constants)),
                "mean_error": {kind: one.mean(kind) for kind in (DECODE, PROMPTS)},
                "rows": _rows(one.left_out),
            }
            for one in found
        ],
        "mean_error": {
            "by_size": {kind: found[0].mean(kind) for kind in (DECODE, PROMPTS)},
            "by_model": {
                kind: statistics.mean(abs(errors[kind]) for one in found[1:] for _, errors in one.left_out)
                for kind in (DECODE, PROMPTS)
            },
        },
    }


def _rows(found: Held) -> list[Report]:
    return [
        {"model": case.model, "layers": case.layers, "case": case.case, "seconds": case.seconds, "errors": errors}
        for case, errors in found
    ]


def rounded(constants: Fitted) -> Fitted:
    """With three digits, as they are written down."""
    return Fitted(**{name: float(f"{value:.3g}") for name, value in dataclasses.asdict(constants).items()})


def page(report: Report) -> str:
    """The report for people."""
    lines = ["# Cost model", "", f"`{report['command']}`: {report['chip']}, {', '.join(report['files'])}.", ""]
    lines += ["| left out of the fit | cases | decode step | batch of prompts |", "|---|---|---|---|"]
    for one in report["splits"]:
        means = (f"{100 * one['mean_error'][kind]:.1f} %" for kind in (DECODE, PROMPTS))
        lines.append(f"| {one['left_out']} | {len(one['rows'])} | {' | '.join(means)} |")
    means = (f"{100 * report['mean_error']['by_model'][kind]:.1f} %" for kind in (DECODE, PROMPTS))
    lines.append(f"| each model in its turn | {len(report['all'])} | {' | '.join(means)} |")
    constants = ", ".join(f"`{name}` {value:.3g}" for name, value in report["constants"].items())
    lines += ["", f"Constants of a fit to all cases: {constants}.", "", "## Errors by case", ""]
    lines += ["| model | case | step ms | 16 left out | model left out | prompts s | 16 left out | model left out |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    errors: dict[tuple[str, int, str], dict[str, dict[str, float]]] = {}
    for one in report["splits"]:
        which = "model" if one["left_out"].startswith("all of") else "size"
        for row in one["rows"]:
            errors.setdefault((row["model"], row["layers"], row["case"]), {})[which] = row["errors"]
    for row in report["all"]:
        found, seconds = errors[row["model"], row["layers"], row["case"]], row["seconds"]
        cells = [f"{row['model']}, {row['layers']} layers", row["case"]]
        for kind, measured in ((DECODE, f"{1e3 * seconds[DECODE]:.2f}"), (PROMPTS, f"{seconds[PROMPTS]:.3f}")):
            shown = (f"{100 * found[by][kind]:+.0f} %" if by in found else "" for by in ("size", "model"))
            cells += [measured, *shown]
        lines.append(f"| {' | '.join(cells)} |")
    if report["newer"]:
        lines += ["", "## With prefill steps as graphs", "", "| model | case | step ms | error | prompts s | error |"]
        lines += ["|---|---|---|---|---|---|"]
    for row in report["newer"]:
        seconds, off = row["seconds"], {kind: f"{100 * error:+.0f} %" for kind, error in row["errors"].items()}
        times = f"{1e3 * seconds[DECODE]:.2f} | {off[DECODE]} | {seconds[PROMPTS]:.3f} | {off[PROMPTS]}"
        lines.append(f"| {row['model']}, {row['layers']} layers | {row['case']} | {times} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[RESULTS / name for name in FILES], metavar="FILE")
    newer = [RESULTS / name for name in NEWER]
    parser.add_argument("--newer", nargs="*", type=Path, default=newer, help="of runs that are not fitted to")
    parser.add_argument("--chip", default="h200", choices=list(FIGURES), help="that the files were measured on")
    parser.add_argument("--out", type=Path, default=RESULTS / "cost_model_h200", help="path without ending")
    parser.add_argument("--check", action="store_true", help="write nothing; compare with the constants in use")
    given = parser.parse_args(arguments)
    report = make_report(given.files, given.newer, FIGURES[given.chip])
    print(page(report))
    if given.check:
        return int(report["constants"] != dataclasses.asdict(FITTED))
    write_json_alone(given.out, report)
    errors = [report["mean_error"][by][kind] for by in ("by_size", "by_model") for kind in (DECODE, PROMPTS)]
    return int(max(errors) > MAX_ERROR)


if __name__ == "__main__":
    sys.exit(main())
