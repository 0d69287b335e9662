"""The `allotrope` command: turns errors into one line and an exit status.

Exit status: 0 success, 1 an error, 2 a bad command line. It must not know any command.
"""

from __future__ import annotations

import os
import sys

from allotrope.env import spin_setting
from allotrope.errors import AllotropeError
from allotrope.logs import configure_logging


def main() -> None:
    """Run the command in `sys.argv`. The module's docstring lists the exit statuses."""
    # The variables must be set before a command imports torch. Child processes inherit them.
    os.environ.update(spin_setting())
    try:
        from allotrope.commands.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(f"allotrope: error: the command line needs {error.name}. Run: pip install 'allotrope[cli]'")
    try:
        configure_logging()
        sys.exit(run())
    except AllotropeError as error:
        if "--debug" in sys.argv:
            raise
        print(f"allotrope: error: {error}", file=sys.stderr)
        sys.exit(1)
