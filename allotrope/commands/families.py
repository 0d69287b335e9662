"""`allotrope families`: the attention families and what can run each."""

from __future__ import annotations


def families() -> None:
    """List the attention families with their backends, best first."""
    from importlib import import_module

    from rich.console import Console
    from rich.table import Table

    from allotrope.attention.registry import FAMILIES

    table = Table("family", "backends", "what it is")
    for name, family in FAMILIES.items():
        about = (import_module(f"allotrope.attention.{name}").__doc__ or "").partition("\n")[0]
        table.add_row(name, ", ".join(backend.name for backend in family.backends), about)
    Console().print(table)
