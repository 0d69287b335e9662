"""Whether what a command writes at its end can be written: asked before it begins.

Must not know: what is written.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def file_reasons(name: str, path: str | Path | None) -> list[str]:
    """Why no file can be written at `path`, the value of option `name`; empty where one can be, or none is wanted."""
    if path is None:
        return []
    path, given = Path(path), f"{name}={str(path)!r}"
    if path.is_dir():
        return [f"{given} is a directory; a file is needed"]
    if not path.parent.is_dir():
        return [f"{given}: there is no directory {path.parent}; make it, or name another file"]
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return [f"{given} cannot be written by this user; name another file"]
    return []


def plot_reasons(name: str, path: Path | None) -> list[str]:
    """Why no plot can be drawn to `path`, the value of option `name`; empty where one can be, or none is wanted."""
    reasons = file_reasons(name, path)
    if path is not None and path.suffix.lower() != ".png":
        reasons.append(f"{name}={str(path)!r}; a name that ends in .png is needed")
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        reasons.append(f"{name} needs matplotlib; run: pip install 'allotrope[bench]'")
    return reasons
