"""What the commands that judge a model have in common: how they print, what they write, and their exit status."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import typer

from allotrope.errors import AllotropeError

if TYPE_CHECKING:
    from rich.console import Console


class Judgement(Protocol):
    """A report that says whether the model passed."""

    @property
    def passed(self) -> bool: ...

    def verdict(self) -> list[str]:
        """The last lines for people."""
        ...


JudgementT = TypeVar("JudgementT", bound=Judgement)


def status_2(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, whose own errors end it with status 2, for 1 says that the model is wrong."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        try:
            command(**values)
        except AllotropeError as error:
            if "--debug" in sys.argv:
                raise
            typer.echo(f"allotrope: error: {error}", err=True)
            raise typer.Exit(2) from error

    return run


def say(console: Console, lines: list[str]) -> None:
    """Print lines as they are: no colours, no wrapping."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def conclude(
    console: Console, report: JudgementT, *files: tuple[Path | None, Callable[[Path, JudgementT], object]]
) -> None:
    """Write the files that are wanted, say the verdict, and end with status 1 where the model did not pass."""
    for path, write in files:
        if path is not None:
            write(path, report)
            print(f"wrote {path}")
    say(console, report.verdict())
    if not report.passed:
        raise typer.Exit(1)
