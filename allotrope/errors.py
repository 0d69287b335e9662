"""Exceptions of Allotrope.

A message states what failed, each fact with its value and the allowed values, and then what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class AllotropeError(Exception):
    """Base of all errors that Allotrope raises. Its text is written for users."""


class ConfigError(AllotropeError):
    """The options given at start are invalid, alone or together."""


class LayoutRefused(ConfigError):
    """The options do not go with so many ranks."""


def refuse_options(reasons: Sequence[str]) -> None:
    """Raise ConfigError with every one of `reasons`, if there are any."""
    if reasons:
        raise ConfigError("bad options: " + "; ".join(reasons) + ".")


class ModelError(AllotropeError):
    """The checkpoint or its config cannot be served. The error lists every reason."""

    def __init__(self, subject: str, reasons: Sequence[str]) -> None:
        self.reasons = list(reasons)
        super().__init__(f"{subject}:\n" + "\n".join(f"  - {reason}" for reason in self.reasons))


class BackendError(AllotropeError):
    """No attention backend can run a layer. The error lists the reasons of every backend."""


class InvalidRequest(AllotropeError):
    """A request cannot be served.

    `param`: the request field at fault, in the client's spelling.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestsFailed(AllotropeError):
    """Some of several requests failed, and the others did not notice.

    `outputs`: what each request gave, in order; None where it failed.
    """

    def __init__(self, message: str, outputs: Sequence[Any]) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class Overloaded(AllotropeError):
    """The waiting queue is full. The client should retry later."""


class EngineDead(AllotropeError):
    """The engine process has ended."""
