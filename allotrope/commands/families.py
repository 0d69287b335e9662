"""`allotrope families`: the attention families, what can run each, and the architectures that use them."""

from __future__ import annotations


def families() -> None:
    """List the attention families with their backends, best first, and the architectures made of them."""
    from importlib import import_module

    from rich.console import Console
    from rich.table import Table

    from allotrope.attention.registry import FAMILIES
    from allotrope.models.registry import ARCHITECTURES

    about = Table("family", "backends", "what it is")
    for name, family in FAMILIES.items():
        line = (import_module(f"allotrope.attention.{name}").__doc__ or "").partition("\n")[0]
        about.add_row(name, ", ".join(backend.name for backend in family.backends), line)
    models = Table("architecture", "families")
    for architecture in ARCHITECTURES:
        models.add_row(architecture, ", ".join(families_of(architecture)))
    console = Console()
    console.print(about, models)


def families_of(architecture: str) -> list[str]:
    """Names of the families that a model of the architecture uses, found from its smallest config."""
    import torch

    from allotrope.layers.parallel import Parallel
    from allotrope.models.registry import find_architecture, read_spec

    found = find_architecture({"architectures": [architecture]}, architecture)
    _, spec = read_spec(found.tiny() | {"architectures": [architecture]}, architecture)
    one = (Parallel(), torch.float32, torch.float32)
    return sorted({layer.mixer.attention(*one).family for layer in spec.layers})
