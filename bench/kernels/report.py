"""What a run of `bench/kernels.py` leaves: lines while it runs, then JSON, a table and a roofline plot."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.kernels.cases.case import KernelCase
from bench.kernels.timing import Ceilings, Timing


@dataclass
class Row:
    """What was found of one case. `right`: every comparison held. `ours`, `peers`: only if so, and only on a GPU.

    `floor_us`: time at the binding ceiling. `kernels`: name -> us of those that ours launches. `absent`: peer -> why it
    has no time. `error`, `trace`: what was raised.
    """

    case: KernelCase
    right: bool = False
    parity: list[str] = field(default_factory=list)
    ours: Timing | None = None
    floor_us: float = math.nan
    kernels: dict[str, float] = field(default_factory=dict)
    peers: dict[str, Timing] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    error: str = ""
    trace: str = ""

    def figures(self, ceilings: Ceilings) -> dict[str, float]:
        """Of the copy and matmul ceilings, of the binding one, and how many times as fast as each peer."""
        assert self.ours is not None
        seconds = self.ours.median * 1e-6
        rate = ceilings.matmul.get(self.case.rate, math.nan)
        found = {
            "of_copy": self.case.bytes / seconds / ceilings.copy,
            "of_matmul": self.case.flops / seconds / rate,
            "of_binding": self.floor_us / self.ours.median,
        }
        return found | {f"times_{name}": peer.median / self.ours.median for name, peer in self.peers.items()}


def environment(device: torch.device) -> dict[str, str]:
    """What a reader needs to run it again."""
    versions = {"torch": torch.__version__}
    if importlib.util.find_spec("triton"):
        import triton

        versions["triton"] = triton.__version__
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    day = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return {"device": name, **versions, "date": day, "slug": f"{name.lower().replace(' ', '_')}_{day}"}


def line(row: Row | None, ceilings: Ceilings | None) -> str:
    """One line for the terminal; with `row` None, the ceilings."""
    if row is None:
        if ceilings is None:
            return "no GPU: checks only"
        rates = ", ".join(f"{kind} {rate / 1e12:.0f}" for kind, rate in ceilings.matmul.items())
        return (
            f"copy {ceilings.copy / 1e12:.2f} TB/s; matmul {rates} TFLOP/s; empty interval {ceilings.empty_us:.1f} us"
        )
    name = f"{row.case.family:8s} {row.case.name:52s}"
    if row.error:
        return f"{name} FAILED {row.error}\n{row.trace}"
    if not row.right:
        return f"{name} WRONG {' | '.join(row.parity)}"
    if row.ours is None or ceilings is None:
        return f"{name} right {' | '.join(row.parity)}"
    found = row.figures(ceilings)
    shown = f"{name} {row.ours.median:9.1f} us  copy {found['of_copy']:4.0%}  binding {found['of_binding']:4.0%}"
    if row.case.flops:
        shown += f"  matmul {found['of_matmul']:4.0%}"
    shown += "" if row.ours.graph else f"  [no graph: {row.ours.why_not}]"
    for peer, timing in row.peers.items():
        shown += f"  {peer} {timing.median:.1f} us (x{found['times_' + peer]:.2f})" + ("" if timing.graph else " eager")
    return shown


def page(report: dict[str, Any]) -> str:
    """The report of a run on a GPU, as `write_report` stores it, in Markdown."""
    env, rows = report["environment"], report["rows"]
    measured = f"{env['device']}, torch {env['torch']}, triton {env.get('triton')}, {env['date']}"
    head = f"`{report['command']}`\n\n{measured}; {line(None, Ceilings(**report['ceilings']))}."
    return f"# Kernels\n\n{head}\n\n{_table(rows)}{_kernels(rows)}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| family | case | µs | copy | matmul | binding | peers (how many times as fast we are) |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        name = f"| {row['family']} | {row['name']} |"
        if row["error"] or not row["right"]:
            reason = row["error"] or "; ".join(row["parity"])
            lines.append(f"{name} wrong | | | | {reason.splitlines()[0]} |")
            continue
        peers = [
            f"{peer} {timing['median']:.1f}{'' if timing['graph'] else ' (eager)'}: {row[f'times_{peer}']:.2f}×"
            for peer, timing in row["peers"].items()
        ]
        peers += [f"{peer}: {reason}" for peer, reason in row["absent"].items()]
        time = f"{row['us']['median']:.1f}" + ("" if row["us"]["graph"] else " (eager)")
        matmul = f"{row['of_matmul']:.0%}" if row["flops"] else ""
        lines.append(
            f"{name} {time} | {row['of_copy']:.0%} | {matmul} | {row['of_binding']:.0%} | {'; '.join(peers)} |"
        )
    return "\n".join(lines) + "\n"


def _kernels(rows: Sequence[dict[str, Any]]) -> str:
    """The time of each kernel, for the cases that launch several."""
    several = [row for row in rows if len(row.get("kernels", {})) > 1]
    lines = ["", "## Kernels of each case", "", "µs of each, by PyTorch's profiler, from a cold L2.", ""]
    for row in several:
        spent = ", ".join(f"{name.partition('<')[0][:60]} {us:.1f}" for name, us in row["kernels"].items())
        lines.append(f"- {row['family']} {row['name']}: {spent}")
    return "\n".join(lines) + "\n" if several else ""


def products_page(report: dict[str, Any]) -> str:
    """The report of `bench/kernels/tune_products.py` in Markdown."""
    lines = [
        "# Quantized matrix products",
        "",
        f"`{report['command']}`",
        "",
        f"{report['device']}, {report['date']}.",
        "",
        "## Every product",
        "",
        "| product (experts x outputs x inputs) | rows | µs | TB/s of weights | TFLOP/s | tile | split-K | by |",
        "|---|---:|---:|---:|---:|---|---:|---|",
    ]
    for row in report["rows"]:
        rates = f"{row['us']:.1f} | {row['tb_per_s']:.2f} | {row['tflop_per_s']}"
        tile = f"{row['tile'][0]} x {row['tile'][1]} | {row['splits'] if row['splits'] > 1 else ''}"
        lines.append(f"| {row['product']} | {row['rows']} | {rates} | {tile} | {row['by']} |")
    return "\n".join(lines) + "\n"


def write_report(
    out: Path, rows: Sequence[Row], ceilings: Ceilings | None, env: dict[str, str], command: str
) -> list[Path]:
    """Write `out`.json and, with times, `out`.md and `out`.png (if matplotlib is there). Returns the paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "command": command,
        "environment": env,
        "ceilings": None if ceilings is None else dataclasses.asdict(ceilings),
        "rows": [_as_json(row, ceilings) for row in rows],
    }
    made = [out.with_name(out.name + ".json")]
    made[0].write_text(json.dumps(data, indent=1) + "\n")
    if ceilings is None:
        return made
    made.append(out.with_name(out.name + ".md"))
    made[1].write_text(page(data))
    if importlib.util.find_spec("matplotlib"):
        made.append(out.with_name(out.name + ".png"))
        _roofline(made[2], rows, ceilings, env)
    return made


