"""Faults of ranks, each in an engine of its own process: what it says, how long it takes, what is left.

`python tests/engine/rank_faults.py` runs all of them and prints the table of docs/distributed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from allotrope.architectures.registry import find_architecture

ROOT = Path(__file__).parent.parent.parent
DEVICE = "cuda" if torch.cuda.device_count() > 1 else "cpu"
# The libraries of a GPU hold up all threads for seconds when they are first used.
WATCHDOG_SECONDS = 10.0 if DEVICE == "cuda" else 3.0
FAULTS = ("raise", "SIGKILL", "SIGSTOP", "hang")

# Python imports a module of this name at the start of each process that finds it on its path.
_INJECT = """
import importlib.abc, importlib.util, os, signal, sys, time

PHASE, FAULT, RANK, STAMP = {phase!r}, {fault!r}, {rank!r}, {stamp!r}

def be_at_fault(phase, rank):
    if (phase, rank) == (PHASE, RANK) and not os.path.exists(STAMP):
        with open(STAMP, "w") as file:
            file.write(str(time.time()))
        if FAULT == "raise":
            raise RuntimeError("injected\\nfault")
        if FAULT == "refuse":
            from allotrope.errors import ModelError
            raise ModelError("tiny", ["one=1 (needs 2)", "two=2 (needs 3)"])
        hang() if FAULT == "hang" else os.kill(os.getpid(), getattr(signal, FAULT))

def hang():
    while True:
        time.sleep(0.1)

def patch(worker):
    load_model, prepare_rank = worker.load_model, worker.prepare_rank
    capture_next = worker.Worker.capture_next

    def prepare_faulty_rank(config, rank, *rest):
        be_at_fault("start", rank)
        return prepare_rank(config, rank, *rest)

    def load_faulty_model(load_plan, *rest):
        be_at_fault("loading", load_plan.build.parallel.world_rank)
        return load_model(load_plan, *rest)

    def faulty(run):
        def run_faulty(self, packed, *rest):
            decodes = worker.StepFacts.read(self._own(packed)).decodes_only
            be_at_fault("decode" if decodes else "prefill", self.load_plan.build.parallel.world_rank)
            return run(self, packed, *rest)

        return run_faulty

    def capture_faulty(self):
        be_at_fault("capture", self.load_plan.build.parallel.world_rank)
        return capture_next(self)

    worker.prepare_rank, worker.load_model = prepare_faulty_rank, load_faulty_model
    worker.Worker.capture_next = capture_faulty
    for name in ("run", "launch", "_follow_step"):
        setattr(worker.Worker, name, faulty(getattr(worker.Worker, name)))

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

_MAIN = """
import ctypes, json, os, signal, sys, threading, time
from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.errors import AllotropeError
from allotrope.request import Request, SamplingParams

options, phase, fault, rank, stamp = json.loads(sys.argv[1])
told = threading.Event()

def be_at_fault():
    with open(stamp, "w") as file:
        file.write(str(time.time()))
    os.kill(engine.process_ids()[rank - 1] if rank else os.getpid(), getattr(signal, fault))

def generate():
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.add(Request(request_id="r", prompt_ids=(3, 4, 5), params=params, eos_ids=()))
    tokens = []
    while engine.has_work():
        for output in engine.step():
            tokens += output.token_ids
    return tokens

said = None
try:
    engine = Engine(EngineConfig(**options), on_death=lambda reason: told.set())
    print("ready", flush=True)
    if phase == "capture":
        engine.capture_all()
    if phase == "pause":
        time.sleep(3)
    if phase == "hold":
        # A function that keeps all other threads from running.
        ctypes.PyDLL(None).sleep(round(2 * options["watchdog_seconds"]))
    if phase == "idle":
        generate()
        be_at_fault()
        told.wait(30)
    if phase == "close":
        generate()
        be_at_fault()
    else:
        print("tokens", generate(), flush=True)
except AllotropeError as error:
    said = f"{type(error).__name__}: {error}"
if "engine" in globals() and phase != "exit":
    started = time.monotonic()
    engine.close()
    print("closed", time.monotonic() - started, flush=True)
print("said", said, flush=True)
sys.exit(said is not None)
"""


