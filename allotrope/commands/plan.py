"""`allotrope plan`: shows the memory that a model needs, without loading it."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from allotrope.config import EngineConfig, option


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Memory of the device, and output format."""

    memory: int | None = option("Memory of each device, such as 80GiB; default: what is free on this machine.", None)
    json: bool = option("Print JSON.", False)


def plan(engine: EngineConfig, options: PlanOptions) -> None:
    """Show the memory that MODEL will take, from its config alone. Exit status 1 if it does not fit."""
    import json

    from allotrope.engine.plan_report import report_model

    report = report_model(engine, options.memory)
    print(json.dumps(report.as_json(), indent=1) if options.json else "\n".join(report.lines()))
    if report.refusal is not None:
        raise typer.Exit(1)
