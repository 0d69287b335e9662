"""`allotrope version`."""

from __future__ import annotations

import allotrope


def version() -> None:
    """Print the version."""
    print(allotrope.__version__)
