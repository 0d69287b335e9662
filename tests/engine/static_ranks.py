"""Worker processes whose decode steps run on static buffers, as on a GPU: see `static_reference`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allotrope.engine.ranks import worker_process

ROOT = Path(__file__).parent.parent.parent

# Python imports a module of this name at the start of each process that finds it on its path.
_INJECT = """
import importlib.abc, importlib.util, sys, types

def patch(worker):
    allocate = worker.Worker.allocate

    def allocate_static(self, memory):
        from engine.static_reference import static_steps

        allocate(self, memory)
        static_steps(types.SimpleNamespace(_executor=types.SimpleNamespace(worker=self)))

    worker.Worker.allocate = allocate_static

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "allotrope.engine.worker":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), patch(module))
        return spec

sys.meta_path.insert(0, Finder())
"""


def start_static_ranks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes be started for the test, and be such workers. `directory`: to write into."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(_INJECT)
    monkeypatch.setattr(worker_process, "_kept", None)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (directory, ROOT / "tests", ROOT))))
