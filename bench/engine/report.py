"""What a run of `bench/engine.py` leaves: JSON, a table and a plot; and joining what several runs found.

With `--roofline`: JSON and a table for each kind of step.
"""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allotrope.rank_layout import RankLayout

OURS = "allotrope"
HOSTED = {f"{host}+{OURS}": host for host in ("vllm", "sglang")}
"""A host with our plugin -> the host."""

# Measure -> how it is called in a table, digits, whether it is worth a ratio: those are the better the smaller.
MEASURES = {
    "prefill_s": ("prefill s", 3, True),
    "tpot_ms": ("TPOT ms", 2, True),
    "tokens_per_s": ("tokens/s in and out", 0, False),
    "distinct": ("distinct tokens in a step", 2, False),
    "accepted": ("tokens of a request in a step", 2, False),
}
# What must be equal for two runs to be of one kind.
SETTINGS = ("seed", "prefix_caching", "parity_tokens")

Report = dict[str, Any]


def merged(old: Report, new: Report) -> Report:
    """Both reports as one; where both have a case of an engine, the newer counts, and all starts are kept.

    Raises ValueError if they are not of the same files, settings and options.
    """
    differing = [key for key in SETTINGS if old["settings"][key] != new["settings"][key]]
    if differing:
        raise ValueError(f"settings differ: {', '.join(differing)}")
    models = dict(old["models"])
    for name, model in new["models"].items():
        before = models.get(name)
        if before is None:
            models[name] = model
            continue
        if before["digest"] != model["digest"]:
            raise ValueError(f"{name} is not the same checkpoint in both (digests differ)")
        engines = dict(before["engines"])
        for engine, found in model["engines"].items():
            engines[engine] = _merged_engine(f"{name}, {engine}", engines.get(engine), found)
        models[name] = model | {"engines": engines}
    commands = [*old["commands"], *(one for one in new["commands"] if one not in old["commands"])]
    return new | {"commands": commands, "models": models}


def _merged_engine(what: str, old: Report | None, new: Report) -> Report:
    if old is None:
        return new
    if old["options"] != new["options"]:
        raise ValueError(f"{what}: options differ: {old['options']} and {new['options']}")
    cases, starts = {**old["cases"], **new["cases"]}, [*old["start_s"], *new["start_s"]]
    return (
        old
        | {key: value for key, value in new.items() if value}
        | {
            "cases": cases,
            "start_s": starts,
            "error": new["error"],
        }
    )


@dataclass(frozen=True)
class Speculation:
    """`drafts`: most draft tokens of a request in a step. `length`: mean tokens of a request in a step, forced; None:
    those that are right. `method`: who drafts."""

    method: str
    drafts: int
    length: float | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.drafts}" + ("" if self.length is None else f"/{self.length:g}")


@dataclass(frozen=True)
class Column:
    """What a column of tables measures: an engine, in a layout of ranks, with drafts or without. Its text is its
    name."""

    engine: str
    layout: RankLayout = RankLayout()
    speculation: Speculation | None = None

    def __str__(self) -> str:
        layout = "" if self.layout == RankLayout() else f" {self.layout.name}"
        return f"{self.engine}{layout}" + ("" if self.speculation is None else f" {self.speculation}")

    @classmethod
    def of(cls, name: str) -> Column:
        """The column with that name."""
        found = _COLUMN.fullmatch(name)
        assert found is not None, name
        engine, layout, method, drafts, length = found.groups()
        speculation = Speculation(method, int(drafts), float(length) if length else None) if method else None
        return cls(engine, RankLayout.named(layout) if layout else RankLayout(), speculation)

    @property
    def plain(self) -> Column:
        """The same without drafts."""
        return replace(self, speculation=None)

    @property
    def has_own_tokens(self) -> bool:
        """Whether its tokens are the model's: no draft is accepted that is wrong."""
        return self.speculation is None or self.speculation.length is None


_COLUMN = re.compile(r"(\S+?)(?: ([TDP]P\d+(?: [TDP]P\d+)*(?: EP)?))?(?: (\w+) (\d+)(?:/([\d.]+))?)?")


def summarize(report: Report) -> Report:
    """The report with what its engines have in common: equal tokens (`parity`), logprobs (`apart`), medians (`ratios`).

    By the column that ours is held against, or for ratios by "one / other" as tables name it; above 1 the other is
    faster.
    """
    models = {}
    for name, model in report["models"].items():
        engines = model["engines"]
        models[name] = model | {
            "parity": {
                other: parity(engines[own]["parity_ids"], engines[other]["parity_ids"])
                for other, own in baselines(engines).items()
                if Column.of(other).has_own_tokens
            },
            "apart": {who: apart(engines[own].get("forced", []), other) for who, own, other in forced(engines)},
            "ratios": {f"{one} / {base}": ratios(engines[base], engines[one]) for base, one in compared_pairs(engines)},
        }
    return report | {"models": models}


