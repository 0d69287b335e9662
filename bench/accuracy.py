"""Accuracy of the trained small models: family x host x device x dtype x execution mode.

    python bench/accuracy.py train/models                              our engine on this machine's device
    python bench/accuracy.py train/models --host vllm --python path/to/venv/bin/python

Every cell is a run of `allotrope eval` (of `bench/accuracy_host.py` inside vLLM or SGLang) that is held to the
reference of its model: our engine in float32 on a CPU, nothing cached, which is itself held to Transformers in float32.
Reports of finished runs stay in --work, and a run that is called again does what is missing. See docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from bench.accuracy.report import MODES, cells_of, merged, reference_of, shown_cell  # noqa: E402
from bench.kernels.report import environment  # noqa: E402
from train.quantize import plain  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "accuracy.json"
WORK = ROOT / ".cache" / "accuracy"
# Caches of a run: the items need less, and several runs share a GPU.
CACHE_BYTES = 1 << 30
LATENT, STATES = ("deepseek_v3", "deepseek_v32", "deepseek_v4"), ("qwen3_next",)


@dataclass(frozen=True)
class Dtype:
    """`flags`: of the engine. `models`: which have it; None: all. `stored`: only those with quantized weights."""

    name: str
    flags: tuple[str, ...]
    models: tuple[str, ...] | None = None
    stored: bool = False

    def fits(self, folder: Path) -> bool:
        if self.stored and "quantization_config" not in json.loads((folder / "config.json").read_text()):
            return False
        return self.models is None or folder.name in self.models


PLAIN = ("--quantized-weights", "dequantize")
BF16 = ("--dtype", "bfloat16", *PLAIN)
DTYPES = (
    Dtype("float32", ("--dtype", "float32", *PLAIN)),
    Dtype("bfloat16", BF16),
    Dtype("quantized weights", ("--dtype", "bfloat16", "--quantized-weights", "keep"), stored=True),
    Dtype("FP8 rows", (*BF16, "--kv-cache-dtype", "fp8")),
    Dtype("block-scaled FP8 rows", (*BF16, "--kv-cache-dtype", "fp8_ds_mla"), LATENT),
    Dtype("bfloat16 states", (*BF16, "--state-dtype", "bfloat16"), STATES),
)
REFERENCE = "reference"
# The status of both commands where nothing could be measured.
REFUSED = 2


@dataclass(frozen=True)
class Run:
    """One process: a model on a host and a device in a dtype, in all modes. `name`: of its report."""

    folder: Path
    host: str
    device: str
    dtype: Dtype

    @property
    def name(self) -> str:
        kind = self.dtype.name.replace(" ", "_")
        return f"{self.folder.name}.{digest(self.folder)[:8]}.{self.host}.{self.device}.{kind}"

    @property
    def place(self) -> dict[str, str]:
        """What its cells have in common."""
        weights = digest(self.folder)[:12]
        return {"model": self.folder.name, "weights": weights, "host": self.host, "device": self.device} | {
            "dtype": self.dtype.name
        }


@functools.cache
def digest(folder: Path) -> str:
    """The SHA-256 of a model's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def shown(path: Path) -> str:
    """`path` as seen from the root, where commands run: a command is the same on every machine."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def reference_path(folder: Path, options: argparse.Namespace) -> Path:
    return options.work / f"{folder.name}.{digest(folder)[:8]}.{REFERENCE}.json"


def item_flags(options: argparse.Namespace) -> list[str]:
    return ["--items", str(options.items), "--lengths", options.lengths, "--text", shown(options.text)]


def reference_command(folder: Path, options: argparse.Namespace) -> list[str]:
    """Our engine in float32 on a CPU, beside Transformers where it is asked for."""
    command = [sys.executable, "-m", "allotrope", "eval", shown(folder), *DTYPES[0].flags, "--device", "cpu"]
    command += ["--kv-cache-memory-bytes", str(CACHE_BYTES), "--modes", "cold", *item_flags(options)]
    command += ["--json", shown(reference_path(folder, options))]
    if options.transformers:
        command += ["--baseline", "transformers", "--reference", shown(plain_twin(folder, options))]
    return command


def plain_twin(folder: Path, options: argparse.Namespace) -> Path:
    """The model itself, or what its quantized weights stand for, in float32."""
    return plain(folder, options.work / "plain")


def command_of(run: Run, options: argparse.Namespace) -> list[str]:
    command, folder = [sys.executable, "-m", "allotrope", "eval"], run.folder
    if run.host != "allotrope":
        command = [str(options.python or sys.executable), str(ROOT / "bench" / "accuracy_host.py"), run.host]
        if not run.dtype.stored:
            # Hosts refuse most types of activations beside quantized weights.
            folder = plain_twin(folder, options)
    command += [shown(folder), *run.dtype.flags, *item_flags(options), "--modes", ",".join(options.modes)]
    if run.host == "allotrope":
        command += ["--device", run.device, "--kv-cache-memory-bytes", str(CACHE_BYTES)]
    command += ["--baseline", shown(reference_path(run.folder, options))]
    return [*command, "--json", shown(options.work / f"{run.name}.json")]


def execute(command: list[str], report: Path, options: argparse.Namespace) -> str:
    """Runs one command, unless it made the report that is there. Returns what became of it, in a word."""
    log = report.with_suffix(".log")
    if not options.again and is_done(command, report):
        return "there"
    # What is left of an earlier run says nothing of this one.
    report.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    environ = os.environ | {
        "OMP_NUM_THREADS": str(options.threads),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    begun = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, env=environ, cwd=ROOT)
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, output = -1, f"ended after {options.timeout} s"
    log.write_text(" ".join(command) + "\n" + output)
    if not report.is_file():
        said = [line for line in output.splitlines() if line.strip()]
        error = next((line for line in said if "error:" in line), said[-1] if said else f"exit code {code}")
        # A host that refuses the dtype says so by its status; any other process without a report died.
        outcome = "refused" if code == REFUSED else "failed"
        report.write_text(json.dumps({outcome: error.partition("error: ")[2] or error, "code": code}))
    return f"exit {code} after {time.perf_counter() - begun:.0f} s"


def is_done(command: list[str], report: Path) -> bool:
    """Whether this very command made `report`, with whatever Python, and came to an end by itself."""
    log = report.with_suffix(".log")
    if not report.is_file() or not log.is_file():
        return False
    made_by = log.read_text().partition("\n")[0].partition(" ")[2]
    return made_by == " ".join(command[1:]) and "failed" not in json.loads(report.read_text())


def run_all(options: argparse.Namespace) -> list[Run]:
    """Runs what is missing, references first. Returns all runs, in the order of the table."""
    options.work.mkdir(parents=True, exist_ok=True)
    folders = [path for path in sorted(options.models.iterdir()) if (path / "config.json").is_file()]
    folders = [path for path in folders if not options.only or path.name in options.only]
    runs = [
        Run(folder, options.host, options.device, dtype)
        for folder in folders
        for dtype in DTYPES
        if dtype.fits(folder) and (not options.dtypes or dtype.name in options.dtypes)
    ]
    lock = threading.Lock()

    def one(name: str, command: list[str], report: Path) -> None:
        said = execute(command, report, options)
        with lock:
            print(f"{name}: {said}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        asked = [
            (f"{folder.name}.{REFERENCE}", reference_command(folder, options), reference_path(folder, options))
            for folder in folders
        ]
        list(pool.map(lambda run: one(*run), asked))
        # All commands first: they write plain twins, which runs of one model read side by side.
        asked = [(run.name, command_of(run, options), options.work / f"{run.name}.json") for run in runs]
        list(pool.map(lambda run: one(*run), asked))
    return runs


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("models", type=Path, help="folder of models, as `train/all.py` writes it")
    parser.add_argument("--host", choices=("allotrope", "vllm", "sglang"), default="allotrope")
    parser.add_argument("--python", type=Path, help="of the environment that has the host; default: this one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES), help="with commas between")
    parser.add_argument(
        "--dtypes", nargs="+", choices=[one.name for one in DTYPES], help="default: all that a model has"
    )
    parser.add_argument("--only", nargs="+", help="models; default: all of the folder")
    parser.add_argument("--items", type=int, default=24, help="of each task and length")
    parser.add_argument("--lengths", default="320,1024", help="bytes of prompts, with commas between")
    parser.add_argument("--text", type=Path, default=ROOT / "train" / "models" / "held_out.txt", help="for perplexity")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, cores // 2)), help="processes side by side")
    parser.add_argument("--threads", type=int, default=max(1, cores // max(1, min(8, cores // 2))), help="of a process")
    parser.add_argument("--timeout", type=int, default=900, help="seconds of one process")
    parser.add_argument("--no-transformers", dest="transformers", action="store_false", help="do not ask Transformers")
    parser.add_argument("--work", type=Path, default=WORK, help="reports of finished runs")
    parser.add_argument("--again", action="store_true", help="run also what has a report")
    parser.add_argument("--out", type=Path, default=RESULTS, help="results of all machines; new ones join them")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    begun = time.perf_counter()
    runs = run_all(options)
    references, cells = {}, []
    for run in runs:
        found = json.loads(reference_path(run.folder, options).read_text())
        if "modes" not in found:
            print(f"{run.folder.name} has no reference: {found.get('refused', found.get('failed'))}", file=sys.stderr)
            return 2
        references[run.folder.name] = reference_of(digest(run.folder)[:12], found)
        cells += cells_of(run.place, json.loads((options.work / f"{run.name}.json").read_text()))
    called = " ".join(["python bench/accuracy.py", *(sys.argv[1:] if arguments is None else arguments)])
    place = f"{options.host}, {options.device}"
    known = environment(torch.device(options.device))
    # Reports of runs that were done before took their time as well.
    spent = sum(json.loads((options.work / f"{run.name}.json").read_text()).get("seconds", 0.0) for run in runs)
    seconds = max(time.perf_counter() - begun, spent / options.jobs)
    about = {"place": place, "modes": options.modes, "command": called, "seconds": seconds}
    about |= {key: known[key] for key in ("device", "torch", "date")}
    old = json.loads(options.out.read_text()) if options.out.is_file() else {}
    results = merged(old, {"references": references, "cells": cells, "runs": [about]})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    red = [cell for cell in cells if cell["state"] == "red"]
    for cell in red:
        print(f"red: {cell['model']} {cell['dtype']} {cell['mode']}: {cell.get('reason') or shown_cell(cell)}")
    print(f"{len(cells)} cells, {len(red)} red; wrote {options.out}")
    return int(bool(red))


if __name__ == "__main__":
    sys.exit(main())
