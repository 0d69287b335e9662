"""The type of the `run` fixture."""

from __future__ import annotations

from collections.abc import Callable

from typer.testing import Result

Run = Callable[..., Result]