def baselines(engines: Report) -> dict[str, str]:
    """The columns that are held against one of ours: a peer against ours with the same layout and drafts, ours with
    drafts against ours without, ours with several ranks against ours with one."""
    found = {}
    for name in engines:
        column = Column.of(name)
        own = replace(column, engine=OURS)
        if column.engine == OURS:
            own = Column(OURS) if column.speculation is None else column.plain
        if str(own) in engines and own != column:
            found[name] = str(own)
    return found


def forced(engines: Report) -> list[tuple[str, str, list[list[dict[str, float]]]]]:
    """What is held against our logprobs of the forced texts: who, which column of ours, and the logprobs; those of each
    text alone are held against those of all together."""
    found = [(name, own, engines[name].get("forced", [])) for name, own in baselines(engines).items()]
    alone = [(name, one.get("forced_alone")) for name, one in engines.items() if Column.of(name).engine == OURS]
    return found + [(f"{name} with each text alone", name, values) for name, values in alone if values]


def compared_pairs(engines: Report) -> list[tuple[str, str]]:
    """Which columns are compared, the one that should be faster first: ours and each peer, ours with several ranks and
    with one, a host with our plugin and the host as it is, and each engine with drafts and without."""
    pairs = []
    for name, own in baselines(engines).items():
        pairs.append((name, own) if Column.of(name).engine == OURS else (own, name))
    for name in engines:
        column = Column.of(name)
        host = str(replace(column, engine=HOSTED.get(column.engine, "")))
        if host in engines:
            pairs.append((name, host))
        if column.engine != OURS and column.speculation is not None and str(column.plain) in engines:
            pairs.append((name, str(column.plain)))
    return pairs


def parity(ours: list[list[int]], theirs: list[list[int]]) -> list[int]:
    """For each prompt, how many leading tokens are equal."""
    found = []
    for mine, other in zip(ours, theirs, strict=False):
        pairs = list(zip(mine, other, strict=False))
        found.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)))
    return found


def apart(ours: list[list[dict[str, float]]], theirs: list[list[dict[str, float]]]) -> Report:
    """How far logprobs of the same ids at the same places of the same texts differ. Empty if there are none.

    `median` and `most`: of the places, each counted by the mean over its ids.
    """
    places = [pair for one, other in zip(ours, theirs, strict=False) for pair in zip(one, other, strict=False)]
    common = [[abs(mine[id] - other[id]) for id in mine.keys() & other.keys()] for mine, other in places]
    found = [statistics.fmean(values) for values in common if values]
    if not found:
        return {}
    return {"places": len(found), "median": statistics.median(found), "most": max(found)}


def holds(found: Report, case: str) -> bool:
    """Whether the caches of an engine hold all requests of a case at once; if nobody says how much they hold, they
    do."""
    inputs, outputs, requests = map(int, case.split("/"))
    return not found.get("kv_tokens") or requests * (inputs + outputs) <= found["kv_tokens"]


def held_cases(found: Report) -> Report:
    """The cases of an engine in which no request waited for the caches that others took."""
    return {case: times for case, times in found["cases"].items() if holds(found, case)}


def ratios(ours: Report, theirs: Report) -> Report:
    """Medians of theirs over those of ours, of the start and of each case that both have, and hold at once."""
    found: Report = {}
    if ours["start_s"] and theirs["start_s"]:
        found["start_s"] = statistics.median(theirs["start_s"]) / statistics.median(ours["start_s"])
    for case, mine in ours["cases"].items():
        other = theirs["cases"].get(case)
        if other is not None and holds(ours, case) and holds(theirs, case):
            found[case] = {
                key: statistics.median(other[key]) / statistics.median(mine[key])
                for key, (_, _, compared) in MEASURES.items()
                if compared
            }
    return found


def write_report(out: Path, report: Report) -> list[Path]:
    """Write `out`.json, `out`.md and, if matplotlib is there and anything was timed, `out`.png. Returns the paths."""
    paths = [write_json(out, report), out.with_name(out.name + ".md")]
    report = summarize(report)
    paths[1].write_text(page(report))
    timed = any(engine["cases"] for model in report["models"].values() for engine in model["engines"].values())
    if timed and importlib.util.find_spec("matplotlib"):
        paths.append(out.with_name(out.name + ".png"))
        _plot(paths[2], report)
    return paths


def write_json(out: Path, report: Report) -> Path:
    """Write `out`.json alone: what is found so far, summarized."""
    return write_json_alone(out, summarize(report))


