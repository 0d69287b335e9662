"""The findings for people and programs: a table with what was compared with what, a JSON document, a plot.

Must not know how anything was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from allotrope.errors import ConfigError
from allotrope.verify.tolerance import Limits, Score

if TYPE_CHECKING:
    from rich.table import Table

    from allotrope.verify.layers import LayerReport

Verdict = Literal["pass", "wrong", "not exercised"]
_FAULTS_SHOWN = 3
_LAYERS_SHOWN = 24


@dataclass(frozen=True)
class ModeResult:
    """`text`: what the mode does. `score`: None if it gave none. `remark`: what happened in it.

    `layer`: where it goes wrong, if that was found.
    """

    name: str
    text: str
    verdict: Verdict
    score: Score | None
    remark: str
    seconds: float
    layer: str | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """`engine`: what ran, `origin`: what it was held against, both in words. `lengths`: tokens of each prompt.
    `boundaries`: context lengths that they were chosen by. `backends`: what each attention and operation runs by.
    """

    model: str
    architecture: str
    engine: str
    origin: str
    limits: Limits
    lengths: tuple[int, ...]
    new_tokens: int
    modes: tuple[ModeResult, ...]
    layers: LayerReport | None
    remarks: tuple[str, ...] = ()
    boundaries: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.finding is None and all(result.verdict != "wrong" for result in self.modes)

    @property
    def finding(self) -> str | None:
        """The first divergence between layers, in words."""
        return None if self.layers is None else self.layers.finding()

    def heading(self) -> list[str]:
        """What was compared with what."""
        prompts = f"{len(self.lengths)}, of {min(self.lengths)} to {max(self.lengths)} tokens"
        around = f", around {', '.join(map(str, self.boundaries))}" if self.boundaries else ""
        return [
            f"{self.model}: {self.architecture}",
            f"engine:     {self.engine}",
            f"against:    {self.origin}",
            f"prompts:    {prompts}{around}, each followed by {self.new_tokens} tokens",
            f"allowed:    {self.limits}",
            *(f"backend:    {line}" for line in self.backends),
        ]

    def legend(self) -> list[str]:
        """What each mode does, and what happened in it."""
        width = max(len(result.name) for result in self.modes)
        return [
            f"{result.name:<{width}}  {result.text}" + (f": {result.remark}" if result.remark else "")
            for result in self.modes
        ]

    def verdict(self) -> list[str]:
        """What came out, last line first to read."""
        lines = [f"note: {remark}" for remark in self.remarks]
        for result in self.modes:
            if result.verdict == "wrong":
                lines += [f"wrong in {result.name}: {text}" for text in _faults(result)]
        if self.finding is not None:
            lines.append(f"wrong: {self.finding}")
        elif self.layers is not None and any(one.name == "whole" and one.verdict == "wrong" for one in self.modes):
            lines.append("wrong: every layer agrees, so what differs comes behind them: the last norm or the head")
        lines.append(self._last_line())
        return lines

    def _last_line(self) -> str:
        ran = [result for result in self.modes if result.verdict != "not exercised"]
        wrong = [result.name for result in ran if result.verdict == "wrong"]
        if wrong:
            return f"WRONG in {len(wrong)} of {len(ran)} modes: {', '.join(wrong)}"
        if self.finding is not None:
            return f"WRONG inside, although the logits agree: {self.finding}"
        return f"PASS: {len(ran)} of {len(ran)} modes agree with {self.origin}"

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        layers = None
        if self.layers is not None:
            pairs = zip(self.layers.layers, self.layers.limits, strict=True)
            layers = [{**asdict(layer), "error": layer.error, "limit": limit} for layer, limit in pairs]
        return {
            "model": self.model,
            "architecture": self.architecture,
            "engine": self.engine,
            "backends": list(self.backends),
            "against": self.origin,
            "limits": asdict(self.limits),
            "prompt_lengths": list(self.lengths),
            "boundaries": list(self.boundaries),
            "new_tokens": self.new_tokens,
            "passed": self.passed,
            "verdict": self._last_line(),
            "finding": self.finding,
            "first_diverging_layer": self._first_layer(),
            "remarks": list(self.remarks),
            "modes": [asdict(result) for result in self.modes],
            "layers": layers,
        }

    def _first_layer(self) -> int | None:
        first = None if self.layers is None else self.layers.first
        return None if first is None else first.index


def _faults(result: ModeResult) -> Iterator[str]:
    if result.score is None:
        yield result.remark
        return
    faults = result.score.faults
    for fault in faults[:_FAULTS_SHOWN]:
        yield fault.what if fault.position < 0 else str(fault)
    if len(faults) > _FAULTS_SHOWN:
        yield f"and {len(faults) - _FAULTS_SHOWN} more positions"
    if result.layer is not None:
        yield result.layer


def mode_table(report: Report) -> Table:
    """One row a mode."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    figures = ("positions", "max\nerror", "median\nerror", "rel. RMS", "top-1", "greedy", "argmax\ntie", "router\ntie")
    right = [Column(name, justify="right", no_wrap=True) for name in figures]
    table = Table(Column("mode", no_wrap=True), *right, Column("verdict", no_wrap=True), box=SIMPLE_HEAD)
    for result in report.modes:
        score, color = result.score, {"pass": "green", "wrong": "bold red"}.get(result.verdict, "yellow")
        cells = [""] * len(figures)
        if score is not None:
            cells = [
                str(score.positions),
                f"{score.max_abs:.2g}",
                f"{score.median_abs:.2g}",
                f"{score.rel_rms:.1e}",
                f"{score.top1:.1%}",
                f"{score.greedy_same}/{score.greedy_total}",
                str(score.argmax_ties),
                str(score.router_ties),
            ]
        table.add_row(result.name, *cells, f"[{color}]{result.verdict}[/{color}]")
    return table


