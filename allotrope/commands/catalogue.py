"""What this installation knows: its families and operations, and the architectures made of them.

Owns the copy in the user's cache, so that listing them needs no torch. The copy says of which source files it was made:
another version of any of them is read anew. It must not hold a list of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import allotrope
from allotrope.env import cache_folder


@dataclass(frozen=True)
class FamilyEntry:
    """A family or an operation. `backends`: best first. `about`: what it is, in a line. `cache_kinds`: of a family."""

    name: str
    backends: list[str]
    about: str
    cache_kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Catalogue:
    """`operations`: all but attention. `architectures`: the families of each."""

    families: list[FamilyEntry]
    operations: list[FamilyEntry]
    architectures: dict[str, list[str]]


def catalogue() -> Catalogue:
    """The families and architectures of this installation, from the cache where that is of these very files."""
    file, sources = cache_folder() / "catalogue.json", _sources()
    # A file that is absent, damaged or of other sources is written again.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        kept = json.loads(file.read_text())
        if kept.pop("sources") == sources:
            families, operations = ([FamilyEntry(**one) for one in kept[key]] for key in ("families", "operations"))
            return Catalogue(families, operations, dict(kept["architectures"]))
    found = _read()
    # A cache that cannot be written makes the next call as slow as this one, no more.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            whole = Path(scratch) / file.name
            whole.write_text(json.dumps({"sources": sources, **asdict(found)}))
            whole.replace(file)
    return found


def _sources() -> str:
    """A hash that changes with any source file of the package: of their names, sizes and times."""
    top = Path(allotrope.__file__).parent
    facts = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sorted(top.rglob("*.py"))]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _read() -> Catalogue:
    from importlib import import_module

    from allotrope.architectures.registry import ARCHITECTURES
    from allotrope.attention.registry import FAMILIES
    from allotrope.ops.registry import registered_ops

    families = []
    for name, family in FAMILIES.items():
        about = (import_module(f"allotrope.attention.{name}").__doc__ or "").partition("\n")[0]
        backends = [backend.name for backend in family.backends]
        families.append(FamilyEntry(name, backends, about, tuple(sorted(family.cache_kinds))))
    operations = [
        FamilyEntry(op.name, [one.name for one in op.backends], op.summary) for op in registered_ops().values()
    ]
    return Catalogue(families, operations, {architecture: _families_of(architecture) for architecture in ARCHITECTURES})


def _families_of(architecture: str) -> list[str]:
    """Names of the families that a model of the architecture uses, found from its smallest config."""
    import torch

    from allotrope.architectures.registry import find_architecture, read_spec
    from allotrope.layers.parallel import Parallel

    found = find_architecture({"architectures": [architecture]}, architecture)
    _, spec = read_spec(found.tiny() | {"architectures": [architecture]}, architecture)
    one = (Parallel(), torch.float32, torch.float32)
    return sorted({layer.mixer.attention(*one).family for layer in spec.layers})
