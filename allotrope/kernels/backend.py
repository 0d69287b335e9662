"""Choosing the backend of an operation: every candidate's reasons are collected, none is dropped silently.

Attention and all other operations are chosen by the same function, once, when a model is built. Must not know: which
operations there are.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from allotrope.errors import BackendError
from allotrope.kernels.chip import Chip, chip_of


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation.

    `rejects(spec, chip)` lists why it cannot run a spec on a chip (empty: it can), each reason with the value found and
    the value needed. `run` is the operation; all backends of an operation share its signature. `quantizes`: `run`
    also takes `quantized_from`, the number of rows from which its result is wanted quantized to e4m3 as well.
    """

    name: str
    rejects: Callable[[Any, Chip], list[str]]
    run: Callable[..., Any]
    quantizes: bool = field(default=False, kw_only=True)


class Operation(Protocol):
    """An operation with backends to choose from: an `Op`, or a family of attention."""

    @property
    def name(self) -> str: ...

    @property
    def backends(self) -> Sequence[Backend]:
        """Best first. The last one is the reference, which runs anywhere."""
        ...


@dataclass(frozen=True)
class Op:
    """An operation other than attention. `summary`: what it computes, in one line."""

    name: str
    summary: str
    backends: tuple[Backend, ...]


@dataclass(frozen=True)
class Choice:
    """The backend that runs `spec`, and why each better-ranked one does not: name -> reasons."""

    op: str
    spec: Any
    backend: Any
    passed_over: Mapping[str, Sequence[str]]


def runs_anywhere(spec: Any, chip: Chip) -> list[str]:
    """`Backend.rejects` of a reference."""
    return []


def lazily(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of a module that is imported at the first call: one that needs Triton or a vendor library."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


def choose(op: Operation, spec: Any, chip: Chip, wanted: str | None = None) -> Choice:
    """Choose the first backend that runs `spec` on `chip`, or the `wanted` one.

    Raises BackendError with the reasons of every backend tried.
    """
    candidates = [one for one in op.backends if wanted is None or one.name == wanted]
    if not candidates:
        known = ", ".join(one.name for one in op.backends)
        raise BackendError(f"{op.name} has no backend {wanted!r}; it has: {known}.")
    refused = []
    for backend in candidates:
        reasons = backend.rejects(spec, chip)
        if not reasons:
            return Choice(op.name, spec, backend, _passed_over(op, spec, chip, backend, wanted))
        refused.append(f"{op.name}/{backend.name} cannot run: " + "; ".join(reasons))
    others = [one.name for one in op.backends if one not in candidates and not one.rejects(spec, chip)]
    option = "--op-backend" if isinstance(op, Op) else "--attention-backend"
    advice = f" Try {option} {op.name}={others[0]}." if others else ""
    raise BackendError(". ".join(refused) + "." + advice)


@functools.cache
def best_backend(op: Operation, spec: Any, device: torch.device) -> Any:
    """The first backend that runs `spec` on a device, for operations within others, which no option names. A process
    chooses it once."""
    return choose(op, spec, chip_of(device)).backend


def _passed_over(op: Operation, spec: Any, chip: Chip, chosen: Backend, wanted: str | None) -> dict[str, list[str]]:
    better = itertools.takewhile(lambda one: one.name != chosen.name, op.backends)
    asked = [f"{wanted} was asked for"] if wanted is not None else []
    return {backend.name: asked + backend.rejects(spec, chip) for backend in better}


class Chooser:
    """Chooses the backends of one model on one chip, and remembers each choice.

    `wanted`: operation -> backend that was asked for. `choices` holds each distinct (operation, spec) once, in the
    order in which the model asked.
    """

    def __init__(self, chip: Chip, wanted: Mapping[str, str] | None = None) -> None:
        self.chip, self.wanted = chip, dict(wanted or {})
        self._choices: dict[tuple[str, Any], Choice] = {}

    def choose(self, op: Operation, spec: Any) -> Any:
        """The backend of `op` for `spec`. Raises BackendError."""
        key = (op.name, spec)
        if key not in self._choices:
            self._choices[key] = choose(op, spec, self.chip, self.wanted.get(op.name))
        return self._choices[key].backend

    @property
    def choices(self) -> Sequence[Choice]:
        return tuple(self._choices.values())

    @property
    def unused(self) -> dict[str, str]:
        """Wanted backends of operations that the model does not have: operation -> backend."""
        used = {choice.op for choice in self.choices}
        return {op: name for op, name in self.wanted.items() if op not in used}


def parse_wanted(option: str, text: str | None, names: Iterable[str]) -> dict[str, str]:
    """Read `mha=reference,gdn=chunked`, the value of `option`, into a dict. `names`: of the operations there are.

    Raises BackendError for one that does not exist.
    """
    known = list(names)
    wanted: dict[str, str] = {}
    for item in filter(None, (text or "").split(",")):
        name, equals, backend = item.partition("=")
        if not equals or name not in known:
            raise BackendError(f"{option}={text!r}: {item!r} is not NAME=BACKEND; names: {', '.join(known)}.")
        wanted[name] = backend
    return wanted
