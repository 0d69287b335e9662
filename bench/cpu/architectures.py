"""Every architecture on this CPU, against Transformers `generate` and, where it runs them, vLLM.

    python bench/cpu/architectures.py --vllm-python /path/to/venv/bin/python

Tiny checkpoints of random weights are made from each architecture's own tiny config, with the sizes that vLLM's kernels
ask for. Each engine has a process of its own and all get the same prompts in turns, so that a disturbance of the
machine hits all. Prefill is the time to the first token of every prompt; decode is what each further token adds.
Ratios are speeds, ours over theirs: above 1 we are faster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

PROMPT, OUTPUT = 128, 32
BATCHES = (4, 1)
HERE = Path(__file__).resolve().parent
# Sizes that vLLM's attention kernels have on a CPU, where the tiny config is smaller.
HEADS: dict[str, Any] = {"head_dim": 32}
LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
SIZES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "Gemma3ForCausalLM": HEADS,
    "Gemma4ForCausalLM": {"head_dim": 64, "global_head_dim": 128},
    "LlamaForCausalLM": HEADS,
    "MistralForCausalLM": HEADS,
    "Qwen3ForCausalLM": HEADS,
    "Qwen3MoeForCausalLM": HEADS,
}
# vLLM's gated delta rule on a CPU knows bf16 and this head size alone.
LINEAR_HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}


@dataclass
class Case:
    """One checkpoint in one type. `config`: of its config.json. `changed`: values that differ from the tiny config."""

    name: str
    dtype: str
    config: dict[str, Any]
    changed: dict[str, Any] = field(default_factory=dict)
    directory: Path | None = None


@dataclass
class Figures:
    """One engine at one batch size: medians of `prefill_s` and `total_s`, and whether tokens are as Transformers'."""

    prefill_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def prefill(self) -> float:
        """Seconds to the first token of all prompts."""
        return statistics.median(self.prefill_s)

    @property
    def decode(self) -> float:
        """Seconds per further step."""
        pairs = zip(self.total_s, self.prefill_s, strict=True)
        return statistics.median((total - first) / (OUTPUT - 1) for total, first in pairs)


class Worker:
    """An engine's process; started anew if it dies."""

    def __init__(self, engine: str, python: str, threads: int, verbose: bool) -> None:
        self.engine, self.command = engine, [python, str(HERE / "architecture_worker.py"), engine]
        self.environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # None: an installed Allotrope would put its own models into vLLM's place.
            "VLLM_PLUGINS": "",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        }
        self.stderr = None if verbose else subprocess.DEVNULL
        self.process: subprocess.Popen[str] | None = None

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer; it has "error" if the engine refuses or dies."""
        if self.process is None:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                self.command, stdin=pipe, stdout=pipe, stderr=self.stderr, env=self.environment, text=True
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code, self.process = self.process.wait(), None
        return {"error": f"the process ended with code {code}"}

    def close(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None


def tiny_cases(names: Sequence[str]) -> list[Case]:
    """A case for each architecture of the registry, and another in bf16 where vLLM runs nothing else."""
    from allotrope.architectures.registry import ARCHITECTURES

    cases: list[Case] = []
    seen: set[str] = set()
    for name, place in ARCHITECTURES.items():
        if (names and name not in names) or place in seen:
            continue
        seen.add(place)
        module, _, row = place.partition(":")
        tiny = getattr(import_module(f"allotrope.architectures.{module}"), row).tiny
        changed = SIZES.get(name, {})
        cases.append(Case(name, "float32", tiny() | changed, changed))
        if "linear_num_key_heads" in tiny():
            cases.append(Case(name, "bfloat16", tiny() | LINEAR_HEADS, LINEAR_HEADS))
    return cases


def given_cases(directories: Sequence[Path]) -> list[Case]:
    """A case for each checkpoint on disk."""
    return [
        Case(path.name, "float32", json.loads((path / "config.json").read_text()), directory=path)
        for path in directories
    ]


def write(case: Case, root: Path) -> Path:
    """The directory of the case's checkpoint, made if need be."""
    if case.directory is not None:
        return case.directory
    from allotrope.verify.random_checkpoint import write_random

    directory = root / f"{case.name}-{case.dtype}"
    write_random(case.config, directory, None, 0)
    return directory


