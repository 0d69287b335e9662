"""Trains all models side by side, quantizes, and prints what each has learnt.

    python train/all.py --out /tmp/models

Each model has a process of its own; with several GPUs they are dealt out. OUT has a folder and a log for each model,
summary.json, and the models in the form in which they are published in `published`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from train.configs import CONFIGS, STEPS
from train.measure import DISTANCES
from train.quantize import publish, quantize_all
from train.train import ROWS, TEXT, draw_missing, row_counts
from train.trainer import Schedule


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of all checkpoints")
    parser.add_argument("--steps", type=int, help="of each model; default: of `train.configs.STEPS`")
    parser.add_argument("--minutes", type=float, help="of training of each model, in place of --steps")
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, default=TEXT, help="of `python -m train.text`")
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder of rows, one in it for each seed")
    parser.add_argument("--items", type=int, default=64, help="measured per task and distance")
    parser.add_argument("--longest", type=int, default=16384, help="bytes of the longest rows")
    parser.add_argument("--tokens", type=int, default=Schedule.tokens, help="of a step")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(tokens=args.tokens).at_most(args.longest)
    most = args.steps or max(STEPS[name] for name in args.models)
    counts = row_counts(schedule, args.minutes, most)
    draw_missing(args.rows / f"seed{args.seed}", args.text, counts, args.seed)
    failed = train_all(args)
    summary = {
        name: json.loads((args.out / name / "report.json").read_text()) for name in args.models if name not in failed
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(table(summary))
    folders = [args.out / name for name in summary]
    for line in quantize_all(folders):
        print(line)
    publish(folders, args.out / "published")
    for name, code in failed.items():
        end = (args.out / f"{name}.log").read_text()[-3000:]
        print(f"\n{name} failed with {code}; the end of its log:\n{end}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def train_all(args: argparse.Namespace) -> dict[str, int]:
    """Runs a process for each model. Returns the exit codes of those that failed."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if devices == [""]:
        devices = [str(i) for i in range(torch.cuda.device_count())]
    script, running = Path(__file__).parent / "train.py", {}
    for i, name in enumerate(args.models):
        command = [sys.executable, str(script), name, "--out", str(args.out / name)]
        for flag in ("seed", "text", "rows", "items", "longest", "tokens"):
            command += [f"--{flag}", str(getattr(args, flag))]
        for flag in ("steps", "minutes"):
            if (given := getattr(args, flag)) is not None:
                command += [f"--{flag}", str(given)]
        if args.eager:
            command.append("--eager")
        environment = os.environ | {"OMP_NUM_THREADS": "2"}
        if torch.cuda.is_available():
            environment["CUDA_VISIBLE_DEVICES"] = devices[i % len(devices)]
        with (args.out / f"{name}.log").open("w") as log:
            running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    begun, codes = time.perf_counter(), {}
    for name, process in running.items():
        codes[name] = process.wait()
        print(f"{name}: exit {codes[name]} after {time.perf_counter() - begun:.0f} s", flush=True)
    return {name: code for name, code in codes.items() if code}


def table(summary: dict[str, dict]) -> str:
    """One line for each model."""
    if not summary:
        return "no model was trained"
    tasks = list(next(iter(summary.values()))["measured"]["tasks"])
    heads = ["model", "Mparam", "steps", "Mtokens", "ktok/s", "GiB", "answers", "bits/byte", *tasks]
    heads += [f"recall@{distance}" for distance in DISTANCES] + ["MTP"]
    lines = [heads]
    for name, report in summary.items():
        measured = report["measured"]
        lines.append(
            [
                name,
                f"{report['parameters'] / 1e6:.2f}",
                str(report["steps"]),
                f"{report['tokens'] / 1e6:.1f}",
                f"{report['tokens_per_second'] / 1e3:.0f}",
                f"{report['peak_gib']:.1f}",
                f"{report['answers']:.3f}",
                f"{measured['text_bits_per_byte']:.3f}",
                *(f"{measured['tasks'][task]['accuracy']:.0%}/{measured['tasks'][task]['loss']:.2f}" for task in tasks),
                *(_recall(measured["recall"].get(str(distance))) for distance in DISTANCES),
                f"{measured['mtp_agreement']:.0%}" if "mtp_agreement" in measured else "-",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)


def _recall(one: dict[str, float] | None) -> str:
    return "-" if one is None else f"{one['accuracy']:.0%}/{one['loss']:.2f}"


if __name__ == "__main__":
    main()
