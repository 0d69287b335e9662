"""`allotrope plan`: shows the memory that a model needs, and how fast its layouts would be, without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from allotrope.config import EngineConfig, option
from allotrope.errors import ConfigError

if TYPE_CHECKING:
    from allotrope.kernels.chip_figures import ChipFigures


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """For which machines, and output format."""

    memory: int | None = option("Memory of each device, such as 80GiB; default: what is free on this machine.", None)
    chip: str | None = option(
        "Plan for this chip, by its name or its architecture, such as sm_90: its memory, and weights as it keeps them. "
        "No device is asked. Default: the device of this machine.",
        None,
    )
    gpus: int | None = option(
        "Compare every layout of so many GPUs and propose one; with sizes of a layout given, those that have them.",
        None,
    )
    hosts: int | None = option("Hosts that the GPUs are spread over; default: the fewest that have them.", None)
    context: int | None = option(
        "Tokens that each request sees, where layouts are compared; default: 8192, or the longest sequence.", None
    )
    json: bool = option("Print JSON.", False)


def plan(engine: EngineConfig, options: PlanOptions) -> None:
    """Show the memory that MODEL will take, from its config alone. Exit status 1 if it does not fit.

    With --gpus, or with data-parallel or pipeline sizes: how long steps take, and what ranks hold and exchange.
    """
    import json

    from allotrope.commands.planned_layouts import compare_layouts, figures_for
    from allotrope.engine.planning.plan_report import report_model

    compares = options.gpus is not None or engine.layout.size > engine.tensor_parallel_size
    unread = [] if compares else [name for name in ("hosts", "context") if getattr(options, name) is not None]
    if unread:
        given = ", ".join(f"{name}={getattr(options, name)}" for name in unread)
        raise ConfigError(
            f"bad options: {given}; only a comparison of layouts reads that. Give --gpus, or sizes of data-parallel or "
            f"pipeline parallel, or leave it out."
        )
    figures: ChipFigures | None = figures_for(options.chip, options.memory)
    if compares:
        found = compare_layouts(engine, figures, options.gpus, options.hosts, options.context)
        print(json.dumps(found.as_json(), indent=1) if options.json else "\n".join(found.lines()))
        fits = found.proposal is not None
    else:
        report = report_model(engine, options.memory, figures)
        print(json.dumps(report.as_json(), indent=1) if options.json else "\n".join(report.lines()))
        fits = report.refusal is None
    if not fits:
        raise typer.Exit(1)
