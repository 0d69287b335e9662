"""`allotrope compat`: shows the installed host engines, and the models that Allotrope's plugins run in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer

from allotrope.config import option

# One module for each host. It has `HOST`, `LIMITS`, `installed()`, `probe()` and `refusals()`.
CONTRACTS = ("allotrope.plugins.vllm.contract", "allotrope.plugins.sglang.contract")


@dataclass(frozen=True, kw_only=True)
class CompatOptions:
    """Output format."""

    json: bool = option("Print JSON.", False)


def compat(options: CompatOptions) -> None:
    """Show hosts, the host symbols in use, and the models taken over. Exit status 1 if an installed host is refused."""
    import json

    reports = [report(name) for name in CONTRACTS]
    if options.json:
        print(json.dumps(reports, indent=1))
    else:
        for host in reports:
            _show(host)
    if any(host["version"] is not None and host["refusals"] for host in reports):
        raise typer.Exit(1)


def report(name: str) -> dict[str, Any]:
    """The report of one host. `name`: module of its contract."""
    from importlib import import_module

    from allotrope.commands.catalogue import catalogue

    contract: Any = import_module(name)
    version = contract.installed()
    refusals = contract.refusals()
    models, found = [], catalogue()
    kinds_of = {family.name: family.cache_kinds for family in found.families}
    for architecture, families in found.architectures.items():
        kinds = sorted({kind for family in families for kind in kinds_of[family]})
        limits = [contract.LIMITS[kind] for kind in kinds if kind in contract.LIMITS]
        models.append({"architecture": architecture, "families": families, "taken": not refusals, "limits": limits})
    return {
        "host": contract.HOST,
        "version": version,
        "refusals": refusals,
        "symbols": [] if version is None else [vars(finding) for finding in contract.probe()],
        "models": models,
    }


def _show(host: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{host['host']}: {host['version'] or 'not installed'}", highlight=False)
    if host["version"] is None:
        return
    for reason in host["refusals"]:
        console.print(f"  refused: {reason}", highlight=False)
    symbols = Table("host symbol", "state")
    for finding in host["symbols"]:
        symbols.add_row(finding["path"], finding["reason"] or "holds")
    models = Table("architecture", "families", "taken over", "limits")
    for model in host["models"]:
        taken_over = "yes" if model["taken"] else "no"
        models.add_row(model["architecture"], ", ".join(model["families"]), taken_over, "; ".join(model["limits"]))
    console.print(symbols, models)
