"""`allotrope families`: the attention families, what can run each, and the architectures that use them."""

from __future__ import annotations


def families() -> None:
    """List the attention families with their backends, best first, and the architectures made of them."""
    from rich.console import Console
    from rich.table import Table

    from allotrope.commands.catalogue import catalogue

    found = catalogue()
    about = Table("family", "backends", "what it is")
    for family in found.families:
        about.add_row(family.name, ", ".join(family.backends), family.about)
    models = Table("architecture", "families")
    for architecture, names in found.architectures.items():
        models.add_row(architecture, ", ".join(names))
    console = Console()
    console.print(about, models)
