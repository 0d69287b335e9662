"""`allotrope compat`: which other engines are installed here, and what of them would run Allotrope's models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer

from allotrope.config import option

# One module a host, with `HOST`, `LIMITS`, `installed()`, `probe()` and `refusals()`.
CONTRACTS = ("allotrope.plugins.vllm.contract",)


@dataclass(frozen=True, kw_only=True)
class CompatOptions:
    """How it is shown."""

    json: bool = option("Print JSON.", False)


def compat(options: CompatOptions) -> None:
    """Show hosts, the host symbols in use, and the models taken over. Exit status 1 if an installed host is refused."""
    import json

    reports = [report(name) for name in CONTRACTS]
    if options.json:
        print(json.dumps(reports, indent=1))
    else:
        for one in reports:
            _show(one)
    if any(one["version"] is not None and one["refusals"] for one in reports):
        raise typer.Exit(1)


def report(name: str) -> dict[str, Any]:
    """Everything about one host. `name`: module of its contract."""
    from importlib import import_module

    from allotrope.attention.registry import FAMILIES
    from allotrope.commands.catalogue import catalogue

    contract: Any = import_module(name)
    version = contract.installed()
    refusals = contract.refusals()
    models = []
    for architecture, families in catalogue().architectures.items():
        kinds = sorted({kind for family in families for kind in FAMILIES[family].cache_kinds})
        limits = [contract.LIMITS[kind] for kind in kinds if kind in contract.LIMITS]
        models.append({"architecture": architecture, "families": families, "taken": not refusals, "limits": limits})
    return {
        "host": contract.HOST,
        "version": version,
        "refusals": refusals,
        "symbols": [] if version is None else [vars(finding) for finding in contract.probe()],
        "models": models,
    }


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{found['host']}: {found['version'] or 'not installed'}", highlight=False)
    if found["version"] is None:
        return
    for reason in found["refusals"]:
        console.print(f"  refused: {reason}", highlight=False)
    symbols = Table("host symbol", "state")
    for finding in found["symbols"]:
        symbols.add_row(finding["path"], finding["reason"] or "holds")
    models = Table("architecture", "families", "taken over", "limits")
    for model in found["models"]:
        taken = "yes" if model["taken"] else "no"
        models.add_row(model["architecture"], ", ".join(model["families"]), taken, "; ".join(model["limits"]))
    console.print(symbols, models)
