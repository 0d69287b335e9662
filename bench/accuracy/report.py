"""The accuracy table: cells of the reports of `allotrope eval`, joined over machines, in Markdown."""

from __future__ import annotations

from typing import Any

MODES = ("cold", "warm", "chunked", "preempted", "two-ranks", "speculated")

# In place of a mode: what became of the whole run.
ALL_MODES = "all"


def cells_of(place: dict[str, str], report: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each mode of a run's report. `place`: what the run's cells have in common."""
    if "refused" in report:
        return [place | {"mode": "", "state": "refused", "reason": report["refused"]}]
    if "failed" in report:
        return [place | {"mode": "", "state": "red", "outside": [], "reason": report["failed"]}]
    cells = []
    for mode in report["modes"]:
        figures = {one["name"]: one["value"] for one in mode["figures"]}
        outside = [
            {"figure": one["figure"], "value": figures[one["figure"]], "difference": one["difference"]}
            for one in report["differences"]
            if one["mode"] == mode["name"] and not one["inside"]
        ]
        unequal = report["unequal_answers"].get(mode["name"], {})
        cells.append(
            place
            | {
                "mode": mode["name"],
                "state": "red" if outside else "green",
                "text": figures.get("text"),
                "recall": figures.get("recall"),
                "acceptance_length": figures.get("acceptance length"),
                "other_answers": sum(count for count, _ in unequal.values()),
                "answers": sum(total for _, total in unequal.values()),
                "outside": outside,
                "remark": mode["remark"],
            }
        )
    for one in report["skipped"]:
        state = "red" if one["broken"] else "not exercised"
        cells.append(place | {"mode": one["name"], "state": state, "outside": [], "reason": one["reason"]})
    return cells


def reference_of(weights: str, report: dict[str, Any]) -> dict[str, Any]:
    """The reference's figures, and what Transformers has. `weights`: which the model has."""
    found = {
        "weights": weights,
        "architecture": report["architecture"],
        "items": report["items"],
        "figures": report["modes"][0]["figures"],
    }
    if report["baseline"] is not None:
        found["transformers"] = {
            "figures": report["baseline"]["figures"],
            "inside": report["passed"],
            "other_answers": sum(count for count, _ in report["unequal_answers"]["cold"].values()),
            "seconds": report["baseline"]["seconds"],
        }
    return found


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new` in place of what `old` has of the same cells. Cells of other weights of a model are dropped, and those of
    all modes of a run that failed as a whole."""
    references = old.get("references", {}) | new["references"]
    for name, one in new["references"].items():
        # A run without Transformers says nothing against an earlier one with it.
        before = old.get("references", {}).get(name, {})
        if "transformers" not in one and before.get("weights") == one["weights"] and "transformers" in before:
            references[name] = before

    def key(cell: dict[str, Any]) -> tuple[str, ...]:
        return cell["model"], cell["host"], cell["device"], cell["dtype"]

    done: dict[tuple[str, ...], set[str]] = {}
    for cell in new["cells"]:
        done.setdefault(key(cell), {""}).add(cell["mode"] or ALL_MODES)
    kept = [
        cell
        for cell in old.get("cells", [])
        if not {cell["mode"], ALL_MODES} & done.get(key(cell), set())
        and cell["weights"] == references[cell["model"]]["weights"]
    ]
    (run,) = new["runs"]
    runs = [
        one for one in old.get("runs", []) if one["place"] != run["place"] or not set(one["modes"]) <= set(run["modes"])
    ]
    runs.append(run)
    return {
        "references": dict(sorted(references.items())),
        # Stable: dtypes and modes stay in the order in which they ran.
        "cells": sorted(kept + new["cells"], key=lambda cell: (cell["model"], cell["host"], cell["device"])),
        "runs": runs,
    }


def page(results: dict[str, Any]) -> str:
    """The stored results in Markdown."""
    lines = ["# Accuracy", "", *map(_run_line, results["runs"]), "", *_summary(results)]
    for name in results["references"]:
        lines += ["", f"## {name}", "", *_table([cell for cell in results["cells"] if cell["model"] == name])]
    return "\n".join(lines) + "\n"


def _run_line(run: dict[str, Any]) -> str:
    about = f"{run['seconds']:.0f} s, {run['device']}, torch {run['torch']}, {run['date']}"
    return f"- {run['place']}: `{run['command']}`, {about}"


def _summary(results: dict[str, Any]) -> list[str]:
    """The reference of each model, and how many cells of each host and device are in its intervals."""
    places = sorted({(cell["host"], cell["device"]) for cell in results["cells"]})
    heads = [f"{host}, {device}" for host, device in places]
    lines = [
        f"| model | architecture | bits per byte | recall | Transformers | {' | '.join(heads)} |",
        "|---|---|---:|---:|---|" + "---:|" * len(heads),
    ]
    for name, one in results["references"].items():
        figures = {figure["name"]: figure for figure in one["figures"]}
        kind = one["architecture"].removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
        row = [f"`{name}`", kind, _interval(figures["text"], 4), _interval(figures["recall"], 3)]
        row.append(_against_transformers(one.get("transformers")))
        for place in places:
            cells = [
                cell for cell in results["cells"] if (cell["model"], cell["host"], cell["device"]) == (name, *place)
            ]
            compared = [cell for cell in cells if cell["state"] in ("green", "red")]
            green = sum(cell["state"] == "green" for cell in compared)
            shown = f"{green} of {len(compared)}" if compared else "not run"
            row.append(shown if green == len(compared) else f"**{shown}**")
        lines.append(f"| {' | '.join(row)} |")
    return lines


def _against_transformers(theirs: dict[str, Any] | None) -> str:
    if theirs is None:
        return "not run"
    return f"{'inside' if theirs['inside'] else '**outside**'}, {theirs['other_answers'] or 'no'} other answers"


def _table(cells: list[dict[str, Any]]) -> list[str]:
    """One row for each host, device and dtype of a model, and what happened in modes without figures."""
    rows: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for cell in cells:
        rows.setdefault((cell["host"], cell["device"], cell["dtype"]), {})[cell["mode"]] = cell
    lines = [f"| host, device | dtype | {' | '.join(MODES)} |", "|---|---|" + "---|" * len(MODES)]
    notes = []
    for (host, device, dtype), modes in rows.items():
        where = f"{host}, {device}"
        lines.append(f"| {where} | {dtype} | {' | '.join(shown_cell(modes.get(mode)) for mode in MODES)} |")
        for mode, cell in modes.items():
            if "reason" in cell:
                parts = (where, dtype, mode, cell["state"])
                notes.append(f"- {', '.join(filter(None, parts))}: {_escaped(cell['reason'])}")
    return [*lines, *([""] if notes else []), *notes]


def _interval(figure: dict[str, Any], digits: int) -> str:
    return f"{figure['value']:.{digits}f} [{figure['low']:.{digits}f}, {figure['high']:.{digits}f}]"


def shown_cell(cell: dict[str, Any] | None) -> str:
    """Bits per byte and recall, and where drafts are verified the acceptance length; a red one says which figures are
    outside."""
    if cell is None or cell["state"] == "not exercised":
        return "–"
    if "text" not in cell:
        return "**red**: failed"
    text = "–" if cell["text"] is None else f"{cell['text']:.4f}"
    recall = "–" if cell["recall"] is None else f"{cell['recall']:.3f}"
    length = cell.get("acceptance_length")
    accepted = "" if length is None else f", {length:.2f} tokens a step"
    return f"{text}, {recall}{accepted}" + "".join(f"; **red**: {_outside(one)}" for one in cell["outside"])


def _outside(one: dict[str, Any]) -> str:
    # A report has null for what is no number.
    return f"{one['figure']} {'no number' if one['difference'] is None else format(one['difference'], '+.3f')}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