@dataclass(frozen=True)
class Ended:
    """How an engine ended. `seconds`: from the fault to the end of its last process. `left`: processes that had to be
    killed. `closed_in`: seconds that `close` took.
    """

    status: int
    seconds: float
    left: list[str]
    output: str
    errors: str

    def value(self, name: str) -> str | None:
        """What the engine's process printed after `name`."""
        return next((line.partition(" ")[2] for line in self.output.splitlines() if line.startswith(name + " ")), None)

    @property
    def said(self) -> str:
        """What was raised; where the process was ended, what stands on standard error."""
        raised = self.value("said")
        lines = [line for line in self.errors.splitlines() if line.startswith("allotrope: ")]
        return raised if raised not in (None, "None") else " ".join(lines).removeprefix("allotrope: ")


class FaultyEngine:
    """A process with an engine of several ranks, of which `rank` is at `fault` in `phase`, with all its processes.

    `more`: options of the engine.
    """

    def __init__(self, directory: Path, phase: str, fault: str, rank: int = 1, size: int = 2, **more: Any) -> None:
        config = find_architecture({"architectures": ["LlamaForCausalLM"]}, "").tiny()
        (directory / "config.json").write_text(json.dumps(config))
        self._stamp = directory / "stamp"
        injected = _INJECT.format(phase=phase, fault=fault, rank=rank, stamp=str(self._stamp))
        (directory / "sitecustomize.py").write_text(injected)
        options = {"model": str(directory), "load_format": "dummy", "dtype": "float32", "max_model_len": 128}
        options |= {"tensor_parallel_size": size, "watchdog_seconds": WATCHDOG_SECONDS, "threads": 1, "device": DEVICE}
        options |= {"kv_cache_memory_bytes": 4_000_000, "max_num_seqs": 4} | more
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, json.dumps([options, phase, fault, rank, str(self._stamp)])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
            # So that all its processes, and no others, are of one session.
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line == "ready\n", line + self._process.communicate()[1]

    def signal_all(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def workers(self) -> list[int]:
        return [pid for pid in session_members(self._process.pid) if pid != self._process.pid]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout: float = 150.0) -> Ended:
        """Wait for the end of the engine's process, and no longer than 5 s for that of the others."""
        since = time.time()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
        deadline = time.time() + 5.0
        while (left := session_members(self._process.pid)) and time.time() < deadline:
            time.sleep(0.02)
        ended = time.time()
        names = [f"{pid}: {Path(f'/proc/{pid}/cmdline').read_text()[:200]}" for pid in left]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        output, errors = self._process.communicate()
        since = float(self._stamp.read_text()) if self._stamp.exists() else since
        return Ended(self._process.returncode, ended - since, names, output, errors)


def session_members(session: int) -> list[int]:
    """Running processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(own) == session and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def table(jobs: int = 1) -> str:
    """Phases, faults and ranks, and what came of each, as a table of Markdown. `jobs`: engines at once."""
    phases = ("start", "loading", *(["capture"] if DEVICE == "cuda" else []), "prefill", "decode")
    cases = [(phase, fault, 1) for phase in phases for fault in FAULTS if (phase, fault) not in UNLIMITED]
    cases += [(phase, fault, 1) for phase in ("idle", "close") for fault in ("SIGKILL", "SIGSTOP")]
    cases += [("loading", "SIGKILL", 0), ("idle", "SIGKILL", 0), *(("decode", fault, 0) for fault in FAULTS)]
    lines = ["| phase | rank | fault | seconds | status | said |", "|---|---|---|---|---|---|"]

    def end_of(case: tuple[str, str, int]) -> Ended:
        with tempfile.TemporaryDirectory() as directory:
            return FaultyEngine(Path(directory), *case).wait()

    with ThreadPoolExecutor(jobs) as pool:
        ends = list(pool.map(end_of, cases))
    for (phase, fault, rank), ended in zip(cases, ends, strict=True):
        said = ended.said.removeprefix("EngineDead: ").replace("; the engine cannot go on.", "")
        left = f" ({len(ended.left)} processes left)" if ended.left else ""
        lines.append(f"| {phase} | {rank} | {fault} | {ended.seconds:.1f}{left} | {ended.status} | {said or '-'} |")
    return "\n".join(lines)


# A rank that loads may take as long as it needs, as long as it is alive.
UNLIMITED = {("start", "hang"), ("loading", "hang")}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="engines at once")
    print(table(parser.parse_args().jobs))