def layer_table(layers: LayerReport) -> Table:
    """One row a layer: relative error of each stage against the reference's."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    from allotrope.verify.hooks import STAGES

    right = [Column(name, justify="right") for name in STAGES]
    table = Table("layer", "family", *right, "selections", Column("ties", justify="right"), box=SIMPLE_HEAD)
    shown = layers.layers if len(layers.layers) <= _LAYERS_SHOWN else _around(layers)
    for layer in shown:
        good = layer.error <= layers.limits[layer.index]
        cells = [f"{layer.rms[stage]:.0e}" if stage in layer.rms else "-" for stage in STAGES]
        if not good:
            cells[-1] = f"[bold red]{cells[-1]}[/bold red]"
        table.add_row(str(layer.index), layer.kind, *cells, layer.selections, str(layer.ties))
    return table


def _around(layers: LayerReport) -> list[Any]:
    """The layers around the first that diverges, or the last ones."""
    end = len(layers.layers) if layers.first is None else layers.first.index + _LAYERS_SHOWN // 2
    end = max(_LAYERS_SHOWN, min(end, len(layers.layers)))
    return layers.layers[end - _LAYERS_SHOWN : end]


def write_json(path: Path, report: Report) -> None:
    """Write all figures to `path`."""
    path.write_text(json.dumps(_finite(report.as_json()), indent=1) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no infinity: such numbers become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def write_plot(path: Path, report: Report) -> None:
    """Draw the relative error by layer to the PNG file `path`. Raises ConfigError where matplotlib is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError("a plot needs matplotlib. Run: pip install 'allotrope[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    assert report.layers is not None
    layers = report.layers.layers
    figure, panel = pyplot.subplots(figsize=(9.6, 4.8), layout="constrained")
    places = [layer.index for layer in layers]
    for stage, style in (("mixer out", ":"), ("ffn out", "--"), ("out", "-")):
        values = [max(layer.rms.get(stage, math.nan), 1e-9) for layer in layers]
        label = {"out": "whole layer", "mixer out": "mixer", "ffn out": "ffn"}[stage]
        panel.plot(places, values, style, marker="o", markersize=4, label=label)
    panel.plot(places, report.layers.limits, color="crimson", linewidth=1, label="allowed")
    first = report.layers.first
    if first is not None:
        panel.axvline(first.index, color="crimson", alpha=0.25, linewidth=6, label=f"first to diverge: {first.index}")
    panel.set_yscale("log")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_xlabel("layer")
    panel.set_ylabel("relative error of hidden states")
    panel.set_title(f"{report.architecture}: {report.engine}\nagainst {report.origin}", fontsize=10)
    panel.legend(fontsize=9)
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
