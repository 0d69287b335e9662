"""The errors of Allotrope, each for one kind of reader.

A message states what failed, each fact with its value and what is allowed, then what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class AllotropeError(Exception):
    """Any error that Allotrope raises on purpose; its text is fit to show to a user as it is."""


class ConfigError(AllotropeError):
    """The options given at start cannot work (alone or together)."""


class ModelError(AllotropeError):
    """The checkpoint or its config cannot be served; lists every reason that was found."""

    def __init__(self, subject: str, reasons: Sequence[str]) -> None:
        self.reasons = list(reasons)
        super().__init__(f"{subject}:\n" + "\n".join(f"  - {reason}" for reason in self.reasons))


class BackendError(AllotropeError):
    """No attention backend can run a layer; carries every backend's reasons."""


class InvalidRequest(AllotropeError):
    """One request cannot be served as it stands.

    `param` names the request field at fault (as the client spells it).
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Overloaded(AllotropeError):
    """The waiting queue is full; the client should retry later."""


class EngineDead(AllotropeError):
    """The engine process has ended; nothing more can be generated."""
