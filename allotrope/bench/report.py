"""Shows a run: tables for the terminal, a JSON file, and a plot.

Owns the format of figures. It must not know how they are measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from allotrope.bench.record import RequestRecord, Summary, samples
from allotrope.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

_MEANING = {
    "TTFT": "time to first token",
    "TPOT": "time per output token",
    "ITL": "inter-token latency",
    "E2E": "end to end",
}


def tables(summary: Summary) -> list[Table]:
    """Two tables for the terminal: rates and counts, then the latencies."""
    from rich.table import Table

    rates = Table(show_header=False)
    rates.add_column()
    rates.add_column(justify="right")
    rates.add_row("requests completed", str(summary.completed))
    if summary.failed:
        rates.add_row("[red]requests failed[/red]", f"[red]{summary.failed}[/red]")
    rates.add_row("duration", f"{summary.duration_s:.2f} s")
    rates.add_row("prompt tokens", str(summary.prompt_tokens))
    rates.add_row("output tokens", str(summary.output_tokens))
    rates.add_row("requests/s", f"{summary.requests_per_s:.2f}")
    rates.add_row("output tokens/s", f"{summary.output_tokens_per_s:.1f}")
    rates.add_row("total tokens/s", f"{summary.total_tokens_per_s:.1f}")
    latency = Table("latency (ms)", *(_right(name) for name in ("mean", "p50", "p99")))
    for name, spread in summary.latency.items():
        figures = (spread.mean_ms, spread.p50_ms, spread.p99_ms)
        latency.add_row(f"{name}, {_MEANING[name]}", *(f"{value:.2f}" for value in figures))
    return [rates, latency]


def _right(name: str) -> Any:
    from rich.table import Column

    return Column(name, justify="right")


def write_json(path: Path, settings: Mapping[str, Any], summary: Summary, records: Sequence[RequestRecord]) -> None:
    """Write settings, summary and the latencies of every request (milliseconds) to `path`."""
    requests = [
        {
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "ttft_ms": 1000 * record.ttft() if record.arrivals else None,
            "e2e_ms": 1000 * record.e2e() if record.arrivals else None,
            "itl_ms": [1000 * gap for gap in record.itl()],
            "error": record.error,
        }
        for record in records
    ]
    document = {"settings": dict(settings), "summary": summary.as_json(), "requests": requests}
    path.write_text(json.dumps(document, indent=1) + "\n")


def write_plot(path: Path, title: str, records: Sequence[RequestRecord]) -> None:
    """Draw the cumulative distribution of each latency to the PNG file `path`, with marks at the median and p99.

    Raises `ConfigError` if matplotlib is missing or no request succeeded.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError("a plot needs matplotlib. Run: pip install 'allotrope[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    latencies = samples(records)
    if not latencies:
        raise ConfigError(f"nothing to plot in {path}: no request succeeded.")
    rows = (len(latencies) + 1) // 2
    figure, grid = pyplot.subplots(rows, 2, figsize=(9.6, 3.6 * rows), sharey=True, squeeze=False, layout="constrained")
    panels = [panel for row in grid for panel in row]
    for panel, (name, seconds) in zip(panels, latencies.items(), strict=False):
        _draw(panel, name, 1000 * np.sort(np.asarray(seconds)))
    for panel in panels[len(latencies) :]:
        panel.set_axis_off()
    figure.supylabel("share of samples at or below", fontsize=10)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(panel: Any, name: str, values: np.ndarray) -> None:
    """Draw one cumulative distribution. `values`: [samples] milliseconds, ascending."""
    share = np.arange(1, len(values) + 1) / len(values)
    panel.step(np.concatenate([values[:1], values]), np.concatenate([[0.0], share]), where="post", color="#1f5fa8")
    for percent, colour in ((50, "#d1700b"), (99, "#b3202c")):
        at = float(np.percentile(values, percent))
        panel.axvline(at, color=colour, linestyle="--", linewidth=1, label=f"p{percent} {at:.1f} ms")
    panel.set_title(f"{name}: {_MEANING[name]}", fontsize=10)
    panel.set_xlabel("milliseconds")
    panel.set_xlim(0, 1.05 * values[-1])
    panel.set_ylim(0, 1.02)
    panel.grid(alpha=0.3)
    panel.legend(loc="best", fontsize=9, title=f"{len(values)} samples", title_fontsize=8)