def write_json_alone(out: Path, report: Report) -> Path:
    """Write `out`.json, with the numbers of a list side by side: a line for each of them would be thousands."""
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(out.name + ".json")
    path.write_text(_NUMBERS.sub(lambda found: " ".join(found[0].split()), json.dumps(report, indent=1)) + "\n")
    return path


_NUMBERS = re.compile(r'\[\s+(?:[-\d.e]+,?\s+)+\]|\{\s+(?:"\d+": [-\d.e]+,?\s+)+\}')


def page(report: Report) -> str:
    """The report in Markdown."""
    settings = report["settings"]
    caching = "on" if settings["prefix_caching"] else "off"
    lines = [
        "# Engines",
        "",
        f"Random weights and prompts, greedy, prefix caches {caching}; median of {settings['runs']} runs (minimum to "
        f"maximum). A ratio A / B above 1 means that B is faster. {report['date']}.",
        *_overview(report["models"]),
    ]
    for name, model in report["models"].items():
        lines += [
            "",
            f"## {name}",
            "",
            f"{model['described']}",
            "",
            *_table(model),
            *_speculation(model),
            "",
            *_remarks(model, settings),
        ]
    lines += ["", "## Commands", "", "\n\n".join(f"`{command}`" for command in report["commands"])]
    return "\n".join(lines) + "\n"


def _overview(models: Report) -> list[str]:
    """A row of ratios for each model and pair of engines, where there are several."""
    pairs = [(name, pair, found) for name, model in models.items() for pair, found in _plain_ratios(model) if found]
    if len(pairs) < 2:
        return []
    cases = list(dict.fromkeys(case for _, _, found in pairs for case in found if case != "start_s"))
    shown = [(case, key, label) for key, (label, _, compared) in MEASURES.items() if compared for case in cases]
    head = ["", "", "start", *(f"{label.partition(' ')[0]} {case}" for case, _, label in shown)]
    lines = ["", *_head(head)]
    for name, pair, found in pairs:
        ratio = [found.get("start_s"), *(found.get(case, {}).get(key) for case, key, _ in shown)]
        lines.append(_line([name, pair, *_times(ratio)]))
    return lines


def _table(model: Report) -> list[str]:
    engines = _plain(model["engines"])
    shown = [pair for pair, _ in _plain_ratios(model)]
    head = ["case", "", *engines, *shown]
    lines = _head(head)
    starts = {engine: found["start_s"] for engine, found in engines.items()}
    lines.append(_row("", "start s", 1, starts, [model["ratios"][pair].get("start_s") for pair in shown]))
    if any(layout != RankLayout(layout.tensor) for layout in (Column.of(name).layout for name in engines)):
        # What tells such layouts apart beside their times.
        fits = {engine: [found["kv_tokens"]] if found["kv_tokens"] else [] for engine, found in engines.items()}
        lines.append(_row("", "tokens of context that fit", 0, fits, [None] * len(shown)))
    cases = dict.fromkeys(case for found in engines.values() for case in found["cases"])
    for case in cases:
        for key, (label, digits, compared) in MEASURES.items():
            numbers = {engine: found["cases"].get(case, {}).get(key, []) for engine, found in engines.items()}
            ratio = [model["ratios"][pair].get(case, {}).get(key) if compared else None for pair in shown]
            if any(numbers.values()):
                lines.append(_row(case, label, digits, numbers, ratio))
    return lines


def _plain(engines: Report) -> Report:
    """The columns without drafts."""
    return {name: found for name, found in engines.items() if Column.of(name).speculation is None}


def _plain_ratios(model: Report) -> list[tuple[str, Report]]:
    names = _plain(model["engines"]).keys()
    return [(pair, found) for pair, found in model["ratios"].items() if names >= set(pair.split(" / "))]


def _speculation(model: Report) -> list[str]:
    """A row for each case and kind of drafts, if any was measured: what drafts gain each engine, and ours beside it."""
    engines = model["engines"]
    columns = [Column.of(name) for name in engines]
    bases = list(dict.fromkeys(column.plain for column in columns if column.speculation is not None))
    if not bases:
        return []
    peers = [base for base in bases if base.engine != OURS]
    head = ["case", "drafts"]
    for base in bases:
        head += [f"{base} TPOT ms", "tokens a step", "without / with"]
    head += [f"{base} / {replace(base, engine=OURS)}" for base in peers]
    lines = ["", *_head(head)]
    cases = dict.fromkeys(case for found in engines.values() for case in found["cases"])
    kinds = dict.fromkeys(column.speculation for column in columns if column.speculation is not None)
    for case in cases:
        for kind in kinds:
            cells = [case, str(kind)]
            for base in bases:
                column = str(replace(base, speculation=kind))
                numbers = engines.get(column, {"cases": {}})["cases"].get(case, {})
                cells += [_spread(numbers.get("tpot_ms", []), 2), _spread(numbers.get("accepted", []), 2)]
                cells += _times([_tpot_ratio(model, f"{base} / {column}", case)])
            for base in peers:
                theirs, ours = (replace(base, engine=engine, speculation=kind) for engine in (base.engine, OURS))
                cells += _times([_tpot_ratio(model, f"{theirs} / {ours}", case)])
            lines.append(_line(cells))
    return lines


