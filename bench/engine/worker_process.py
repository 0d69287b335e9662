"""An engine in a process of its own, which answers commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

# Of what an engine said, the lines that are shown when it fails.
TAIL = 12


class EngineFailed(Exception):
    """An engine could not do what it was asked, died, or took too long."""


class Worker:
    """An engine's process, in a process group of its own that is killed after `limit` seconds, and after `start_limit`
    unless it has `started` by then. `late`: why it was killed."""

    def __init__(
        self,
        engine: str,
        python: str,
        environment: dict[str, str],
        limit: float,
        verbose: bool,
        *,
        start_limit: float | None = None,
    ) -> None:
        self.engine, self.late = engine, ""
        self.log = None if verbose else tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("offline_worker.py")), engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            text=True,
            start_new_session=True,
        )
        self._timers = [self._timer("--limit", limit)]
        if start_limit is not None:
            self._timers.append(self._timer("--start-limit", start_limit))

    def started(self) -> None:
        """`start_limit` is over from here on."""
        for timer in self._timers[1:]:
            timer.cancel()

    def ask(self, **command: Any) -> dict[str, Any]:
        """The answer to a command. Raises EngineFailed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if self.late:
            raise EngineFailed(self.late)
        if not line:
            raise EngineFailed(f"ended with code {self.process.wait()}; {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self._last_words()
            raise EngineFailed(answer["error"])
        return answer

    def run(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        return self.ask(run={"prompts": prompts, "tokens": tokens})

    def close(self) -> None:
        """End the process and all that it started."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=30)
        for timer in self._timers:
            timer.cancel()
        self.kill()
        self.process.wait()
        if self.log is not None:
            self.log.close()

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _timer(self, option: str, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self._end_late, (f"killed after {option} {seconds:g} s",))
        timer.daemon = True
        timer.start()
        return timer

    def _end_late(self, why: str) -> None:
        self.late = why
        self.kill()

    def _last_words(self) -> str:
        """The last line that it printed; the lines before it are shown here."""
        if self.log is None:
            return "see above"
        self.log.seek(0)
        lines = [line for line in self.log.read().splitlines() if line.strip()][-TAIL:]
        for line in lines:
            print(f"  {self.engine}: {line}", file=sys.stderr)
        return f"it said last: {lines[-1].strip()}" if lines else "it said nothing"