def prompts_of(case: Case, count: int) -> list[list[int]]:
    """Prompts of random tokens, the same for every engine."""
    import torch

    text = case.config.get("text_config", case.config)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(8, text["vocab_size"], (count, PROMPT), generator=generator).tolist()


def measure(case: Case, workers: Sequence[Worker], repeats: int) -> dict[int, dict[str, Figures]]:
    """Per batch size, the figures of each engine; engines take turns. Raises RuntimeError if one fails on the way."""
    found: dict[int, dict[str, Figures]] = {}
    for count in BATCHES:
        prompts = prompts_of(case, count)
        figures = {worker.engine: Figures() for worker in workers}
        for repeat in range(repeats + 1):
            for worker in workers:
                # Threads of the engine before may still spin for a while, and caches hold its data.
                time.sleep(0.1)
                run(worker, prompts, 2)
                first = run(worker, prompts, 1)
                whole = run(worker, prompts, OUTPUT)
                mine = figures[worker.engine]
                mine.tokens = whole["ids"]
                # The first round warms up.
                if repeat:
                    mine.prefill_s.append(first["seconds"])
                    mine.total_s.append(whole["seconds"])
        found[count] = figures
    return found


def run(worker: Worker, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    answer = worker.ask({"run": {"prompts": prompts, "tokens": tokens}})
    if "error" in answer:
        raise RuntimeError(f"{worker.engine}: {answer['error']}")
    return answer


def load_all(
    case: Case, directory: Path, workers: Sequence[Worker], options: argparse.Namespace
) -> tuple[list[Worker], dict[str, str]]:
    """The workers that can run the case, and why the others cannot."""
    job = {
        "directory": str(directory),
        "config": case.config,
        "dtype": case.dtype,
        "sequences": max(BATCHES),
        "length": PROMPT + OUTPUT + 16,
        "threads": options.threads,
        "compile": options.vllm_compile,
    }
    able, reasons = [], {}
    for worker in workers:
        answer = worker.ask({"load": job})
        if "error" not in answer:
            # Some refuse only what they are first asked.
            answer = worker.ask({"run": {"prompts": prompts_of(case, 1), "tokens": 2}})
        if "error" in answer:
            # What a failed start leaves behind must not meet the next checkpoint.
            worker.close()
            reasons[worker.engine] = " ".join(answer["error"].split())
        else:
            able.append(worker)
    return able, reasons


def agreement(mine: list[list[int]], theirs: list[list[int]]) -> str:
    """ "equal", or after how many tokens the first of the prompts differs."""
    firsts = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), OUTPUT)
        for x, y in zip(mine, theirs, strict=True)
    ]
    return "equal" if min(firsts) == OUTPUT else f"{min(firsts)}"


COLUMNS = (
    f"{'':34}{'B':>2}  {'prefill tok/s':>26}  {'decode ms/step':>24}  {'as':>7}  {'x HF':>11}  {'x vLLM':>11}\n"
    f"{'':36}  {'ours':>8}{'HF':>9}{'vLLM':>9}  {'ours':>8}{'HF':>8}{'vLLM':>8}  {'HF':>7}"
    f"  {'pre   dec':>11}  {'pre   dec':>11}"
)


