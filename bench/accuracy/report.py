"""The accuracy table: cells of the reports of `allotrope eval`, joined over machines, in Markdown."""

from __future__ import annotations

from typing import Any

MODES = ("cold", "warm", "chunked", "preempted", "two-ranks")


def cells_of(place: dict[str, str], report: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each mode of a run's report. `place`: what the run's cells have in common."""
    if "refused" in report:
        return [place | {"mode": "", "state": "refused", "reason": report["refused"]}]
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
    """`new` in place of what `old` has of the same cells. Cells of other weights of a model are dropped."""
    references = old.get("references", {}) | new["references"]
    for name, one in new["references"].items():
        # A run without Transformers says nothing against an earlier one with it.
        before = old.get("references", {}).get(name, {})
        if "transformers" not in one and before.get("weights") == one["weights"] and "transformers" in before:
            references[name] = before

    def key(cell: dict[str, Any]) -> tuple[str, ...]:
        return cell["model"], cell["host"], cell["device"], cell["dtype"]

    done = {key(cell) for cell in new["cells"]}
    kept = [
        cell
        for cell in old.get("cells", [])
        if key(cell) not in done and cell["weights"] == references[cell["model"]]["weights"]
    ]
    runs = [one for one in old.get("runs", []) if one["place"] != new["runs"][0]["place"]] + new["runs"]
    return {
        "references": dict(sorted(references.items())),
        # Stable: dtypes and modes stay in the order in which they ran.
        "cells": sorted(kept + new["cells"], key=lambda cell: (cell["model"], cell["host"], cell["device"])),
        "runs": runs,
    }


def page(results: dict[str, Any]) -> str:
    """The stored results in Markdown."""
    lines = ["# Accuracy", ""]
    for one in results["runs"]:
        seconds = f"{one['seconds']:.0f} s" if one["seconds"] else "resumed"
        lines += [
            f"- {one['place']}: `{one['command']}`, {seconds}, {one['device']}, torch {one['torch']}, {one['date']}"
        ]
    lines += ["", "| model | architecture | bits per byte | recall | Transformers |", "|---|---|---:|---:|---|"]
    for name, one in results["references"].items():
        figures = {figure["name"]: figure for figure in one["figures"]}
        theirs = one.get("transformers")
        same = "not run"
        if theirs is not None:
            unequal = theirs["other_answers"]
            same = f"{'inside' if theirs['inside'] else '**outside**'}, {unequal or 'no'} other answers"
        lines.append(
            f"| `{name}` | {one['architecture'].removesuffix('ForCausalLM')} | {_interval(figures['text'], 4)} | "
            f"{_interval(figures['recall'], 3)} | {same} |"
        )
    for name in results["references"]:
        cells = [cell for cell in results["cells"] if cell["model"] == name]
        lines += [
            "",
            f"## {name}",
            "",
            f"| host, device | dtype | {' | '.join(MODES)} |",
            "|---|---|" + "---|" * len(MODES),
        ]
        rows: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
        for cell in cells:
            rows.setdefault((cell["host"], cell["device"], cell["dtype"]), {})[cell["mode"]] = cell
        for (host, device, dtype), modes in rows.items():
            if "" in modes:
                lines.append(f"| {host}, {device} | {dtype} | refused: {_escaped(modes['']['reason'])} |" + " |" * 4)
                continue
            texts = [shown_cell(modes.get(mode)) for mode in MODES]
            lines.append(f"| {host}, {device} | {dtype} | {' | '.join(texts)} |")
        notes = {
            f"{cell['mode']}: {cell['state']}: {_escaped(cell['reason'])}"
            for cell in cells
            if cell["mode"] and "reason" in cell
        }
        lines += ["", *(f"- {note}" for note in sorted(notes))]
    return "\n".join(lines) + "\n"


def _interval(figure: dict[str, Any], digits: int) -> str:
    return f"{figure['value']:.{digits}f} [{figure['low']:.{digits}f}, {figure['high']:.{digits}f}]"


def shown_cell(cell: dict[str, Any] | None) -> str:
    """Bits per byte and recall; a red one says which figures are outside."""
    if cell is None or cell["state"] == "not exercised":
        return "–"
    if "text" not in cell:
        return "**red**: failed"
    text = "–" if cell["text"] is None else f"{cell['text']:.4f}"
    recall = "–" if cell["recall"] is None else f"{cell['recall']:.3f}"
    red = "".join(f"; **red**: {one['figure']} {one['difference']:+.3f}" for one in cell["outside"])
    return f"{text}, {recall}{red}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