def _as_json(row: Row, ceilings: Ceilings | None) -> dict[str, Any]:
    case = row.case
    data: dict[str, Any] = {"family": case.family, "name": case.name, "right": row.right, "parity": row.parity}
    data |= {"bytes": case.bytes, "flops": case.flops, "rate": case.rate, "note": case.note, "error": row.error}
    if row.ours is not None and ceilings is not None:
        data |= {"us": dataclasses.asdict(row.ours), "floor_us": row.floor_us, **row.figures(ceilings)}
        data["peers"] = {name: dataclasses.asdict(timing) for name, timing in row.peers.items()}
        data |= {"absent": row.absent, "kernels": row.kernels}
    return data


def _roofline(path: Path, rows: Sequence[Row], ceilings: Ceilings, env: dict[str, str]) -> None:
    """FLOP/s over FLOP per byte; a case without matrix products counts as one FLOP per byte."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    x = [2.0**i for i in range(-2, 14)]
    axes.plot(x, [min(ceilings.copy * i, ceilings.matmul["bf16"]) / 1e12 for i in x], color="black", label="bf16")
    for number, family in enumerate(sorted({row.case.family for row in rows})):
        timed = [row for row in rows if row.case.family == family and row.ours is not None]
        intensity = [(row.case.flops or row.case.bytes) / row.case.bytes for row in timed]
        reached = [(row.case.flops or row.case.bytes) / row.ours.median / 1e6 for row in timed if row.ours]
        axes.scatter(intensity, reached, color=f"C{number}", label=family, s=24)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte moved (1 where a kernel only moves)")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{env['device']}, {env['date']}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