def _tpot_ratio(model: Report, pair: str, case: str) -> float | None:
    ratio: float | None = model["ratios"].get(pair, {}).get(case, {}).get("tpot_ms")
    return ratio


def _row(case: str, label: str, digits: int, numbers: dict[str, list[float]], ratio: list[float | None]) -> str:
    cells = [case, label, *(_spread(found, digits) for found in numbers.values())]
    return _line([*cells, *_times(ratio)])


def _head(names: list[str]) -> list[str]:
    """Of a table whose first two columns are words."""
    return [_line(names), "|---|---|" + "---:|" * (len(names) - 2)]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _times(ratios: list[float | None]) -> list[str]:
    return ["" if one is None else f"{one:.2f}×" for one in ratios]


def _spread(numbers: list[float], digits: int) -> str:
    if not numbers:
        return "–"
    middle = f"{statistics.median(numbers):.{digits}f}"
    return middle if len(numbers) == 1 else f"{middle} ({min(numbers):.{digits}f}–{max(numbers):.{digits}f})"


def _remarks(model: Report, settings: Report) -> list[str]:
    lines = []
    for engine, found in model["engines"].items():
        where = found["environment"]
        parts = [f"{where[key]}" if key == "device" else f"{key} {where[key]}" for key in where]
        if found["kv_tokens"]:
            parts.append(f"caches of {found['kv_tokens']} tokens")
        parts += [
            f"{key.removesuffix('_gb').replace('_', ' ')} {value:.1f} GB" for key, value in found["memory"].items()
        ]
        parts.append(f"options {json.dumps(found['options'])}")
        lines.append(f"- {engine}: {'; '.join(parts)}.")
        waited = [case for case in found["cases"] if not holds(found, case)]
        if waited:
            lines.append(f"- {engine}: requests of {', '.join(waited)} waited for others, as its caches hold no more.")
        if found["error"]:
            lines.append(f"- **{engine} did not finish**: {found['error']}")
    baseline = baselines(model["engines"])
    for other, common in model["parity"].items():
        shown = ", ".join(map(str, common)) or "not compared"
        first = f"{baseline[other]} and {other}: equal leading tokens of {settings['parity_tokens']}"
        lines.append(f"- {first}, by prompt: {shown}.")
    for who, own, _ in forced(model["engines"]):
        found, by = model["apart"][who], model["engines"].get(who, {}).get("forced_by", "decode")
        if found:
            them = f"{own} and {who}" + ("" if by == "decode" else f" (by a {by})")
            lines.append(
                f"- {them}, logprobs of forced texts: they differ by {found['median']:.3f} in the median of "
                f"{found['places']} positions, by {found['most']:.3f} in the worst."
            )
    return lines


def _plot(path: Path, report: Report) -> None:
    """Bars by case and engine, with least and most; one line of plots for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [key for key, (_, _, compared) in MEASURES.items() if compared]
    models = report["models"]
    figure, grid = pyplot.subplots(
        len(models), len(shown), figsize=(6 * len(shown), 3.4 * len(models) + 1), squeeze=False
    )
    for line, (name, model) in zip(grid, models.items(), strict=True):
        for axes, key in zip(line, shown, strict=True):
            _bars(axes, _plain(model["engines"]), key)
            axes.set_title(f"{name}: {MEASURES[key][0]}")
    figure.text(0.01, 0.005, f"{report['date']}; commands: {path.with_suffix('.json').name}", fontsize=8)
    figure.tight_layout(rect=(0, 0.1 / (len(models) + 1), 1, 1))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _bars(axes: Any, engines: Report, key: str) -> None:
    cases = list(dict.fromkeys(case for found in engines.values() for case in found["cases"]))
    width = 0.8 / max(len(engines), 1)
    for number, (engine, found) in enumerate(engines.items()):
        own = [case for case in cases if case in found["cases"]]
        if not own:
            continue
        places = [cases.index(case) + (number - (len(engines) - 1) / 2) * width for case in own]
        numbers = [found["cases"][case][key] for case in own]
        middle = [statistics.median(values) for values in numbers]
        below = [m - min(values) for m, values in zip(middle, numbers, strict=True)]
        above = [max(values) - m for m, values in zip(middle, numbers, strict=True)]
        axes.bar(places, middle, width, yerr=[below, above], capsize=2, label=engine, color=f"C{number}")
    axes.set_xticks(range(len(cases)), cases)
    axes.set_xlabel("input / output / requests at once")
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
