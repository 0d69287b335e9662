"""Choosing who runs a layer: every candidate's reasons are collected, none is dropped silently."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.errors import BackendError

log = logging.getLogger("allotrope.attention")

# The oldest and the newest Triton that the kernels are tested with.
TRITON_VERSIONS = ((3, 6), (3, 9))


@dataclass(frozen=True)
class Backend:
    """One way to run a family.

    `rejects(spec, device)` lists why it cannot run a layer (empty: it can), each reason with the value found and the
    value needed. `plan(spec, batch, index)` builds what all layers of `spec.plan_key` share in a step; only this
    backend's `run` reads it. `index`: cache name -> where its rows lie. `run` is the family's function; all backends
    of a family share its signature. `in_graphs`: its plan is made by device operations alone from `batch.tensors` and
    `index`, the host's integers being upper bounds, so that a step of one token a request can be captured and replayed.
    `fallbacks(spec, dtype, device)`: which steps of such a layer go the way of another backend, with activations of
    `dtype`, and why; none for most backends.
    """

    name: str
    rejects: Callable[[Any, torch.device], list[str]]
    plan: Callable[..., Any]
    run: Callable[..., Any]
    in_graphs: bool = False
    fallbacks: Callable[[Any, torch.dtype, torch.device], list[str]] = lambda spec, dtype, device: []


def runs_anywhere(spec: Any, device: torch.device) -> list[str]:
    """`Backend.rejects` of a reference."""
    return []


def triton_reasons(device: torch.device) -> list[str]:
    """Why no Triton kernel can run on `device`; Triton is not imported where it runs none."""
    reasons = [] if device.type == "cuda" else [f"device={device.type} (needs cuda)"]
    if importlib.util.find_spec("triton") is None:
        reasons.append("triton is not installed")
    elif not reasons:
        reasons.extend(version_reasons(_triton_version()))
    return reasons


@functools.cache
def version_reasons(version: str) -> tuple[str, ...]:
    """Why the kernels cannot be compiled by this version of Triton. One that is newer than those tested is tried, and
    what may be wrong with it is said once."""
    found = re.match(r"(\d+)\.(\d+)", version)
    oldest, newest = (".".join(map(str, one)) for one in TRITON_VERSIONS)
    if found is None:
        log.warning(
            "triton=%r is no version that can be read; the kernels are tested with %s to %s", version, oldest, newest
        )
        return ()
    pair = (int(found[1]), int(found[2]))
    if pair < TRITON_VERSIONS[0]:
        return (f"triton={version} (needs {oldest} or newer: it lacks what the kernels call)",)
    if pair > TRITON_VERSIONS[1]:
        log.warning(
            "triton=%s is newer than those the kernels are tested with (%s to %s): if one cannot be compiled, install "
            "a tested version",
            *(version, oldest, newest),
        )
    return ()


@functools.cache
def _triton_version() -> str:
    """The installed version; builds for some chips come under other names, and only the package itself knows it."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return str(importlib.import_module("triton").__version__)


def lazily(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of a module that is imported at the first call: one that needs Triton or a vendor library."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


def choose(
    family: str, backends: Sequence[Backend], spec: Any, device: torch.device, wanted: str | None = None
) -> Backend:
    """Return the first backend that can run `spec` on `device`, or the `wanted` one.

    Raises BackendError with the reasons of every backend tried.
    """
    candidates = [b for b in backends if wanted is None or b.name == wanted]
    if not candidates:
        known = ", ".join(b.name for b in backends)
        raise BackendError(f"{family} has no backend {wanted!r}; it has: {known}.")
    refused = []
    for backend in candidates:
        reasons = backend.rejects(spec, device)
        if not reasons:
            return backend
        refused.append(f"{family}/{backend.name} cannot run: " + "; ".join(reasons))
    others = [b.name for b in backends if b not in candidates and not b.rejects(spec, device)]
    advice = f" Try --attention-backend {family}={others[0]}." if others else ""
    raise BackendError(". ".join(refused) + "." + advice)


def passed_over(
    backends: Sequence[Backend], spec: Any, device: torch.device, chosen: Backend, wanted: str | None = None
) -> dict[str, list[str]]:
    """Why each backend that ranks before the `chosen` one does not run `spec` on `device`: name -> reasons.

    `wanted`: the backend that was asked for by name, None if none was.
    """
    better = itertools.takewhile(lambda one: one.name != chosen.name, backends)
    asked = [f"{wanted} was asked for"] if wanted is not None else []
    return {backend.name: asked + backend.rejects(spec, device) for backend in better}


def parse_wanted(text: str | None, families: Sequence[str]) -> dict[str, str]:
    """Read `mha=reference,gdn=chunked` into a dict; raises BackendError for a family that does not exist."""
    wanted: dict[str, str] = {}
    for item in filter(None, (text or "").split(",")):
        family, equals, name = item.partition("=")
        if not equals or family not in families:
            raise BackendError(
                f"attention_backend={text!r}: {item!r} is not FAMILY=BACKEND; families: {', '.join(families)}."
            )
        wanted[family] = name
    return wanted
