"""Tables of what `peers.py` and `architectures.py` measured on a CPU, from their JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

OURS = "allotrope"
MEASURES = {
    "total": "tokens/s, prompt and output",
    "decode": "output tokens/s after the last first token",
    "ttft": "seconds to the last first token",
    "start": "seconds from process start to the first token",
    "prompt": "prompt tokens/s",
    "rss": "resident MB",
    "peak": "resident MB at the highest",
}


def peers_page(report: dict[str, Any]) -> str:
    """Medians of `bench/cpu/peers.py`, and how many times as fast we are."""
    asked = report["options"]
    engines = list(next(iter(report["rows"].values())))
    lines = [f"# {asked['model']} in {asked['dtype']}", "", _turns(asked), "", *_rows(report, engines)]
    return "\n".join(lines) + "\n"


def gguf_page(report: dict[str, Any]) -> str:
    """Medians of `bench/cpu/gguf_peers.py`, a table for each model."""
    lines = ["# GGUF files"]
    for name, of_model in report["models"].items():
        engines = list(next(iter(of_model["rows"].values())))
        lines += ["", f"## {name}", "", _turns(of_model["options"]), "", *_rows(of_model, engines)]
    return "\n".join(lines) + "\n"


def _turns(asked: dict[str, Any]) -> str:
    return (
        f"{asked['threads']} threads; {asked['input']} prompt tokens and {asked['output']} output tokens per request; "
        + ("one turn." if int(asked["repetitions"]) == 1 else f"median of {asked['repetitions']} turns.")
    )


def _rows(measured: dict[str, Any], engines: Sequence[str]) -> list[str]:
    """A table of medians, and how many times as good ours are."""
    lines = [f"| | {' | '.join(engines)} |", "|---|" + "---:|" * len(engines)]
    for label, by_engine in measured["rows"].items():
        measure, _, requests = label.partition(" B=")
        count = f"{requests} request{'s' * (requests != '1')}: " if requests else ""
        cells = [
            _significant(statistics.median(numbers))
            + ("" if name == OURS else f" ({measured['ratios'][label][name]:.2f}×)")
            for name, numbers in by_engine.items()
        ]
        lines.append(f"| {count}{MEASURES[measure.split()[0]]} | {' | '.join(cells)} |")
    return lines


def architectures_page(report: dict[str, Any]) -> str:
    """Medians of `bench/cpu/architectures.py`: prefill in tokens/s, a decode step in ms."""
    rows = report["rows"]
    lines = [
        "# Every architecture",
        "",
        f"{report['threads']} threads; {report['prompt']} prompt tokens and {report['output']} output tokens per "
        f"request; median of {report['repeats']} rounds.",
        "",
        *(f"- {line}" for line in _means(rows)),
        "",
        "| architecture | requests | prefill tokens/s: ours | Transformers | vLLM "
        "| decode ms/step: ours | Transformers | vLLM | tokens as Transformers |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        kind = "" if row["dtype"] == "float32" else f" {row['dtype']}"
        engines = [row.get(name) for name in (OURS, "transformers", "vllm")]
        speeds = [
            f"{row['batch'] * report['prompt'] / statistics.median(one['prefill_s']):.0f}" if one else "–"
            for one in engines
        ]
        steps = [f"{1000 * one['decode_s']:.2f}" if one else "–" for one in engines]
        same = row[OURS]["as_transformers"] or "–"
        lines.append(
            f"| {row['architecture']}{kind} | {row['batch']} | {' | '.join(speeds)} | {' | '.join(steps)} | {same} |"
        )
    return "\n".join(lines) + "\n"


def _means(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Geometric means of the ratios; above 1 we are faster."""
    lines = []
    for engine in ("transformers", "vllm"):
        for phase in ("prefill", "decode"):
            ratios = [row[f"over_{engine}"][phase] for row in rows if f"over_{engine}" in row]
            if ratios:
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                below = sum(ratio < 1 for ratio in ratios)
                lines.append(f"{phase}, {engine} / ours: geometric mean {mean:.2f}×; {below} of {len(ratios)} below 1.")
    return lines


def _significant(number: float) -> str:
    """About three significant digits."""
    return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f}"
