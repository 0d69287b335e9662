"""Whole models on paper: the layouts of some machines compared, as `allotrope plan --gpus` compares them.

    python bench/engine/layouts.py
    python bench/engine/layouts.py --cases deepseek_v32:h200:8 kimi_k2:mi355x:8 --out /tmp/layouts

A case is a folder of bench/configs, a chip and a number of GPUs. Needs no GPU and no weights. Cases that the file has
already are replaced, and others stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from allotrope.commands.planned_layouts import compare_layouts, figures_for  # noqa: E402
from allotrope.config import EngineConfig  # noqa: E402
from allotrope.engine.planning.layout_report import LayoutComparison, options  # noqa: E402
from bench.engine.report import Report, write_json_alone  # noqa: E402

RESULTS, CONFIGS = ROOT / "bench" / "results", ROOT / "bench" / "configs"
CASES = tuple(
    f"{model}:{where}" for model in ("deepseek_v32", "kimi_k2") for where in ("h200:8", "h200:16", "mi355x:8")
)
TITLES = {"deepseek_v32": "DeepSeek-V3.2", "kimi_k2": "Kimi-K2"}


def planned(case: str, context: int) -> Report:
    """One case, as plain data."""
    model, chip, gpus = case.split(":")
    config = EngineConfig(model=str(CONFIGS / model), load_format="dummy")
    found = compare_layouts(config, figures_for(chip, None), int(gpus), None, context)
    return {
        "title": f"{TITLES.get(model, model)} on {gpus} x {found.machines.figures.about}",
        "hosts": found.machines.hosts,
        "usable_bytes": found.usable,
        "context": context,
        "requests": list(found.requests),
        "proposed": None if found.proposal is None else options(found.proposal.layout),
        "shown": _shown(found),
        "layouts": {one.layout.name: _layout(found, index) for index, one in enumerate(found.reports)},
        "assumed": found.machines.figures.assumed(hosts=found.machines.hosts),
    }


def _layout(found: LayoutComparison, index: int) -> Report:
    one = found.reports[index]
    last = one.decode[-1] if one.decode else None
    return {
        "weight_bytes": one.weight_bytes,
        "tokens": one.tokens,
        "ms": {str(step.requests): [1e3 * step.tpot, 1e3 * step.least] for step in one.decode},
        "prompt_tokens_per_second": None if one.prompts is None else one.prompts.tokens_per_second,
        "sent_bytes": None if last is None else [last.link_bytes, last.network_bytes],
        "reason": found.reason(one),
    }


def _shown(found: LayoutComparison) -> list[str]:
    """The layouts that a page shows: what is proposed, the best for each number of requests, and each way alone."""
    gpus = found.machines.gpus
    alone = [
        one.layout
        for one in found.reports
        if gpus in (one.layout.tensor, one.layout.data, one.layout.pipeline)
        or (one.layout.tensor == found.machines.per_host and not one.layout.expert_parallel)
    ]
    best = [one.layout for count in found.requests if (one := found.best(count)) is not None]
    chosen = {*alone, *best, *([] if found.proposal is None else [found.proposal.layout])}
    return [one.layout.name for one in found.reports if one.layout in chosen]


def page(report: Report) -> str:
    """The report for people."""
    lines = ["# Layouts on paper", "", f"`{report['command']}`", ""]
    for case in report["cases"].values():
        counts = [str(count) for count in case["requests"]]
        lines += [f"## {case['title']}", ""]
        lines += [
            f"Requests that each see {case['context']} tokens; {case['usable_bytes'] / 2**30:.1f} GiB of a GPU are for "
            f"weights, caches and steps; {case['hosts']} host(s).",
            "",
        ]
        heads = [f"ms with {count}" for count in counts]
        head = ["layout", "GiB of weights", "tokens that fit", *heads, "prompt tokens/s", "MiB sent, links / network"]
        lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        reasons = []
        for title in case["shown"]:
            one = case["layouts"][title]
            times = [
                f"{one['ms'][count][0]:.1f} ({one['ms'][count][1]:.1f})" if count in one["ms"] else ""
                for count in counts
            ]
            rate, sent = one["prompt_tokens_per_second"], one["sent_bytes"]
            cells = [title, f"{one['weight_bytes'] / 2**30:.1f}", f"{one['tokens']:,}" if one["tokens"] else "", *times]
            cells += ["" if rate is None else f"{rate:,.0f}"]
            cells += ["" if sent is None else f"{sent[0] / 2**20:.0f} / {sent[1] / 2**20:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
            reasons.append(f"- **{title}**: {one['reason']}.")
        proposed = f"`{case['proposed']}`" if case["proposed"] else "none: no layout fits"
        lines += ["", f"Proposed: {proposed}. Why, and how the others differ from it:", "", *reasons, ""]
        if case["assumed"]:
            guessed = ", ".join(one.partition(":")[0] for one in case["assumed"])
            lines += [f"Not measured on this chip, see `allotrope/kernels/chip_figures.py`: {guessed}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="MODEL:CHIP:GPUS")
    parser.add_argument("--context", type=int, default=8192, help="tokens that each request sees")
    parser.add_argument("--out", type=Path, default=RESULTS / "layouts_on_paper", help="path without ending")
    given = parser.parse_args(arguments)
    path = given.out.with_name(given.out.name + ".json")
    before: dict[str, Any] = json.loads(path.read_text())["cases"] if path.exists() else {}
    for case in given.cases:
        before[case] = planned(case, given.context)
        ordered = {one: before[one] for one in (*CASES, *before) if one in before}
        report = {"command": "python bench/engine/layouts.py", "cases": ordered}
        write_json_alone(given.out, report)
    print(page({"command": "python bench/engine/layouts.py", "cases": {case: before[case] for case in given.cases}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
