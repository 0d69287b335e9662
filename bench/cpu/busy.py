"""Decoding speed on a quiet and on a busy CPU, with and without Allotrope's choice of how threads wait.

    python bench/cpu/busy.py [MODEL]

Without MODEL it is SmolLM2-135M, which `scripts/fetch_smollm2.py` fetches. Two processes load the model: `before` lets
threads spin as long as the OpenMP runtime does by itself, on a busy machine too, `after` is Allotrope as it comes. They
take turns of a few seconds, first on the machine as it is, then beside twice as many busy loops as there are cores. A
figure is the median over pairs of turns; a ratio is the median of the pairs' ratios. CPU time per token does not depend
on other load much.

With the defaults it takes less than 4 minutes. The quiet figures need a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What GCC's OpenMP runtime takes where nothing is set.
RUNTIMES_OWN = {"GOMP_SPINCOUNT": "300000"}
VARIANTS: dict[str, dict[str, str]] = {"before": RUNTIMES_OWN, "after": {}}
PROMPT, CONTEXT = 16, 4096


class Worker:
    """A process that has loaded the model, and computes only when it is asked."""

    def __init__(self, model: str, setting: dict[str, str], options: argparse.Namespace) -> None:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
        }
        command = [
            sys.executable,
            __file__,
            model,
            "--worker",
            "--dtype",
            options.dtype,
            "--requests",
            str(options.requests),
            *(["--always-spin"] if setting == RUNTIMES_OWN else []),
        ]
        self._process = subprocess.Popen(
            command, env=environment | setting | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer()

    def turn(self, seconds: float) -> dict[str, float]:
        """Decode for so long: tokens a second, and milliseconds of CPU time a token."""
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self._process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found


def work(options: argparse.Namespace) -> None:
    """The worker's side: one line in, so many seconds of decoding, one line out."""
    from allotrope import LLM, SamplingParams
    from allotrope.request import Request

    llm = LLM(options.model, dtype=options.dtype, max_model_len=CONTEXT, kv_cache_memory_bytes=1 << 30)
    if options.always_spin:
        llm.engine.always_spin()
    params = SamplingParams(max_tokens=CONTEXT - PROMPT, ignore_eos=True)
    print(json.dumps({}), flush=True)
    for turn, line in enumerate(sys.stdin):
        names = [f"{turn}-{number}" for number in range(options.requests)]
        for number, name in enumerate(names):
            llm.engine.add(Request(request_id=name, prompt_ids=_prompt(number), params=params))
        # The prompts, and a first token of each.
        llm.engine.step()
        llm.engine.step()
        begin, cpu, tokens = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - begin < float(line):
            tokens += sum(len(output.token_ids) for output in llm.engine.step())
        elapsed, used = time.perf_counter() - begin, time.process_time() - cpu
        llm.engine.abort(names)
        print(json.dumps({"speed": tokens / elapsed, "cpu_ms": 1000 * used / tokens}), flush=True)


def _prompt(number: int) -> tuple[int, ...]:
    return tuple(range(100 + number, 100 + number + PROMPT))


def measure(workers: dict[str, Worker], pairs: int, seconds: float) -> dict[str, Any]:
    """Turns of both in alternating order."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for pair in range(pairs):
        for name in list(workers)[:: 1 if pair % 2 == 0 else -1]:
            seen[name].append(workers[name].turn(seconds))
    ratios = [after["speed"] / before["speed"] for before, after in zip(seen["before"], seen["after"], strict=True)]
    medians = {
        name: {key: statistics.median(turn[key] for turn in turns) for key in ("speed", "cpu_ms")}
        for name, turns in seen.items()
    }
    return {**medians, "ratio": statistics.median(ratios), "turns": seen}


def show(title: str, found: dict[str, Any]) -> None:
    print(title)
    for name in VARIANTS:
        print(f"  {name:7} {found[name]['speed']:8.2f} tokens/s {found[name]['cpu_ms']:8.2f} ms CPU a token")
    print(f"  after / before: {found['ratio']:.3f}", flush=True)


def fetched() -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "fetch_smollm2.py"], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding speed on a quiet and on a busy CPU, before and after.")
    parser.add_argument("model", nargs="?", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=1, help="requests that decode together")
    parser.add_argument("--quiet-pairs", type=int, default=12)
    parser.add_argument("--busy-pairs", type=int, default=7)
    parser.add_argument("--quiet-seconds", type=float, default=2.0)
    parser.add_argument("--busy-seconds", type=float, default=6.0)
    parser.add_argument("--spin-count", type=int, help="for `after`, instead of Allotrope's own")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--always-spin", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    model = options.model or fetched()
    variants = dict(VARIANTS)
    if options.spin_count is not None:
        variants["after"] = {"GOMP_SPINCOUNT": str(options.spin_count)}
    cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        workers = {name: Worker(model, setting, options) for name, setting in variants.items()}
        for worker in workers.values():
            stack.callback(worker.close)
        quiet = measure(workers, options.quiet_pairs, options.quiet_seconds)
        show(f"quiet ({os.getloadavg()[0]:.1f} load), {cores} cores", quiet)
        for _ in range(2 * cores):
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(loop.kill)
        busy = measure(workers, options.busy_pairs, options.busy_seconds)
        show(f"beside {2 * cores} busy loops", busy)
    if options.out is not None:
        settings = {"model": Path(model).name, "dtype": options.dtype, "requests": options.requests, "cores": cores}
        options.out.write_text(json.dumps({"settings": settings, "quiet": quiet, "busy": busy}, indent=1) + "\n")


if __name__ == "__main__":
    main()