def report(case: Case, found: dict[int, dict[str, Figures]]) -> list[dict[str, Any]]:
    """Print the rows of a case, and return them for the JSON file."""
    rows = []
    for count, figures in found.items():
        ours, reference = figures["allotrope"], figures.get("transformers")
        row: dict[str, Any] = {"architecture": case.name, "dtype": case.dtype, "batch": count, "changed": case.changed}
        speeds, steps = "", ""
        for engine, width in (("allotrope", 8), ("transformers", 9), ("vllm", 9)):
            its = figures.get(engine)
            speeds += f"{count * PROMPT / its.prefill:{width}.0f}" if its else f"{'-':>{width}}"
            steps += f"{1000 * its.decode:8.2f}" if its else f"{'-':>8}"
            if its is not None:
                equal = agreement(its.tokens, reference.tokens) if reference else None
                row[engine] = {"prefill_s": its.prefill, "decode_s": its.decode, "tokens": equal, **asdict(its)}
                del row[engine]["tokens"]
                row[engine]["as_transformers"] = equal
        ratios = ""
        for engine in ("transformers", "vllm"):
            its = figures.get(engine)
            if its is None:
                ratios += f"  {'-':>11}"
                continue
            pair = (its.prefill / ours.prefill, its.decode / ours.decode)
            row[f"over_{engine}"] = {"prefill": pair[0], "decode": pair[1]}
            ratios += f"  {pair[0]:5.2f}{pair[1]:6.2f}"
        kind = "" if case.dtype == "float32" else f" {case.dtype}"
        same = row["allotrope"]["as_transformers"] or "-"
        print(f"{case.name + kind:34.34}{count:>2}  {speeds}  {steps}  {same:>7}{ratios}", flush=True)
        rows.append(row)
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> None:
    """Geometric means, and what is below 1."""
    for engine in ("transformers", "vllm"):
        for phase in ("prefill", "decode"):
            ratios = {
                f"{row['architecture']} {row['dtype']} B={row['batch']}": row[f"over_{engine}"][phase]
                for row in rows
                if f"over_{engine}" in row
            }
            if not ratios:
                continue
            mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
            below = [f"{name} {ratio:.2f}" for name, ratio in sorted(ratios.items(), key=lambda it: it[1]) if ratio < 1]
            print(f"{phase} over {engine}: geometric mean {mean:.2f}, {len(below)} of {len(ratios)} below 1", end="")
            print(": " + ", ".join(below) if below else "")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "directories", nargs="*", type=Path, help="checkpoints; default: tiny ones of all architectures"
    )
    parser.add_argument(
        "--arch", action="append", default=[], help="only this architecture of the registry (repeatable)"
    )
    parser.add_argument(
        "--vllm-python", help="Python of an environment with vLLM's CPU build; without it vLLM is left out"
    )
    parser.add_argument(
        "--vllm-compile", action="store_true", help="let vLLM compile (a minute or more per checkpoint)"
    )
    parser.add_argument("--skip-transformers", action="store_true", help="leave Transformers out; no parity then")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds; medians are shown")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads of each engine")
    parser.add_argument("--json", type=Path, default=HERE.parent / "results" / "cpu_architectures.json")
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    return parser.parse_args()


def main() -> None:
    options = parse()
    workers = [Worker("allotrope", sys.executable, options.threads, options.verbose)]
    if not options.skip_transformers:
        workers.append(Worker("transformers", sys.executable, options.threads, options.verbose))
    if options.vllm_python:
        workers.append(Worker("vllm", options.vllm_python, options.threads, options.verbose))
    cases = given_cases(options.directories) if options.directories else tiny_cases(options.arch)
    rows: list[dict[str, Any]] = []
    absent: dict[str, dict[str, str]] = {}
    print(f"prompts of {PROMPT} tokens, {OUTPUT} new ones each; {options.threads} threads\n{COLUMNS}")
    with tempfile.TemporaryDirectory() as root:
        for case in cases:
            able, reasons = load_all(case, write(case, Path(root)), workers, options)
            if reasons:
                absent[f"{case.name} {case.dtype}"] = reasons
            if "allotrope" not in reasons:
                rows += report(case, measure(case, able, options.repeats))
            for engine, reason in reasons.items():
                print(f"    {engine} does not run {case.name} in {case.dtype}: {reason[:160]}", flush=True)
            save(options, rows, absent)
    for worker in workers:
        worker.close()
    summary(rows)


def save(options: argparse.Namespace, rows: list[dict[str, Any]], absent: dict[str, dict[str, str]]) -> None:
    """Write what is known so far. `absent`: per case, why an engine does not run it."""
    machine = {"cpu": platform.processor() or platform.machine(), "threads": options.threads}
    settings = {"prompt": PROMPT, "output": OUTPUT, "repeats": options.repeats, "vllm_compile": options.vllm_compile}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**machine, **settings, "rows": rows, "absent": absent}, indent=1) + "\n")


if __name__ == "__main__":
    main()
