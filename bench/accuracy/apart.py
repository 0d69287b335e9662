"""A host in a process of its own, which may be refused, fail, end or hang: each is a result."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from allotrope.errors import AllotropeError
from allotrope.eval.answers import Answers
from allotrope.eval.items import Items
from allotrope.eval.options import ModeName
from allotrope.text.tokenizer import load_tokenizer
from allotrope.verify.execution_modes import NotExercised
from bench.accuracy.ask import Host, Running, ask_running
from bench.accuracy.in_sglang import RETRACTING

ROOT = Path(__file__).resolve().parents[2]
# Seconds for a process to free what it has, once it has answered.
_ENDING = 30.0

HostName = Literal["vllm", "sglang"]
Outcome = Literal["answered", "not exercised", "refused", "failed"]


@dataclass(frozen=True)
class Job:
    """One start of a host. `options`: of `vllm.LLM` or of SGLang's engine. `environment`: of its process, where it is
    not set already."""

    host: HostName
    model: str
    tokenizer: str
    options: dict[str, Any]
    items: Items
    mode: ModeName
    environment: dict[str, str]


@dataclass(frozen=True)
class Ended:
    """How a process ended. `reason`: why it did not answer."""

    outcome: Outcome
    reason: str = ""
    answers: Answers | None = None
    host: Host | None = None


def run_job(job: Job, connection: Connection) -> None:
    """The whole life of a process."""
    # What the host starts is of the same process group, and is killed with it.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Libraries print: the report has the output for itself.
    os.dup2(2, 1)
    for name, value in job.environment.items():
        os.environ.setdefault(name, value)
    try:
        answers, host = ask_running(functools.partial(_start, job), job.items, job.mode)
        connection.send(Ended("answered", answers=answers, host=host))
    except NotExercised as reason:
        connection.send(Ended("not exercised", str(reason)))
    except Exception as error:
        # The border of the process: that a mode is refused or fails is a result.
        traceback.print_exc()
        outcome: Outcome = "refused" if is_refusal(error) else "failed"
        connection.send(Ended(outcome, f"{type(error).__name__}: {_one_line(error)}"))
    connection.close()


def _start(job: Job) -> Running:
    """The host itself, whose packages are imported here alone."""
    given = job.model, job.options, load_tokenizer(job.tokenizer), job.items.longest
    if job.host == "vllm":
        from bench.accuracy.in_vllm import RunningVllm

        return RunningVllm(*given)
    from bench.accuracy.in_sglang import RunningSglang

    return RunningSglang(*given)


def _end_with_parent() -> None:
    """A parent that is killed cannot end us: a host that nobody waits for would keep its device."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(os.getpgrp(), signal.SIGKILL)


def is_refusal(error: Exception) -> bool:
    """Whether the host or the plugin says that it cannot do what is asked, where anything else is a fault."""
    if isinstance(error, AllotropeError | NotImplementedError):
        return True
    if not isinstance(error, ValueError):
        return False
    # Of a config of vLLM, whose class is pydantic's; or raised by a line of the host's own.
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_in = str(frames[-1][0].f_globals.get("__name__", "")) if frames else ""
    return raised_in.partition(".")[0] in ("vllm", "sglang", "pydantic")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def run_apart(job: Job, limit: float) -> Ended:
    """Run a job in a process of its own, for at most `limit` seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    # Hosts start ranks, which a daemon may not.
    process = context.Process(target=run_job, args=(job, theirs), daemon=False)
    process.start()
    assert process.pid is not None
    theirs.close()
    try:
        if not ours.poll(limit):
            return Ended("failed", f"killed after --limit {limit:g} s")
        ended: Ended = ours.recv()
        process.join(_ENDING)
        return ended
    except EOFError:
        process.join(_ENDING)
        return Ended("failed", f"its process ended with code {process.exitcode}")
    finally:
        # All that it started; itself alone, if it has not come so far.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def environment_of(host: HostName, device: str, mode: ModeName = "cold", ranks: int = 1) -> dict[str, str]:
    """What a host reads before it starts: our packages in its ranks. Of vLLM also: its engine in our process, functions
    sent to its ranks.

    On a CPU also: its caches' memory, no cores of their own for ranks, prompts of latent attention in chunks.
    """
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in paths:
        # In place of what is set: without it, ranks would not find this folder.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, paths)])
    if host == "sglang":
        on_cpu = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks)} if device == "cpu" else {}
        return on_cpu | (RETRACTING if mode == "preempted" else {})
    plain = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if device != "cpu":
        return plain
    return plain | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_MLA_DISABLE": "1",
    }
