"""The entry commands of `bench/` as modules."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent.parent / "bench"


def load_script(name: str) -> Any:
    """`bench/<name>.py`, by its path: a folder beside it may have the same name."""
    spec = spec_from_file_location(f"{name}_command", BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
