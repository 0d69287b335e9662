"""What a plugin needs of its host: symbols with what is called of them, and versions; how both are probed. And what the
host limits of our models.

Must not know: which host it is, what is done with its symbols.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata


@dataclass(frozen=True)
class Symbol:
    """`path`: module:attribute. `accepts`: parameters (of a class, fields) that are given by name. `has`: members.
    `instead`: what does as well, of an earlier version."""

    path: str
    accepts: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    instead: Symbol | None = None


@dataclass(frozen=True)
class Finding:
    """One probe. `reason`: what is wrong, empty if nothing is."""

    path: str
    reason: str = ""


@dataclass(frozen=True)
class Limit:
    """`what`: of our own engine's functions, one that a host lacks for models that have caches of all `kinds`, the
    kinds of `Family.cache_kinds`. Without kinds it holds of every model."""

    what: str
    kinds: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Contract:
    """`host`: its name. `distributions`: its builds on package indexes. `known`: the releases, such as 0.25 or 0.5.23,
    whose behaviour the tests have seen. `symbols`: everything that the plugin imports, subclasses or calls. `optional`:
    symbols without which the plugin runs, but for one command. `limits`: in the order in which they are shown."""

    host: str
    distributions: tuple[str, ...]
    known: tuple[str, ...]
    symbols: tuple[Symbol, ...]
    limits: tuple[Limit, ...] = ()
    optional: tuple[Symbol, ...] = ()

    def installed(self) -> str | None:
        """Version of the installed host, None if there is none."""
        for name in self.distributions:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    def version_reasons(self, version: str | None) -> list[str]:
        """Why a version is not one to plug into."""
        if version is None:
            return [f"{self.host} is not installed"]
        if any(release(version, known) == known for known in self.known):
            return []
        known = ", ".join(one if one.count(".") > 1 else f"{one}.x" for one in self.known)
        return [f"{self.host} {version} is not known (known: {known})"]

    def probe(self) -> Iterator[Finding]:
        """Look for every symbol of the table, with what is needed of it."""
        for symbol in self.symbols:
            reason = _reason(symbol)
            holds = symbol.instead is not None and not _reason(symbol.instead)
            yield Finding(symbol.path, "" if holds else reason)

    def probe_optional(self) -> Iterator[Finding]:
        """The same of the symbols without which the plugin runs."""
        for symbol in self.optional:
            yield Finding(symbol.path, _reason(symbol))

    def limits_of(self, kinds: Collection[str]) -> list[str]:
        """Of models that have caches of these kinds, beside what is limited of every model."""
        return [limit.what for limit in self.limits if limit.kinds and limit.kinds <= set(kinds)]

    def limits_of_all(self) -> list[str]:
        """What is limited of every model."""
        return [limit.what for limit in self.limits if not limit.kinds]

    def refusals(self) -> list[str]:
        """Every reason not to plug into the installed host; empty if there is none."""
        reasons = self.version_reasons(self.installed())
        return reasons or [f"{finding.path} {finding.reason}" for finding in self.probe() if finding.reason]


def release(version: str, known: str) -> str:
    """The part of `version`, without its build's name, that is as long as `known`."""
    return ".".join(version.split("+")[0].split(".")[: known.count(".") + 1])


def _reason(symbol: Symbol) -> str:
    module, _, name = symbol.path.partition(":")
    try:
        found = getattr(import_module(module), name)
        parameters = set(inspect.signature(found).parameters) if symbol.accepts else set()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    lacking = [f"parameter {name}" for name in symbol.accepts if name not in parameters]
    lacking += [name for name in symbol.has if not hasattr(found, name)]
    return f"has no {', '.join(lacking)}" if lacking else ""
