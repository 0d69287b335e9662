"""Python code in processes that fork from one that has imported what they need: imports take most of a start.

As a script it imports the modules that it is given, and forks for each line of its input, [code, folder, environment].
The number of the process and then its exit status go to the output, and what it says to `out` and `err` in the folder.
"""

from __future__ import annotations

import atexit
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn


class Forks:
    """A process with `modules`, in `environment`; it ends with this one."""

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, __file__, *modules]
        self.server = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)
        atexit.register(self.server.kill)

    def run(self, code: str, environment: dict[str, str], limit: float) -> subprocess.CompletedProcess[str]:
        """Run `code` with `environment` besides; after `limit` seconds it is killed. What it starts is forked, and ends
        with it."""
        assert self.server.stdin is not None and self.server.stdout is not None
        with tempfile.TemporaryDirectory() as name:
            self.server.stdin.write(json.dumps([code, name, environment]) + "\n")
            self.server.stdin.flush()
            pid = int(self.server.stdout.readline())
            late = threading.Timer(limit, kill_group, [pid])
            late.start()
            status = int(self.server.stdout.readline())
            late.cancel()
            kill_group(pid)
            out, err = ((Path(name) / of).read_text() for of in ("out", "err"))
        return subprocess.CompletedProcess([code], status, out, err)


def environment_with(changes: dict[str, str], *folders: str) -> dict[str, str]:
    """This process's environment with `changes`. Python searches `folders`, and then the tests, before what it says."""
    paths = [*folders, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | changes


def kill_group(pid: int) -> None:
    """Kill a process that leads a group, and what it has started there."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _serve(modules: Sequence[str]) -> None:
    # As where code is given with -c.
    sys.path[0] = ""
    # What else is printed goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in modules:
        importlib.import_module(name)
    forking = multiprocessing.get_context("fork")
    multiprocessing.set_start_method("fork")
    # vLLM asks for a context and SGLang sets a method, to start processes that import all of it.
    multiprocessing.get_context = lambda method=None: forking
    multiprocessing.set_start_method = lambda method, force=False: None
    for line in sys.stdin:
        code, folder, environment = json.loads(line)
        pid = os.fork()
        if not pid:
            _run(code, Path(folder), environment)
        print(pid, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


def _run(code: str, folder: Path, environment: dict[str, str]) -> NoReturn:
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environment)
    status = 1
    try:
        exec(code, {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve(sys.argv[1:])
