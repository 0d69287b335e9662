"""`allotrope compat`: shows the installed host engines, and the models that Allotrope's plugins run in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from allotrope.config import option
from allotrope.plugins.registration import is_switched_off

if TYPE_CHECKING:
    from allotrope.plugins.contract import Contract

# One package for each host. It has `SWITCH`, and a module `contract` with `HOST` and `CONTRACT`.
PLUGINS = ("allotrope.plugins.vllm", "allotrope.plugins.sglang")


@dataclass(frozen=True, kw_only=True)
class CompatOptions:
    """Output format."""

    json: bool = option("Print JSON.", False)


def compat(options: CompatOptions) -> None:
    """Show hosts, the host symbols in use, the families and models that run. Exit status 1 if an installed host is
    refused."""
    import json

    reports = [report(name) for name in PLUGINS]
    if options.json:
        print(json.dumps(reports, indent=1))
    else:
        for host in reports:
            _show(host)
    if any(host["version"] is not None and host["refusals"] for host in reports):
        raise typer.Exit(1)


def report(name: str) -> dict[str, Any]:
    """The report of one host. `name`: package of its plugin."""
    from importlib import import_module

    from allotrope.commands.catalogue import catalogue

    plugin, module = import_module(name), import_module(f"{name}.contract")
    contract: Contract = module.CONTRACT
    version, refusals = contract.installed(), contract.refusals()
    found, switched_off = catalogue(), False
    try:
        switched_off = is_switched_off(plugin.SWITCH)
    except ValueError as error:
        refusals = [str(error), *refusals]
    taken = not refusals and not switched_off
    families = [
        {"family": one.name, "runs": taken, "limits": contract.limits_of(one.cache_kinds)} for one in found.families
    ]
    kinds_of = {one.name: one.cache_kinds for one in found.families}
    models = []
    for architecture, names in found.architectures.items():
        limits = contract.limits_of([kind for family in names for kind in kinds_of[family]])
        models.append({"architecture": architecture, "families": names, "taken": taken, "limits": limits})
    return {
        "host": module.HOST,
        "version": version,
        "switched_off": f"{plugin.SWITCH}=0" if switched_off else "",
        "refusals": refusals,
        "symbols": [] if version is None else [vars(finding) for finding in contract.probe()],
        "optional": [] if version is None else [vars(finding) for finding in contract.probe_optional()],
        "limits": contract.limits_of_all(),
        "families": families,
        "models": models,
    }


def _show(host: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{host['host']}: {host['version'] or 'not installed'}", highlight=False)
    if host["version"] is None:
        return
    if host["switched_off"]:
        console.print(f"  off: {host['switched_off']}", highlight=False)
    for reason in host["refusals"]:
        console.print(f"  refused: {reason}", highlight=False)
    # Some symbols are probed more than once, each time for other members.
    states: dict[str, list[str]] = {}
    for kind, lacking in (("symbols", ""), ("optional", "the plugin runs without: ")):
        for finding in host[kind]:
            reason = finding["reason"] and lacking + finding["reason"]
            states.setdefault(finding["path"], []).extend(filter(None, [reason]))
    symbols = Table("host symbol", "state")
    for path, reasons in states.items():
        symbols.add_row(path, "; ".join(reasons) or "holds")
    families = Table("family", "runs", "limits")
    families.add_row("all", "", "\n".join(host["limits"]), end_section=True)
    for one in host["families"]:
        families.add_row(one["family"], "yes" if one["runs"] else "no", "\n".join(one["limits"]))
    of_family = {one["family"]: one["limits"] for one in host["families"]}
    models = Table("architecture", "families", "taken over", "limits of the families together")
    for model in host["models"]:
        taken_over = "yes" if model["taken"] else "no"
        known = {limit for family in model["families"] for limit in of_family[family]}
        further = "\n".join(limit for limit in model["limits"] if limit not in known)
        models.add_row(model["architecture"], ", ".join(model["families"]), taken_over, further)
    console.print(symbols, families, models)
